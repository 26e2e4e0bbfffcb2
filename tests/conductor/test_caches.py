"""Eviction policies: by hand on small chains, and what must hold for all of them on random ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.caches import FIFO, LFU, LRU, NAMES, Belady, BlockCache, LengthAware, Survival, named
from moonpool.conductor.caches.returns import Returns, Visit


def play(cache: BlockCache, prompts: Sequence[Sequence[int]]) -> list[int]:
    return [cache.access(keys, float(i)).hits for i, keys in enumerate(prompts)]


def test_lru_lets_the_deepest_block_of_the_oldest_prompt_go_first() -> None:
    cache = LRU(4)
    assert play(cache, [[1, 2, 3], [1, 9]]) == [0, 1]
    change = cache.access([7], 2.0)
    assert change.evicted == [3]
    assert cache.depth([1, 2, 3]) == 2


def test_fifo_does_not_care_for_uses() -> None:
    assert play(FIFO(2), [[1], [2], [1], [3], [1]]) == [0, 0, 1, 0, 0]
    assert play(LRU(2), [[1], [2], [1], [3], [1]]) == [0, 0, 1, 0, 1]


def test_lfu_keeps_what_was_used_most() -> None:
    assert play(LFU(2), [[1], [1], [2], [3], [1]]) == [0, 1, 0, 0, 1]


def test_length_aware_lets_the_deepest_go() -> None:
    cache = LengthAware(3)
    play(cache, [[1, 2, 3], [4]])
    assert cache.depth([1, 2, 3]) == 2


def test_belady_keeps_what_comes_again_soonest() -> None:
    prompts = [[1], [2], [3], [1], [2], [3]]
    assert play(Belady(2, prompts), prompts) == [0, 0, 0, 1, 1, 0]
    assert play(LRU(2), prompts) == [0] * 6


@pytest.mark.parametrize("name", NAMES)
def test_cleared_is_empty(name: str) -> None:
    cache = named(name)(4)
    play(cache, [[1, 2, 3], [1, 2, 4]])
    cache.clear()
    assert len(cache) == 0
    assert play(cache, [[1, 2, 3], [1, 2, 3]]) == [0, 3]


@st.composite
def dialogues(draw: st.DrawFn) -> list[list[int]]:
    """Prompts whose ids are chained: a block has one parent only."""
    prompts: list[list[int]] = [[0]]
    fresh = 1
    for _ in range(draw(st.integers(1, 25))):
        base = draw(st.sampled_from(prompts))
        kept = base[: draw(st.integers(0, len(base)))]
        more = draw(st.integers(0 if kept else 1, 4))
        prompts.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return prompts


@pytest.mark.parametrize("name", [*NAMES, "belady"])
@settings(max_examples=25, deadline=None)
@given(prompts=dialogues(), capacity=st.integers(1, 12))
def test_what_is_held_is_what_came_and_did_not_go(name: str, prompts: list[list[int]], capacity: int) -> None:
    cache = Belady(capacity, prompts) if name == "belady" else named(name)(capacity)
    held: set[int] = set()
    for i, keys in enumerate(prompts):
        depth = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        change = cache.access(keys, 40.0 * i)
        assert change.hits == depth
        assert not held & set(change.added)
        assert held >= set(change.evicted)
        held = (held | set(change.added)) - set(change.evicted)
        assert len(cache) == len(held) <= capacity
        assert all((key in cache.held) == (key in held) for key in keys)


@settings(max_examples=25, deadline=None)
@given(prompts=dialogues(), capacity=st.integers(1, 12))
def test_survival_never_leaves_a_block_without_its_ancestors(prompts: list[list[int]], capacity: int) -> None:
    cache = Survival(capacity)
    parent = {key: before for keys in prompts for before, key in pairwise(keys)}
    for i, keys in enumerate(prompts):
        cache.access(keys, 40.0 * i)
        for key, before in parent.items():
            assert key not in cache.held or before in cache.held


def test_survival_learns_which_prompts_come_back() -> None:
    """Dialogues of two turns among prompts of the same age that never return, and are shorter: LRU keeps both alike."""
    prompts: list[list[int]] = []
    for i in range(400):
        talk = [1000 * i + n for n in range(1, 9)]
        prompts += [talk, [-10 * i - 1, -10 * i - 2]]
        if i >= 12:
            back = [1000 * (i - 12) + n for n in range(1, 9)]
            prompts.append([*back[:7], back[6] + 500])
    clever = sum(play(Survival(110), prompts))
    assert clever > 1.2 * sum(play(LRU(110), prompts))


def test_a_kind_that_returns_is_worth_more() -> None:
    returns = Returns()
    for i in range(60):
        often, never = Visit(10.0 * i, "often", 1, 1), Visit(10.0 * i, "never", 1, 1)
        returns.add(often, pooled=True)
        returns.add(never, pooled=True)
        returns.advance(10.0 * i + 5)
        returns.hit(often, 10.0 * i + 5)
    returns.advance(5000.0)
    returns.learn()
    assert returns.worth("often", 0) > 5 * returns.worth("never", 0)
