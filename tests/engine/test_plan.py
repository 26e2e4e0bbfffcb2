"""The prefix plan: for every prompt and every state of the pool its rules hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.plan import Compute, Kind, Load, PrefixPlan, plan_prefix

N, C = Kind.NATIVE, Kind.CONVERTED
P = 4


@st.composite
def plans(draw: st.DrawFn) -> tuple[PrefixPlan, list[Kind | None], int]:
    tokens = draw(st.integers(1, 30))
    pages = tokens // P
    full: st.SearchStrategy[list[Kind | None]] = st.lists(st.sampled_from([N, C]), min_size=pages, max_size=pages)
    holed: st.SearchStrategy[list[Kind | None]] = st.lists(st.sampled_from([N, C, N, C, None]), max_size=pages)
    found = draw(st.one_of(full, holed))
    must = draw(st.one_of(st.just(1), st.integers(1, tokens)))
    return plan_prefix(tokens, P, found, must_compute=must), found, must


@given(plans())
def test_steps_cover_the_prompt_once_and_end_computing(case: tuple[PrefixPlan, list[Kind | None], int]) -> None:
    plan, _, must = case
    at = 0
    for step in plan.steps:
        start, end = (step.start, step.end) if isinstance(step, Compute) else (step.first * P, step.end * P)
        assert start == at < end
        at = end
    assert at == plan.tokens
    last = plan.steps[-1]
    assert isinstance(last, Compute)
    assert last.end - last.start >= must
    assert plan.count(N) + plan.count(C) + plan.computed_tokens == plan.tokens


@given(plans())
def test_only_what_was_found_is_loaded_and_the_ends_stay_native(
    case: tuple[PrefixPlan, list[Kind | None], int],
) -> None:
    plan, found, _ = case
    for index, kind in plan.loaded_pages:
        assert found[index] is kind
        if kind is C:
            assert 0 < index < plan.tokens // P - 1
    for step in plan.steps[:-1]:
        assert step == Compute(0, P) or isinstance(step, Load), "only page 0 is computed in front of loaded pages"


@given(plans())
def test_the_plan_is_the_longest_allowed_prefix(case: tuple[PrefixPlan, list[Kind | None], int]) -> None:
    plan, found, must = case
    reached = max((i + 1 for i, _ in plan.loaded_pages), default=0)
    if reached == 0 and len(found) > 1:  # then page 0 is of no use, and neither is page 1 behind a computed page 0
        reached = 1 if found[0] is not N else 0
    if reached < len(found) and (reached + 1) * P <= plan.tokens - must:
        stopper = found[reached]
        assert stopper is None or (stopper is C and reached in (0, plan.tokens // P - 1))


@given(plans(), st.integers(0, 40))
def test_nothing_behind_a_converted_page_is_storable(
    case: tuple[PrefixPlan, list[Kind | None], int], answer: int
) -> None:
    plan, _, _ = case
    length = plan.tokens + answer
    storable = plan.storable(length)
    first = next((i for i, k in plan.loaded_pages if k is C), None)
    loaded = {i for i, _ in plan.loaded_pages}
    assert not loaded & set(storable)
    if first is None:
        assert sorted(loaded | set(storable)) == list(range(length // P))
    else:
        assert all(i < first for i in storable)


@pytest.mark.parametrize(
    ("tokens", "found", "steps"),
    [
        (20, [], [Compute(0, 20)]),
        (20, [N, N, N, N, N], [Load(0, 4, N), Compute(16, 20)]),
        (21, [N, N, N, N, N], [Load(0, 5, N), Compute(20, 21)]),
        (21, [None, C, C, C, C], [Compute(0, 4), Load(1, 4, C), Compute(16, 21)]),
        (21, [C, C, N, None, C], [Compute(0, 4), Load(1, 2, C), Load(2, 3, N), Compute(12, 21)]),
        (21, [None, N, None], [Compute(0, 4), Load(1, 2, N), Compute(8, 21)]),
        (21, [None, None, N], [Compute(0, 21)]),
        (4, [N], [Compute(0, 4)]),
        (1, [], [Compute(0, 1)]),
    ],
)
def test_examples(tokens: int, found: list[Kind | None], steps: list[Compute | Load]) -> None:
    assert list(plan_prefix(tokens, P, found).steps) == steps
