"""Where new objects go."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from moonpool.store.placement import order
from moonpool.types import MessengerInfo


def member(name: str, used: int, *, draining: bool = False) -> MessengerInfo:
    return MessengerInfo(name=name, socket="", capacity=100, used=used, draining=draining)


members = st.lists(
    st.builds(member, st.sampled_from("abcdef"), st.integers(0, 100), draining=st.booleans()),
    unique_by=lambda m: m.name,
    max_size=6,
)


@given(members, st.sampled_from("abcdefx"), st.lists(st.sampled_from("abcdefx"), unique=True), st.integers())
def test_everyone_who_takes_objects_is_tried_once_the_preferred_first(
    there: list[MessengerInfo], home: str, preferred: list[str], seed: int
) -> None:
    got = order(there, home=home, preferred=preferred, random=Random(seed))
    open_ = [m.name for m in there if not m.draining]
    assert sorted(got) == sorted(open_)
    first = [p for p in preferred if p in open_]
    assert got[: len(first)] == first


def test_the_home_comes_first_while_it_has_room() -> None:
    there = [member("a", 0), member("home", 85), member("b", 0)]
    assert all(order(there, home="home", random=Random(i))[0] == "home" for i in range(50))


def test_a_full_home_gives_way_to_an_emptier_one_but_not_to_another_full_one() -> None:
    full = [member("home", 95), member("a", 95)]
    assert all(order(full, home="home", random=Random(i))[0] == "home" for i in range(50))
    emptier = [member("home", 95), member("a", 10)]
    assert Counter(order(emptier, home="home", random=Random(i))[0] for i in range(200))["a"] > 100


def test_an_empty_newcomer_gets_more_than_the_others_but_not_everything() -> None:
    """D5"""
    there = [member("a", 90), member("b", 90), member("new", 0)]
    random = Random(1)
    shares = Counter(order(there, random=random)[0] for _ in range(300))
    assert 0.34 < shares["new"] / 300 <= 0.6
    assert min(shares["a"], shares["b"]) > 30
