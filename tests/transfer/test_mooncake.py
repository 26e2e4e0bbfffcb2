"""The transport on the real Mooncake engine, over its TCP protocol. Skipped where the package is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from moonpool.errors import ConfigError, ConnectionLost, DeadlineExceeded, NotRegistered, Overlap, TransferError
from moonpool.transfer import Op, Registry
from moonpool.transfer.mooncake import MooncakeEngine, MooncakeTransfer
from moonpool.transfer.registry import Region
from tests.transfer.support import pattern

PRESENT = importlib.util.find_spec("mooncake") is not None
needs_package = pytest.mark.skipif(
    not PRESENT, reason="mooncake is not importable: mooncake-transfer-engine-non-cuda is not installed"
)


@pytest.mark.skipif(PRESENT, reason="mooncake is installed here")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        MooncakeEngine("127.0.0.1", protocol="tcp")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MooncakeEngine, MooncakeEngine]]:
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    engines = MooncakeEngine("127.0.0.1", protocol="tcp"), MooncakeEngine("127.0.0.1", protocol="tcp")
    yield engines
    for engine in engines:
        engine.close()


def at(kind: str, region: Region, offset: int, local: np.ndarray) -> Op:
    return Op("read" if kind == "read" else "write", 0, 0, region.address + offset, local.data)


@needs_package
def test_pages_travel_between_two_real_engines(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    ours, theirs = pair
    remote = np.frombuffer(bytearray(pattern(1 << 20)), np.uint8)
    local = np.zeros(1 << 20, np.uint8)
    region = theirs.register(remote)
    ours.register(local)
    transfer = ours.to(theirs.name)
    ops = [at("read", region, i << 12, local[i << 12 : (i + 1) << 12]) for i in range(256)]
    assert transfer.run(ops, timeout=20) == [4096] * 256
    assert (local == remote).all()
    local[:] = 7
    assert transfer.run([at("write", region, 100, local[:1000])], timeout=20) == [1000]
    assert (remote[100:1100] == 7).all()
    assert bytes(remote[1100:1200]) == pattern(1 << 20)[1100:1200]
    assert transfer.late == 0


@needs_package
def test_results_are_per_op(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    ours, theirs = pair
    remote, local, stray = (np.zeros(8192, np.uint8) for _ in range(3))
    region = theirs.register(remote)
    ours.register(local)
    remote[:] = 5
    results = ours.to(theirs.name).run(
        [
            at("read", region, 0, local[:100]),
            at("read", region, 0, stray),
            at("read", region, 1 << 40, local[100:200]),
            at("read", region, 0, local[200:200]),
            Op("read", region.id, region.generation, 0, local[300:400].data),
            at("read", region, 0, local[400:500]),
        ],
        timeout=20,
    )
    assert [type(r) for r in results] == [int, NotRegistered, TransferError, int, TransferError, int]
    assert (local[:100] == 5).all()
    assert (stray == 0).all()


@needs_package
def test_misuse_is_refused(pair: tuple[MooncakeEngine, MooncakeEngine]) -> None:
    ours, theirs = pair
    remote, local = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8)
    region = theirs.register(remote)
    ours.register(local)
    transfer = ours.to(theirs.name)
    with pytest.raises(Overlap):
        transfer.run([at("read", region, 0, local[:100]), at("read", region, 0, local[50:150])], timeout=5)
    with pytest.raises(TransferError, match="checksums"):
        transfer.run([], timeout=5, checksum=True)
    with pytest.raises(Overlap):
        ours.register(local)
    (nobody,) = ours.to("127.0.0.1:9").run([at("read", region, 0, local)], timeout=5)
    assert isinstance(nobody, ConnectionLost)


class Stuck:
    """An engine whose transfers never end."""

    def __init__(self) -> None:
        self.status = 0

    def batch_transfer_async_read(self, *_: object) -> int:
        return 1

    def transfer_check_status(self, _: int) -> int:
        return self.status


def test_a_late_read_keeps_its_buffer_until_the_engine_is_done_with_it() -> None:
    registry, engine = Registry(), Stuck()
    local = bytearray(64)
    registry.register(local)
    transfer = MooncakeTransfer(engine, registry, "peer")
    (result,) = transfer.run([Op("read", 0, 0, 4096, memoryview(local))], timeout=0.01)
    assert isinstance(result, DeadlineExceeded)
    assert transfer.late == 1
    engine.status = -1
    assert transfer.late == 0
