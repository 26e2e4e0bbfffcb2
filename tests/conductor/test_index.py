"""The prefix index against a dictionary of sets, and what it promises beside lookups."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.chain import Context, KeyChain, TokenChain
from moonpool.conductor.index import Plane, PrefixIndex
from moonpool.conductor.index.table import BlockTable
from moonpool.errors import ConfigError

NAMES = [f"i{n}" for n in range(5)]
KEYS = [random.Random(i).getrandbits(64) | 1 for i in range(500, 512)]


def index(**options: int) -> PrefixIndex:
    found = PrefixIndex(random.Random(1), **options)
    for name in NAMES:
        found.register(name)
    return found


def depth(held: set[int], chain: list[int]) -> int:
    return next((i for i, k in enumerate(chain) if k not in held), len(chain))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "remove", "clear", "unregister"]),
            st.sampled_from(NAMES),
            st.lists(st.sampled_from(KEYS), max_size=8),
        ),
        max_size=25,
    ),
    st.lists(st.sampled_from(KEYS), max_size=12, unique=True),
)
def test_any_history_gives_what_a_dictionary_of_sets_gives(
    history: list[tuple[str, str, list[int]]], chain: list[int]
) -> None:
    found = PrefixIndex(random.Random(1))
    naive: dict[str, set[int]] = {n: set() for n in NAMES}
    for name in NAMES:
        found.register(name, closed=False)  # any holes there may be
    for what, name, keys in history:
        match what:
            case "insert":
                found.insert(name, keys)
                naive[name] |= set(keys)
            case "remove":
                found.remove(name, keys)
                naive[name] -= set(keys)
            case "clear":
                found.clear(name)
                naive[name] = set()
            case "unregister":
                found.unregister(name)
                found.register(name, closed=False)
                naive[name] = set()
    want = {n: d for n, held in naive.items() if (d := depth(held, chain))}
    assert {n: d.blocks for n, d in found.matches(KeyChain(chain)).items()} == want
    assert found.blocks <= len(KEYS)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=5, max_size=5), st.integers(1, 40))
def test_closed_holders_are_found_by_few_probes(depths: list[int], length: int) -> None:
    keys = [random.Random(i).getrandbits(64) | 1 for i in range(40)]
    found = index()
    for name, d in zip(NAMES, depths, strict=True):
        found.insert(name, keys[:d])
    want = {n: min(d, length) for n, d in zip(NAMES, depths, strict=True) if d}
    assert {n: d.blocks for n, d in found.matches(KeyChain(keys[:length])).items()} == want


class Counted:
    """A chain that counts how many keys were asked for."""

    def __init__(self, keys: list[int]) -> None:
        self._keys, self.asked = keys, set[int]()

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, at: int) -> int:
        self.asked.add(at)
        return self._keys[at]

    def keys(self) -> list[int]:
        self.asked.update(range(len(self)))
        return self._keys


def test_a_long_prompt_costs_a_logarithm() -> None:
    keys = [random.Random(i).getrandbits(64) | 1 for i in range(8192)]
    found = index()
    found.insert("i0", np.array(keys[:5000], np.uint64))
    cold, warm = Counted([k ^ 2 for k in keys]), Counted(keys)
    assert found.matches(cold) == {}
    assert len(cold.asked) == 1
    assert found.matches(warm)["i0"].blocks == 5000
    assert len(warm.asked) < 40


def test_a_hole_is_noticed_and_walked_from_then_on() -> None:
    keys = [random.Random(i).getrandbits(64) | 1 for i in range(64)]
    found = index()
    found.insert("i0", keys)
    found.remove("i0", keys[8:60])
    for _ in range(20):  # two probes each: sooner or later one falls into the hole
        found.matches(KeyChain(keys))
    assert found.matches(KeyChain(keys))["i0"].blocks == 8


def test_planes_are_told_apart_and_add_up() -> None:
    found = index()
    found.insert("i0", KEYS[:3])
    found.insert("i0", KEYS[:9], Plane.CPU)
    assert found.matches(KeyChain(KEYS))["i0"] == (9, 3, 9)
    found.remove("i0", KEYS[:3])
    assert found.matches(KeyChain(KEYS))["i0"] == (9, 0, 9)


def test_guesses_end_by_time_and_by_room() -> None:
    found = index()
    found.guess("i0", KEYS[:4], now=0, for_s=10)
    found.guess("i0", KEYS[:2], now=5, for_s=10)
    found.expire(11)
    assert found.matches(KeyChain(KEYS))["i0"].blocks == 2
    found.expire(16)
    assert found.matches(KeyChain(KEYS)) == {}
    assert found.blocks == 0
    found.register("i1", guess_blocks=5)
    found.guess("i1", KEYS[:4], now=0)
    found.guess("i1", KEYS[6:9], now=0)
    assert found.matches(KeyChain(KEYS))["i1"].blocks == 2, "the deepest of the older prompt went"
    found.insert("i1", KEYS[:4])
    found.expire(1e9)
    assert found.matches(KeyChain(KEYS))["i1"].blocks == 4, "what an event has confirmed stays"


def test_what_waits_is_not_there_yet() -> None:
    found = index()
    found.insert("i0", KEYS[:3])
    found.guess("i0", KEYS[:7], now=0)
    assert found.matches(KeyChain(KEYS))["i0"] == (7, 3, 3)
    found.guess("i0", KEYS[:7], now=1, plane=Plane.SENT)
    assert found.matches(KeyChain(KEYS))["i0"] == (7, 3, 7)
    found.forget("i0", KEYS)
    assert found.matches(KeyChain(KEYS))["i0"] == (7, 3, 7)


def test_key_zero_is_a_key() -> None:
    found = index()
    found.insert("i0", [0])
    found.insert("i1", np.array([0, *KEYS * 5], np.uint64)[:1])
    assert set(found.matches(KeyChain([0]))) == {"i0", "i1"}
    assert found.matches(KeyChain([5])) == {}


def test_an_instance_that_left_takes_no_time_and_leaves_nothing() -> None:
    found = index()
    for i in range(300):
        name = f"x{i}"
        found.register(name)
        found.insert(name, [*KEYS, i + 100])
        found.unregister(name)
    assert found.matches(KeyChain(KEYS)) == {}
    found.register("new")
    assert found.matches(KeyChain(KEYS)) == {}, "a slot that is used again holds nothing of its last owner"
    assert found.blocks < 80, "swept"


def test_what_the_whole_fleet_holds() -> None:
    found = index()
    for name in NAMES:
        found.insert(name, KEYS[:2])
    found.insert("i0", KEYS[:7])
    assert found.shared_depth(KeyChain(KEYS), len(NAMES)) == 2
    assert found.shared_depth(KeyChain(KEYS[::-1]), len(NAMES)) == 0


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    found = PrefixIndex(random.Random(1), max_bytes=1 << 18)
    found.register("a")
    numbers = np.random.default_rng(0).integers(1, 2**63, 40_000, np.uint64)
    for start in range(0, len(numbers), 500):
        found.insert("a", numbers[start : start + 500])
    assert found.nbytes <= 1 << 19
    assert found.shed > 0
    assert found.matches(KeyChain([int(numbers[-1])])), "the newest is there"
    assert not found.matches(KeyChain([int(numbers[0])]))
    with pytest.raises(ConfigError, match="index too small"):
        PrefixIndex(random.Random(1), max_bytes=10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=60, max_size=200, unique=True), st.integers(0, 60))
def test_a_run_through_numpy_is_one_key_after_another(keys: list[int], drop: int) -> None:
    """Small keys collide in a small table, as hashes rarely do."""
    run, single = BlockTable(64), BlockTable(64)
    for table in (run, single):
        for k in keys[:20]:
            table.change(k, lambda s: 5)
    run.change_run(np.array(keys, np.uint64), lambda s: s + 1)
    for k in keys:
        single.change(k, lambda s: s + 1)
    gone = keys[:drop]
    run.change_run(np.array(gone, np.uint64), lambda s: 0)
    for k in gone:
        single.change(k, lambda s: 0)
    assert [run.get(k) for k in range(401)] == [single.get(k) for k in range(401)]
    assert run.live == single.live == len(keys) - drop


def test_a_chain_hashes_only_what_is_asked_for_and_keeps_contexts_apart() -> None:
    tokens = list(range(100))
    one = TokenChain(tokens, Context("t", "m", block_size=16))
    assert len(one) == 6
    assert one.key(3) == TokenChain(tokens, Context("t", "m", block_size=16)).key(3)
    assert TokenChain([*tokens[:64], 7], Context("t", "m", block_size=16)).key(3) == one.key(3)
    others = [
        Context("u", "m"),
        Context("t", "n"),
        Context("t", "m", lora="l"),
        Context("t", "m", salt="s"),
        Context("tm", ""),
    ]
    assert len({one.key(0), *(TokenChain(tokens, c).key(0) for c in others)}) == 6
    with pytest.raises(IndexError):
        one.key(6)
    with pytest.raises(ConfigError, match="token ids"):
        TokenChain([-1], Context("t", "m"))
