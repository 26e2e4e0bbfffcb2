"""Transfers by copy, on one host."""

from __future__ import annotations

import pytest

from moonpool.errors import DeadlineExceeded, NotRegistered, Overlap, PoolClosed, StaleRegion, TransferError
from moonpool.transfer import LocalTransfer, Registry, Transport
from tests.transfer.support import pattern, read, write


@pytest.mark.parametrize("checksum", [False, True])
def test_bytes_arrive_and_errors_stand_at_their_places(checksum: bool) -> None:
    registry = Registry()
    arena = bytearray(pattern(4096))
    region, constant, old = registry.register(arena), registry.register(b"constant"), registry.register(bytearray(8))
    registry.unregister(old)
    registry.register(bytearray(8))
    transport: Transport = LocalTransfer(registry)
    a, b, c, d = (bytearray(b"?" * 100) for _ in range(4))
    ops = [
        read(region, 5, a),
        read(region, 4000, b),
        read(old, 0, c),
        write(constant, 0, b"x"),
        write(region, 200, b"new"),
        read(region, 0, d[:0]),
    ]
    results = transport.run(ops, timeout=5, checksum=checksum)
    assert [type(r) for r in results] == [int, NotRegistered, StaleRegion, TransferError, int, int]
    assert results[0] == 100
    assert a == pattern(4096)[5:105]
    assert b == c == b"?" * 100
    assert arena[198:205] == pattern(4096)[198:200] + b"new" + pattern(4096)[203:205]
    registry.close()


def test_overlap_deadline_and_close_are_as_on_the_wire() -> None:
    registry = Registry()
    region = registry.register(bytearray(64))
    transport = LocalTransfer(registry)
    arena = memoryview(bytearray(64))
    with pytest.raises(Overlap):
        transport.run([read(region, 0, arena[:10]), read(region, 0, arena[9:])], timeout=5)
    (late,) = transport.run([read(region, 0, arena)], timeout=0)
    assert isinstance(late, DeadlineExceeded)
    transport.close()
    (closed,) = transport.run([read(region, 0, arena)], timeout=5)
    assert isinstance(closed, PoolClosed)
    registry.close()
