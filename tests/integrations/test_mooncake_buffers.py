"""Handles and pools of buffers, as a client of the peer's API uses them."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from moonpool.integrations.mooncake_api.buffers import BufferHandle, BufferPool
from moonpool.testing.leaks import eventually

MIB = 1 << 20


class FakeStore:
    """Notes what is registered; refuses overlaps, as the real one does."""

    def __init__(self, local_buffer_size: int = 4 * MIB) -> None:
        self.local_buffer_size = local_buffer_size
        self.registered: dict[int, int] = {}

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if any(p < buffer_ptr + size and buffer_ptr < p + n for p, n in self.registered.items()):
            return -600
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0 if self.registered.pop(buffer_ptr, None) else -600


class TestHandle:
    def test_answers_the_buffer_protocol_and_its_own_methods(self) -> None:
        handle = BufferHandle.allocate(5)
        memoryview(handle)[:] = b"hello"
        assert (len(handle), handle.size(), bytes(handle)) == (5, 5, b"hello")
        assert handle.ptr() == np.asarray(handle).ctypes.data
        assert not memoryview(handle).readonly

    def test_wraps_without_copying_and_keeps_read_only(self) -> None:
        memory = bytearray(b"abc")
        handle = BufferHandle.wrap(memory)
        memory[0] = ord("x")
        assert bytes(handle) == b"xbc"
        assert memoryview(BufferHandle.wrap(b"abc")).readonly

    def test_has_identity_and_truth_like_the_peers(self) -> None:
        one, other = BufferHandle.allocate(3), BufferHandle.allocate(3)
        assert one == one
        assert one != other
        assert one not in [None, other]
        assert one
        assert not BufferHandle.allocate(0)
        assert len({one, other}) == 2
        assert "of 3 B" in repr(one)

    def test_may_be_empty(self) -> None:
        assert bytes(BufferHandle.wrap(b"")) == b""
        assert len(memoryview(BufferHandle.allocate(0))) == 0


class TestPool:
    def test_leases_registered_memory_of_the_size_and_alignment(self) -> None:
        store = FakeStore()
        pool = BufferPool(store, alignment=1 << 16)
        lease = pool.acquire(1234)
        assert lease.size == len(lease.buffer) == 1234
        assert lease.ptr % (1 << 16) == 0
        assert store.registered == {lease.ptr: 1234}
        lease.release()
        pool.close()
        assert store.registered == {}

    def test_keeps_a_released_buffer_for_the_next_of_its_size(self) -> None:
        store = FakeStore()
        pool = BufferPool(store)
        with pool.buffer(4096) as lease:
            first = lease.ptr
        assert store.registered == {first: 4096}
        assert pool.acquire(4096).ptr == first

    def test_reuse_takes_no_more_room_each_time(self) -> None:
        store = FakeStore(local_buffer_size=MIB)
        pool = BufferPool(store, max_bytes=MIB)
        for _ in range(5):
            pool.acquire(MIB // 2).release()
        assert list(store.registered.values()) == [MIB // 2]
        pool.close()

    def test_drops_idle_buffers_when_another_size_needs_their_room(self) -> None:
        store = FakeStore(local_buffer_size=MIB)
        pool = BufferPool(store, max_bytes=MIB)
        pool.acquire(MIB).release()
        lease = pool.acquire(4096)
        assert store.registered == {lease.ptr: 4096}

    def test_prewarm_registers_as_many_as_fit(self) -> None:
        store = FakeStore(local_buffer_size=MIB)
        pool = BufferPool(store, max_bytes=MIB, prewarm_size=MIB // 4, prewarm_count=9)
        assert sum(store.registered.values()) == MIB
        ready = set(store.registered)
        assert {pool.acquire(MIB // 4).ptr} <= ready

    def test_default_capacity_is_twice_the_local_buffer(self) -> None:
        pool = BufferPool(FakeStore(MIB))
        leases = [pool.acquire(MIB), pool.acquire(MIB)]
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(1, block=False)
        assert len(leases) == 2

    def test_view_holds_the_lease(self) -> None:
        pool = BufferPool(FakeStore())
        lease = pool.acquire(8)
        part = lease.buffer[2:4]
        with pytest.raises(RuntimeError, match="exported views"):
            lease.release()
        del part
        lease.release()
        lease.release()
        with pytest.raises(RuntimeError, match="lease is closed"):
            _ = lease.ptr

    def test_a_lost_lease_returns_once_its_views_are_gone(self) -> None:
        pool = BufferPool(FakeStore(), max_regions=1)
        view = pool.acquire(4).buffer
        view[:] = b"kept"
        gc.collect()
        with pytest.raises(RuntimeError, match="exhausted"):
            pool.acquire(4, block=False)
        assert bytes(view) == b"kept"
        del view
        gc.collect()
        pool.acquire(4, block=False).release()
        pool.close()

    def test_blocked_acquire_gets_what_another_thread_releases(self) -> None:
        pool = BufferPool(FakeStore(), max_regions=1)
        lease = pool.acquire(1)
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.append(pool.acquire(2).size))
        thread.start()
        lease.release()
        thread.join(10)
        eventually(lambda: got == [2])

    def test_times_out(self) -> None:
        pool = BufferPool(FakeStore(), max_regions=1, default_timeout=0.01)
        lease = pool.acquire(1)
        with pytest.raises(RuntimeError, match="timed out"):
            pool.acquire(1)
        lease.release()

    def test_close_refuses_while_leased_and_ends_the_pool(self) -> None:
        pool = BufferPool(FakeStore())
        lease = pool.acquire(1)
        with pytest.raises(RuntimeError, match="active leases"):
            pool.close()
        lease.release()
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="pool is closed"):
            pool.acquire(1)

    def test_a_failed_registration_gives_the_room_back(self) -> None:
        store = FakeStore(MIB)
        pool = BufferPool(store, max_bytes=MIB)
        store.register_buffer = lambda buffer_ptr, size: -600  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="registration"):
            pool.acquire(MIB)
        del store.register_buffer
        pool.acquire(MIB, block=False).release()

    @pytest.mark.parametrize("alignment", [0, 4, 12345])
    def test_refuses_an_alignment_that_is_none(self, alignment: int) -> None:
        with pytest.raises(RuntimeError, match="alignment"):
            BufferPool(FakeStore(), alignment=alignment)

    def test_refuses_what_it_cannot_serve(self) -> None:
        with pytest.raises(RuntimeError, match="local buffer"):
            BufferPool(FakeStore(0))
        with pytest.raises(RuntimeError, match="MooncakeDistributedStore"):
            BufferPool(None)  # type: ignore[arg-type]
        pool = BufferPool(FakeStore())
        with pytest.raises(RuntimeError, match="capacity"):
            pool.acquire((1 << 64) - 1)
        with pytest.raises(RuntimeError, match="non-negative"):
            pool.acquire(1, timeout=-1)
        for size in (-1, 1 << 64, "4", None):
            with pytest.raises(TypeError):
                pool.acquire(size)  # type: ignore[arg-type]

    def test_many_threads_never_share_a_buffer(self) -> None:
        pool = BufferPool(FakeStore(), max_regions=3)
        errors: list[bytes] = []

        def work(n: int) -> None:
            for _ in range(50):
                with pool.buffer(64 + n % 2) as lease:
                    lease.buffer[:4] = bytes([n] * 4)
                    if (found := bytes(lease.buffer[:4])) != bytes([n] * 4):
                        errors.append(found)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert errors == []
        pool.close()
