"""The conversion queue: bounded, single flight, late work dropped, oldest rule first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from moonpool.c2c.config import Rule
from moonpool.c2c.queue import ConversionQueue, Page

ALL = range(99)


def rule(deadline_s: float = 10.0) -> Rule:
    return cast(Rule, SimpleNamespace(deadline_s=deadline_s))


def page(index: int) -> Page:
    return Page(index, f"{index:032x}")


def test_pages_come_out_in_order_and_in_one_batch_of_one_rule() -> None:
    queue = ConversionQueue([rule(), rule()], capacity=10)
    for i in (1, 2, 3):
        assert queue.offer(0, page(i), now=0)
    assert queue.offer(1, page(1), now=0)
    batch = queue.take(8, now=1, ready=ALL)
    assert batch is not None
    assert (batch.rule, batch.pages) == (0, [page(1), page(2), page(3)])
    assert len(queue) == 1


def test_the_first_page_stays_native() -> None:
    queue = ConversionQueue([rule()], capacity=10)
    assert not queue.offer(0, page(0), now=0)
    assert queue.counts["first_page"] == 1


def test_single_flight_while_queued_and_while_converting() -> None:
    queue = ConversionQueue([rule(), rule()], capacity=10)
    assert queue.offer(0, page(1), now=0)
    assert not queue.offer(0, page(1), now=0)
    batch = queue.take(8, now=0, ready=ALL)
    assert batch is not None
    assert not queue.offer(0, page(1), now=0)
    assert queue.offer(1, page(1), now=0), "another rule's work is another flight"
    assert queue.counts["joined"] == 2
    queue.done(batch)
    assert queue.offer(0, page(1), now=0)


def test_overload_drops_and_counts() -> None:
    queue = ConversionQueue([rule()], capacity=2)
    taken = [queue.offer(0, page(i), now=0) for i in range(1, 6)]
    assert taken == [True, True, False, False, False]
    assert queue.counts["overload"] == 3


def test_late_pages_are_dropped_not_converted() -> None:
    queue = ConversionQueue([rule(deadline_s=1)], capacity=9)
    queue.offer(0, page(1), now=0)
    queue.offer(0, page(2), now=5)
    batch = queue.take(8, now=5.5, ready=ALL)
    assert batch is not None
    assert batch.pages == [page(2)]
    assert queue.counts["late"] == 1


def test_a_rule_whose_bundle_is_still_loading_keeps_its_pages() -> None:
    queue = ConversionQueue([rule(), rule()], capacity=9)
    queue.offer(0, page(1), now=0)
    assert queue.take(8, now=0, ready={1}) is None
    assert queue.take(8, now=0, ready={0, 1}) is not None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.sampled_from(["offer", "take", "done"])), max_size=60)
)
def test_never_over_capacity_and_never_two_flights_of_one_page(
    steps: list[tuple[int, int, str]],
) -> None:
    queue = ConversionQueue([rule(), rule(), rule()], capacity=5)
    flying = []
    for now, (r, i, what) in enumerate(steps):
        if what == "offer":
            queue.offer(r, page(i), now)
        elif what == "take":
            batch = queue.take(3, now, ALL)
            if batch:
                flying.append(batch)
        elif flying:
            queue.done(flying.pop(0))
        assert len(queue) <= 5
        pages = [(b.rule, p) for b in flying for p in b.pages]
        assert len(pages) == len(set(pages))
        assert queue.idle() == (not flying and not len(queue))
