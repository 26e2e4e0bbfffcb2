"""The registry against the plainest model there is: a list of ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import NotRegistered, Overlap, StaleRegion
from moonpool.transfer import Region, Registry

ARENA = 64
spans = st.tuples(st.integers(0, ARENA - 1), st.integers(1, 16)).map(lambda s: (s[0], min(s[1], ARENA - s[0])))
steps = st.lists(st.tuples(st.sampled_from(["register", "unregister", "find", "resolve"]), spans), max_size=60)


@given(steps)
def test_registry_does_what_a_list_of_ranges_would(steps: list[tuple[str, tuple[int, int]]]) -> None:
    arena = memoryview(bytearray(range(ARENA)))
    registry = Registry()
    base_region = registry.register(arena)
    base = base_region.address
    registry.unregister(base_region)
    held: dict[int, Region] = {}
    gone: list[Region] = []
    for verb, (start, size) in steps:
        if verb == "register":
            if any(s < start + size and start < s + r.size for s, r in held.items()):
                with pytest.raises(Overlap):
                    registry.register(arena[start : start + size])
            else:
                held[start] = registry.register(arena[start : start + size])
        elif verb == "unregister" and start in held:
            gone.append(held.pop(start))
            registry.unregister(gone[-1])
        elif verb == "find":
            inside = [(r, start - s) for s, r in held.items() if s <= start and start + size <= s + r.size]
            if inside:
                assert registry.find(base + start, size) == inside[0]
            else:
                with pytest.raises(NotRegistered):
                    registry.find(base + start, size)
        elif verb == "resolve":
            for s, r in held.items():
                assert bytes(registry.resolve(r.id, r.generation, 0, r.size)) == bytes(arena[s : s + r.size])
            for r in gone:
                with pytest.raises((NotRegistered, StaleRegion)):
                    registry.resolve(r.id, r.generation, 0, 1)
        assert registry.regions() == [held[s] for s in sorted(held)]
        assert len({r.id for r in held.values()}) == len(held)
    assert len({r.generation for r in [*held.values(), *gone]}) == len(held) + len(gone)
