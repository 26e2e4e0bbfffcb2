"""Registered memory: what is refused, and who waits for whom."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from moonpool.errors import DeadlineExceeded, MoonpoolError, NotRegistered, Overlap, StaleRegion, TransferError
from moonpool.testing.leaks import eventually
from moonpool.transfer import Registry
from moonpool.transfer.registry import BY_ADDRESS, Piece, Span


def test_memory_that_was_never_registered_is_refused_by_its_range() -> None:
    registry = Registry()
    region = registry.register(bytearray(4096))
    far = region.address + (1 << 40)
    with pytest.raises(NotRegistered) as refused:
        registry.find(far, 16)
    assert refused.value.key == f"[{far:#x}, {far + 16:#x})"
    with pytest.raises(NotRegistered):
        registry.resolve(region.id + 1, region.generation, 0, 1)


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (1, 1)])
def test_a_partly_registered_range_is_refused_by_its_range(before: int, after: int) -> None:
    registry = Registry()
    region = registry.register(memoryview(bytearray(4096))[1024:2048])
    start, size = region.address - before, region.size + before + after
    with pytest.raises(NotRegistered) as refused:
        registry.find(start, size)
    assert refused.value.key == f"[{start:#x}, {start + size:#x})"
    assert registry.find(region.address, region.size) == (region, 0)


def test_a_range_over_two_neighbouring_regions_is_refused_not_half_copied() -> None:
    arena = memoryview(bytearray(8192))
    registry = Registry()
    first, second = registry.register(arena[:4096]), registry.register(arena[4096:])
    with pytest.raises(NotRegistered):
        registry.find(first.address + 4000, 200)
    assert registry.find(second.address, 4096) == (second, 0)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (10 << 20) + 3])
def test_a_region_has_any_size_exactly(size: int) -> None:
    registry = Registry()
    region = registry.register(bytearray(size))
    assert region.size == size
    assert len(registry.resolve(region.id, region.generation, 0, size)) == size
    with pytest.raises(NotRegistered):
        registry.resolve(region.id, region.generation, 0, size + 1)


def test_an_empty_registration_is_refused_and_poisons_nothing() -> None:
    registry = Registry()
    with pytest.raises(TransferError):
        registry.register(bytearray())
    region = registry.register(bytearray(1 << 20))
    assert len(registry.resolve(region.id, region.generation, 0, 1 << 20)) == 1 << 20


def test_scattered_memory_is_refused() -> None:
    with pytest.raises(TransferError):
        Registry().register(np.zeros((8, 8), np.uint8)[:, ::2])


@pytest.mark.parametrize(("start", "stop"), [(0, 1025), (2047, 4096), (1200, 1300), (0, 4096), (1024, 2048)])
def test_overlapping_registrations_are_refused(start: int, stop: int) -> None:
    arena = memoryview(bytearray(4096))
    registry = Registry()
    registry.register(arena[1024:2048])
    with pytest.raises(Overlap):
        registry.register(arena[start:stop])
    registry.register(arena[:1024])
    registry.register(arena[2048:])


def test_freed_and_reused_memory_is_another_generation() -> None:
    registry = Registry()
    arena = bytearray(4096)
    old = registry.register(arena)
    registry.unregister(old)
    new = registry.register(arena)
    assert (new.id, new.address) == (old.id, old.address)
    with pytest.raises(StaleRegion):
        registry.resolve(old.id, old.generation, 0, 16)
    found = registry.use([Span(BY_ADDRESS, old.generation, new.address, 16)], lambda: None).found[0]
    assert isinstance(found, StaleRegion)
    assert len(registry.resolve(new.id, new.generation, 0, 16)) == 16


def test_generations_of_two_processes_differ() -> None:
    regions = {Registry().register(bytearray(16)).generation for _ in range(8)}
    assert len(regions) == 8


def test_unregistering_twice_is_an_error_not_a_crash() -> None:
    registry = Registry()
    region = registry.register(bytearray(16))
    registry.unregister(region)
    with pytest.raises(NotRegistered):
        registry.unregister(region)
    registry.register(bytearray(16))
    with pytest.raises(NotRegistered):
        registry.unregister(region)


def test_unregister_waits_for_the_transfer_under_way() -> None:
    registry = Registry()
    region = registry.register(bytearray(b"x" * 16))
    cancelled = threading.Event()
    use = registry.use([Span(region.id, region.generation, 0, 16)], cancelled.set)
    thread = threading.Thread(target=registry.unregister, args=(region,), kwargs={"wait_s": 30})
    thread.start()
    assert eventually(lambda: not registry.regions())
    found = registry.use([Span(region.id, region.generation, 0, 16)], lambda: None).found[0]
    assert isinstance(found, NotRegistered)  # nothing new begins
    piece = use.found[0]
    assert isinstance(piece, Piece)
    assert bytes(piece.view) == b"x" * 16
    assert thread.is_alive()
    use.release()
    thread.join()
    assert not cancelled.is_set()


def test_unregister_cancels_a_transfer_that_takes_too_long() -> None:
    registry = Registry()
    region = registry.register(bytearray(16))
    use = registry.use([Span(region.id, region.generation, 0, 16)], lambda: use.release())
    registry.unregister(region, wait_s=0)
    assert registry.regions() == []


def test_memory_under_a_transfer_that_does_not_end_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.transfer.registry._CANCELLED_S", 0.01)
    registry = Registry()
    region = registry.register(bytearray(16))
    use = registry.use([Span(region.id, region.generation, 0, 16)], lambda: None)
    with pytest.raises(DeadlineExceeded):
        registry.unregister(region, wait_s=0)
    assert registry.regions() == [region]
    use.release()
    registry.unregister(region)


def test_memory_is_its_owners_again_after_unregister() -> None:
    registry = Registry()
    arena = bytearray(16)
    region = registry.register(arena)
    with registry.use([Span(region.id, region.generation, 0, 8)], lambda: None):
        pass
    with pytest.raises(BufferError):
        arena.extend(b"x")
    registry.unregister(region)
    arena.extend(b"x")


def test_a_read_only_buffer_can_be_registered_for_reading() -> None:
    registry = Registry()
    region = registry.register(b"constant")
    assert registry.resolve(region.id, region.generation, 0, 8).readonly


def test_eight_threads_register_and_unregister_without_a_trace() -> None:
    registry = Registry()
    arena = memoryview(bytearray(8 * 4096))
    failures: list[MoonpoolError] = []

    def work(part: memoryview) -> None:
        try:
            for _ in range(500):
                region = registry.register(part)
                assert registry.find(region.address + 5, 5) == (region, 5)
                registry.unregister(region)
        except MoonpoolError as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(arena[i * 4096 : (i + 1) * 4096],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert registry.regions() == []
    assert registry._order == []
