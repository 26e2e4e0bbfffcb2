"""The benchmark's own parts: it must notice wrong bytes and refused calls, and say how much faster in the right direction."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.store import failure_work, index_work, peer_venv, tcp, workload
from benchmarks.store.rounds import Samples, alternate, faster, sooner
from benchmarks.store.workload import Pass, Side, fill, keys_of

ROOT = Path(__file__).resolve().parents[2]


class Memory(Side):
    """A store in a dictionary, with faults that can be switched on."""

    def __init__(self) -> None:
        self.source, self.target = np.zeros(1 << 20, dtype=np.uint8), np.ones(1 << 20, dtype=np.uint8)
        fill(self.source)
        self.objects: dict[str, bytes] = {}
        self.mixes_up = False

    def pieces(self, buffer: np.ndarray, starts: Sequence[int], size: int) -> list[np.ndarray]:
        return [buffer[s : s + size] for s in starts]

    def put(self, keys: list[str], pieces: Any) -> None:
        assert not any(k in self.objects for k in keys)
        self.objects |= {k: p.tobytes() for k, p in zip(keys, pieces, strict=True)}

    def get(self, keys: list[str], pieces: Any) -> None:
        for key, piece in zip(reversed(keys) if self.mixes_up else keys, pieces, strict=True):
            assert key in self.objects
            piece[:] = np.frombuffer(self.objects[key], dtype=np.uint8)

    def put_one(self, key: str, start: int, size: int) -> None:
        self.put([key], self.pieces(self.source, [start], size))

    def get_one(self, key: str, start: int, size: int) -> None:
        self.get([key], self.pieces(self.target, [start], size))

    def exist(self, keys: list[str]) -> list[bool]:
        return [k in self.objects for k in keys]

    def exist_one(self, key: str) -> bool:
        return key in self.objects

    def clear(self, keys: list[str]) -> None:
        for key in keys:
            del self.objects[key]

    def close(self) -> None: ...


def test_keys_differ_by_label_and_number_and_go_on_in_ranges() -> None:
    keys = keys_of("a", 100)
    assert len({*keys, *keys_of("b", 100)}) == 200
    assert {len(k) for k in keys} == {workload.KEY_LENGTH}
    assert keys_of("a", 40) + keys_of("a", 60, 40) == keys


def test_a_pass_times_every_batch_and_leaves_nothing() -> None:
    side = Memory()
    put, get = Pass(side, "p", 4096, 256, 3).batches()
    assert len(put) == len(get) == 2
    assert not side.objects
    put, get = Pass(side, "p", 4096, 100, 3).singles()
    assert len(put) == len(get) == 100


def test_a_pass_notices_values_under_each_others_keys() -> None:
    side = Memory()
    side.mixes_up = True
    with pytest.raises(AssertionError, match="wrong bytes"):
        Pass(side, "p", 4096, 256, 0).batches()


def test_a_pass_notices_a_get_that_writes_nothing() -> None:
    side = Memory()
    Pass(side, "p", 4096, 256, 0).batches()
    side.get = lambda keys, pieces: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="wrong bytes"):
        Pass(side, "p", 4096, 256, 1).batches()


def test_every_measure_gives_positive_values_and_clears_up() -> None:
    side = Memory()
    found = workload.batch_rate(side, "b", 4096, passes=1, first=0)
    found |= workload.single_times(side, "s", 4096, count=20, first=0)
    found |= workload.exist_rate(side, "e", 200, repeats=2)
    assert not side.objects
    assert index_work.fill(side, "i", 0, 2500) > 0
    assert len(side.objects) == 2500
    found |= index_work.calls(side, "i", 2500)
    assert all(v > 0 for v in found.values())


def test_failures_are_counted_not_raised() -> None:
    side = Memory()
    failure_work.store(side, "old", 5, 4096)
    assert failure_work.readable(side, "old", 5, 4096) == 5
    side.clear(keys_of("old", 2))
    assert failure_work.readable(side, "old", 5, 4096) == 3
    assert failure_work.gone(side, "old", 5, timeout=0.0) is None
    side.clear(keys_of("old", 3, 2))
    assert failure_work.gone(side, "old", 5, timeout=1.0) is not None
    away = failure_work.hammer(side, "old", 5, 4096, seconds=0.05)
    assert (away["get_ok"], away["put_ok"]) == (0, away["rounds"])
    assert failure_work.first_put(side, "after", 4096, timeout=1.0) is not None


def test_rounds_alternate_and_the_first_is_not_counted() -> None:
    order: list[tuple[str, int]] = []

    def measure(side: str) -> Any:
        def run(number: int) -> dict[str, float]:
            order.append((side, number))
            return {"x": float(number)}

        return run

    samples = alternate({"ours": measure("ours"), "peer": measure("peer")}, 3)
    assert order == [(side, n) for n in range(4) for side in ("ours", "peer")]
    assert samples["ours"].values == {"x": [1.0, 2.0, 3.0]}
    assert samples["ours"].text("x", 0) == "2 (1–3)"


def test_more_is_better_for_rates_and_for_times() -> None:
    quick, slow = Samples({"x": [10.0]}), Samples({"x": [5.0]})
    assert faster(quick, slow, "x") == 2.0
    assert sooner(slow, quick, "x") == 2.0


def test_the_worse_of_put_and_get_counts_over_tcp() -> None:
    row = {
        "ours": {"put": [3.0], "get": [2.0]},
        "iperf3": {"put": [4.0], "get": [2.0]},
        "peer": {"put": [1.0], "get": [1.0]},
    }
    found = tcp.ratios({name: Samples(values) for name, values in row.items()})
    assert (found["tcp_1m_vs_iperf"], found["tcp_1m_vs_peer"]) == (0.75, 2.0)


def test_a_python_without_the_peer_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PEER_PYTHON", sys.executable)
    with pytest.raises(peer_venv.Unavailable, match="mooncake"):
        peer_venv.ensure()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_section_runs_without_the_peer(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("no right to make a network namespace")
    command = [sys.executable, "-m", "benchmarks.store", "--quick", "--only", "two", "view"]
    environment = {"MOONPOOL_PEER_PYTHON": str(tmp_path / "none"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert "the peer's side is skipped" in done.stdout
    assert "zero-copy read view" in done.stdout
