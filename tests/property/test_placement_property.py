"""Where a new object goes, against the rule in words."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from moonpool.store.placement import HOME_KEEPS, order
from moonpool.types import MessengerInfo

NAMES = "abcdef"


def member(name: str, capacity: int, used: int, draining: bool) -> MessengerInfo:
    return MessengerInfo(name=name, socket="", capacity=capacity, used=min(used, capacity), draining=draining)


members = st.lists(
    st.builds(
        member, st.sampled_from(NAMES), st.sampled_from([0, 1, 100, 10**12]), st.integers(0, 10**12), st.booleans()
    ),
    unique_by=lambda m: m.name,
    max_size=6,
)
preferred = st.lists(st.sampled_from(NAMES + "x"), unique=True)


def free(m: MessengerInfo) -> float:
    return (m.capacity - m.used) / m.capacity if m.capacity else 0.0


@given(members, st.sampled_from(NAMES + "x"), preferred, st.integers())
def test_the_home_follows_the_preferred_unless_it_is_full_and_another_is_not(
    there: list[MessengerInfo], home: str, preferred: list[str], seed: int
) -> None:
    got = order(there, home=home, preferred=preferred, random=Random(seed))
    open_ = {m.name: m for m in there if not m.draining}
    assert sorted(got) == sorted(open_)
    first = [p for p in preferred if p in open_]
    assert got[: len(first)] == first
    rest = [name for name in got if name not in first]
    if home in rest:
        others = [open_[n] for n in rest if n != home]
        if free(open_[home]) > HOME_KEEPS + 1e-9 or all(free(m) < HOME_KEEPS - 1e-9 for m in others):
            assert rest[0] == home


@given(members, st.sampled_from(NAMES), preferred, st.integers())
def test_the_same_chance_gives_the_same_order(
    there: list[MessengerInfo], home: str, preferred: list[str], seed: int
) -> None:
    first, again = (order(there, home=home, preferred=preferred, random=Random(seed)) for _ in range(2))
    assert first == again
