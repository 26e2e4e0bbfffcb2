"""The allocator against a model that knows only which bytes are taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.store.messenger.allocator import ALIGN, Allocator, rounded

CAPACITY = 64 * ALIGN
Op = tuple[str, int]
ops = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "free"]), st.integers(0, 20 * ALIGN)), min_size=1, max_size=80
)


@settings(max_examples=150, deadline=None)
@given(ops)
def test_blocks_never_overlap_and_all_space_comes_back(steps: list[Op]) -> None:
    allocator = Allocator(CAPACITY)
    held: list[tuple[int, int]] = []
    for what, n in steps:
        if what == "free" and held:
            allocator.free(*held.pop(n % len(held)))
        elif what == "allocate":
            offset = allocator.allocate(n)
            if offset is None:
                assert rounded(n) > allocator.largest_free, "refused although a block would do"
            else:
                held.append((offset, n))
        taken = [b for o, n in held for b in range(o // ALIGN, (o + rounded(n)) // ALIGN)]
        assert len(taken) == len(set(taken))
        assert allocator.used == len(taken) * ALIGN
        assert allocator.largest_free == _longest_gap(set(taken)) * ALIGN
        allocator.check_integrity(held)
    for block in held:
        allocator.free(*block)
    assert (allocator.used, allocator.largest_free) == (0, CAPACITY)


def _longest_gap(taken: set[int]) -> int:
    best = run = 0
    for block in range(CAPACITY // ALIGN):
        run = 0 if block in taken else run + 1
        best = max(best, run)
    return best


@given(st.integers(0, 4 * ALIGN))
def test_any_capacity_is_rounded_down(capacity: int) -> None:
    allocator = Allocator(capacity)
    allocator.check_integrity([])
    assert allocator.largest_free == capacity // ALIGN * ALIGN
