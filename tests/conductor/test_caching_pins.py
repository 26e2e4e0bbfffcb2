"""The store of pins against a plain model of it, and its edges."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.caching.pin import Content, Pin, PinLimits, Source, Wanted
from moonpool.conductor.caching.pins import PinStore
from moonpool.conductor.caching.tags import Tags
from moonpool.conductor.chain import KeyChain
from moonpool.errors import MoonpoolError, NoSpace, NotFound, QuotaExceeded, RequestError
from tests.conductor.fleet import chain

LIMITS = PinLimits(owner_pins=3, owner_tokens=2000, pins=5, max_ttl_s=50, keep_s=20)


def wanted(keys: KeyChain, expires: float, owner: str = "a", **more: Any) -> Wanted:
    fields = {"source": "moonshot", "model": "m", "tokens": 100 * len(keys) + 5, "block_size": 100, **more}
    return Wanted(owner=owner, chain=keys, expires=expires, **fields)


def make(limits: PinLimits = LIMITS) -> PinStore:
    return PinStore(random.Random(1), limits)


def test_the_longest_living_beginning_is_found() -> None:
    pins, long = make(), chain(8)
    short = pins.create(wanted(KeyChain(long.keys()[:2]), 10), 0)
    deep = pins.create(wanted(KeyChain(long.keys()[:5]), 5), 0)
    assert pins.match("a", "m", long, 1) == deep
    assert pins.match("a", "m", KeyChain(long.keys()[:4]), 1) == short
    assert pins.match("a", "m", long, 5) == short, "the deep one is over"
    assert pins.match("a", "m", long, 10) is None
    assert pins.match("b", "m", long, 1) is None
    assert pins.match("a", "other", long, 1) is None
    assert pins.match("a", "m", chain(8, seed=5), 1) is None


def test_states() -> None:
    pins = make()
    pin = pins.create(wanted(chain(3), 10, replicas=2), 0)
    assert pin.state == "pending"
    for holders, state in ((1, "pending"), (2, "ready"), (1, "ready"), (0, "pending"), (3, "ready")):
        found = pins.observe(pin.id, holders, 1)
        assert found is not None
        assert found.state == state, holders
    assert pins.failed(pin.id, "late", 2).state == "ready", "what is held did not fail"  # type: ignore[union-attr]
    assert [p.id for p in pins.expire(10)] == [pin.id]
    assert pins.get("a", pin.id, 10).state == "inactive"
    assert pins.observe(pin.id, 3, 11).state == "inactive"  # type: ignore[union-attr]
    assert pins.usage("a").pins == 0
    assert pins.reset_ttl("a", pin.id, 30, 11).state == "pending"
    assert pins.usage("a").pins == 1
    pins.failed(pin.id, "no engine", 12)
    assert (pins.get("a", pin.id, 12).state, pins.get("a", pin.id, 12).error) == ("error", "no engine")
    assert pins.match("a", "m", chain(3), 12) is None
    pins.expire(30)
    with pytest.raises(NotFound):
        pins.get("a", pin.id, 50)
    assert (len(pins), pins.nbytes) == (0, 0)


def test_what_is_saved_is_what_was_cached_and_pinned() -> None:
    pins = make()
    pin = pins.create(wanted(chain(3), 10), 0)
    assert [pins.used(pin.id, cached, 1) for cached in (0, 200, 5000)] == [0, 200, 300]
    found = pins.get("a", pin.id, 1)
    assert (found.uses, found.saved) == (3, 500)
    assert pins.used(pin.id, 300, 10) == 0, "it is over"


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (wanted(KeyChain([]), 10), RequestError),
        (wanted(chain(1), 0), RequestError),
        (wanted(chain(1), float("nan")), RequestError),
        (wanted(chain(20), 10), QuotaExceeded),
        (wanted(chain(1), 10, content=Content([{"content": "x" * 2000}])), NoSpace),
    ],
)
def test_what_is_refused(ask: Wanted, error: type[MoonpoolError]) -> None:
    pins = make(PinLimits(owner_tokens=2000, content_bytes=1000))
    with pytest.raises(error):
        pins.create(ask, 0)
    assert (len(pins), pins.nbytes, pins.usage("a").pins) == (0, 0, 0)


def test_quotas() -> None:
    pins = make()
    for seed in range(3):
        pins.create(wanted(chain(2, seed), 10), 0)
    with pytest.raises(QuotaExceeded, match="too many caches"):
        pins.create(wanted(chain(2, 9), 10), 0)
    for seed in range(2):
        pins.create(wanted(chain(2, seed), 10, "b"), 0)
    with pytest.raises(NoSpace) as full:
        pins.create(wanted(chain(2, 9), 10, "c"), 0)
    assert not isinstance(full.value, QuotaExceeded)
    with pytest.raises(NoSpace):
        pins.create(wanted(chain(2, 9), 20, "a"), 10)  # expired ones still take places of the store, for a while
    pins.create(wanted(chain(2, 9), 40, "a"), 30)


def test_times_are_capped_and_do_not_pile_up() -> None:
    pins = make()
    pin = pins.create(wanted(chain(1), 1e9), 0)
    assert pin.expires == 50
    for i in range(1000):
        pins.reset_ttl("a", pin.id, i * 0.01 + 20, i * 0.01)
    assert len(pins._times) < 100
    assert [p.id for p in pins.expire(30)] == [pin.id]


def test_the_same_beginning_again_is_one_pin_and_a_longer_one_takes_its_place() -> None:
    pins, long = make(), chain(8)
    first = pins.ensure(wanted(KeyChain(long.keys()[:3]), 20, source="openai", name="k"), 0)
    again = pins.ensure(wanted(KeyChain(long.keys()[:3]), 10, source="openai", name="k"), 1)
    assert (again.id, again.expires) == (first.id, 20)
    pins.used(first.id, 200, 1)
    grown = pins.grow(wanted(long, 40, source="openai", name="k"), 2)
    assert (len(pins), grown.blocks, grown.saved, grown.created) == (1, 8, 200, 0)
    pins.grow(wanted(KeyChain([*long.keys(), 5]), 40, source="openai", name="other"), 2)
    assert len(pins) == 2, "another key's"


def test_pages() -> None:
    pins = make(PinLimits())
    made = [pins.create(wanted(chain(1, s), 100, metadata={"n": str(s % 2)}), s) for s in range(6)]
    pins.create(wanted(chain(1, 7), 100, "b"), 1)
    pins.create(wanted(chain(1, 7), 100, source="gemini"), 1)
    ids = [p.id for p in made]

    def page(**more: Any) -> tuple[list[int], bool]:
        found = pins.page("a", "moonshot", 9, **more)
        return [ids.index(p.id) for p in found.pins], found.more

    assert page(limit=4) == ([5, 4, 3, 2], True)
    assert page(limit=4, after=ids[2]) == ([1, 0], False)
    assert page(before=ids[3]) == ([5, 4], False)
    assert page(newest_first=False, after=ids[1], before=ids[4]) == ([2, 3], False)
    assert page(limit=2, keep=lambda p: p.metadata["n"] == "1") == ([5, 3], True)
    with pytest.raises(NotFound):
        page(after="nobody")


def test_tags_point_and_are_few() -> None:
    tags = Tags(most=2)
    tags.set("a", "x", "1", 0)
    tags.set("a", "x", "2", 1)
    tags.set("a", "y.z-1", "2", 2)
    assert tags.get("a", "x").pin == "2"
    with pytest.raises(QuotaExceeded):
        tags.set("a", "z", "1", 3)
    for bad in ("", "1x", "ä", "a b", "x" * 129):
        with pytest.raises(RequestError):
            tags.set("b", bad, "1", 3)
    tags.forget("a", "2")
    assert tags.of("a") == []
    with pytest.raises(NotFound):
        tags.get("a", "x")


step = st.one_of(
    st.tuples(st.just("create"), st.sampled_from("ab"), st.integers(1, 6), st.integers(0, 2), st.integers(1, 60)),
    st.tuples(st.just("delete"), st.integers(0, 20)),
    st.tuples(st.just("reset"), st.integers(0, 20), st.integers(1, 60)),
    st.tuples(st.just("fail"), st.integers(0, 20)),
    st.tuples(st.just("wait"), st.integers(1, 30)),
)


class Model:
    """Every rule in the plainest way: lists, and a look at all of them."""

    def __init__(self) -> None:
        self.pins: dict[str, tuple[str, tuple[int, ...], float, bool]] = {}
        """Id → owner, keys, end, failed."""

    def alive(self, id_: str, now: float) -> bool:
        _, _, end, failed = self.pins[id_]
        return end > now and not failed

    def match(self, owner: str, keys: tuple[int, ...], now: float) -> int:
        return max(
            (
                len(k)
                for i, (o, k, _, _) in self.pins.items()
                if o == owner and keys[: len(k)] == k and self.alive(i, now)
            ),
            default=0,
        )


@settings(max_examples=150, deadline=None)
@given(st.lists(step, max_size=40))
def test_against_a_plain_model(steps: list[tuple[Any, ...]]) -> None:
    limits = PinLimits(owner_pins=4, owner_tokens=10**6, pins=8, max_ttl_s=50, keep_s=20)
    pins, model, now, made = make(limits), Model(), 0.0, list[Pin]()
    for what, *more in steps:
        pin = made[more[0] % len(made)] if what in ("delete", "reset", "fail") and made else None
        if what == "create":
            owner, blocks, seed, ttl = more
            keys = KeyChain(chain(6, seed, prefix=2).keys()[:blocks])
            living = [i for i in model.pins if model.pins[i][0] == owner and model.alive(i, now)]
            if len(living) >= 4 or len(model.pins) >= 8:
                with pytest.raises(NoSpace):
                    pins.create(wanted(keys, now + ttl, owner), now)
            else:
                made.append(pins.create(wanted(keys, now + ttl, owner), now))
                model.pins[made[-1].id] = (owner, tuple(keys.keys()), now + min(ttl, 50), False)
        elif what == "wait":
            now += more[0]
        elif pin is not None and pin.id in model.pins:
            owner, keys_, end, failed = model.pins[pin.id]
            if what == "delete":
                pins.delete(owner, pin.id, now)
                del model.pins[pin.id]
            elif what == "fail":
                pins.failed(pin.id, "why", now)
                model.pins[pin.id] = (owner, keys_, end, failed or end > now)
            else:
                living = [i for i in model.pins if model.pins[i][0] == owner and model.alive(i, now)]
                if model.alive(pin.id, now) or len(living) < 4:
                    pins.reset_ttl(owner, pin.id, now + more[1], now)
                    model.pins[pin.id] = (owner, keys_, now + min(more[1], 50), False)
        model.pins = {i: p for i, p in model.pins.items() if p[2] + 20 > now}
        pins.expire(now)
        assert {p.id for p in pins} == set(model.pins)
        for owner in "ab":
            living = [i for i in model.pins if model.pins[i][0] == owner and model.alive(i, now)]
            assert pins.usage(owner).pins == len(living)
            for seed in range(3):
                found = pins.match(owner, "m", chain(6, seed, prefix=2), now)
                assert (found.blocks if found else 0) == model.match(owner, tuple(chain(6, seed, prefix=2).keys()), now)
    for pin in list(pins):
        pins.delete(pin.owner, pin.id, now)
    assert (len(pins), pins.nbytes, pins._usage, pins._ends) == (0, 0, {}, {})


def test_sources_do_not_see_each_other() -> None:
    pins = make()
    source: Source = "gemini"
    pin = pins.create(wanted(chain(2), 10, source=source), 0)
    with pytest.raises(NotFound):
        pins.get("a", pin.id, 0, "moonshot")
    assert pins.match("a", "m", chain(2), 0, "moonshot") is None
    assert pins.match("a", "m", chain(2), 0) == pin
