"""A look at the whole pool, and how it is shown."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import termios
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from moonpool.errors import WireError
from moonpool.ops.picture import Observer, Picture, Quota, Row
from moonpool.ops.tables import size, stat_table, top_table
from moonpool.ops.top import watch
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import MessengerInfo, PoolStats
from tests.ops.support import MIB, small_pool


def shown(body: object) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(body)
    return console.export_text()


def cells(text: str, name: str) -> list[str]:
    """Of the messenger's row."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [name])
    return line.split()


def picture(at: float, generation: str = "g", **figures: int) -> Picture:
    row = Row(
        info=MessengerInfo(name="m0", socket="/s"),
        generation=generation,
        stats=PoolStats(capacity=64 * MIB, used=16 * MIB, **figures),
    )
    return Picture(at=at, master="master", keys=1234, messengers=[row], quotas=[])


def test_a_look_finds_every_messenger_with_its_own_figures(tmp_path: Path) -> None:
    with no_leaks(), small_pool(tmp_path) as small:
        small.client("m1").batch_put(["a", "b"], [b"x" * 1000, b"y" * 1000])
        small.client("m1").get("a")
        assert eventually(lambda: small.service.keys() == 2), "the messenger tells its master in the background"
        with Observer(small.master) as observer:
            look = observer.look()
    by_name = {r.info.name: r.stats for r in look.messengers}
    assert by_name["m0"] is not None
    assert by_name["m1"] is not None
    assert (by_name["m0"].objects, by_name["m1"].objects, by_name["m1"].hits) == (0, 2, 1)
    assert (look.keys, look.total.puts) == (2, 2)
    assert json.loads(msgspec.json.encode(look))["messengers"][1]["stats"]["objects"] == 2


def test_a_messenger_that_does_not_answer_is_a_row_without_figures(tmp_path: Path) -> None:
    with small_pool(tmp_path) as small, Observer(small.master) as observer:
        observer.look()
        small.hosts[1].server.close()  # its heartbeats go on
        look = observer.look()
        assert look.messengers[0].stats is not None
        assert look.messengers[1].stats is None
        assert "ConnectionLost" in look.messengers[1].error
        assert "no answer" in shown(stat_table(look))


def test_without_a_master_it_is_an_error(tmp_path: Path) -> None:
    with Observer(str(tmp_path / "nobody")) as observer, pytest.raises(WireError, match="nobody"):
        observer.look()


def test_stat_shows_capacity_use_hit_rate_disk_and_quotas() -> None:
    look = picture(0, hits=3, misses=1, puts=1500, evictions=7, disk_used=3 << 30, disk_objects=40, lost_unspilled=2)
    look = msgspec.structs.replace(
        look, quotas=[Quota(tenant="", limit=None, used=5), Quota(tenant="t", limit=200, used=50)]
    )
    text = shown(stat_table(look))
    assert "1,234 keys" in text
    assert " ".join(cells(text, "m0")) == "m0 serving 16.0 MiB 64.0 MiB 0 0/0 1,500 75 % 7 3.0 GiB 40 2"
    assert cells(text, "(default)") == ["(default)", "none", "5", "B"]
    assert cells(text, "t") == ["t", "200", "B", "50", "B", "25", "%"]


def test_top_shows_rates_per_second() -> None:
    before, now = picture(10, puts=100, hits=50, evictions=1), picture(12, puts=300, hits=60, evictions=1, disk_reads=8)
    row = cells(shown(top_table(before, now)), "m0")
    assert " ".join(row) == "m0 serving 16.0 MiB 25 % 0 0/0 100 5 0 0 4 0"


def test_top_has_no_rates_at_the_first_look() -> None:
    assert cells(shown(top_table(None, picture(10, puts=100))), "m0")[-6:] == ["–"] * 6


def test_top_counts_from_zero_after_a_restart_and_never_backwards() -> None:
    text = shown(top_table(picture(10, puts=1000), picture(12, "new", puts=20)))
    assert cells(text, "m0")[-6] == "10"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_top_runs_until_it_is_told_to_end_and_outlives_the_master(tmp_path: Path) -> None:
    console = Console(width=140, file=io.StringIO(), record=True, force_terminal=True)
    looks = iter(["put", "stop the master", "look", "end"])
    with small_pool(tmp_path) as small, Observer(small.master) as observer:
        pool = small.client()

        def wait(seconds: float) -> bool:
            assert seconds == 0.25
            match next(looks):
                case "put":
                    pool.put("key", b"x")
                    assert eventually(lambda: small.service.keys() == 1)
                case "stop the master":
                    small.server.close()
                case "end":
                    return True
            return False

        watch(observer, console, wait, 0.25)
    text = console.export_text()
    assert "1 keys" in text
    assert "the master does not answer" in text


@pytest.mark.cluster
@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 130)])
def test_top_on_a_terminal_ends_at_q_and_at_ctrl_c(tmp_path: Path, key: bytes, status: int) -> None:
    with small_pool(tmp_path) as small:
        ours, its = os.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", "top", "--master", small.master, "--interval", "60"],
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(its)
        seen = b""
        try:
            while b"m1" not in seen:
                seen += os.read(ours, 4096)
            os.write(ours, key)
            assert eventually(lambda: process.poll() is not None, timeout_s=5), "it does not wait for the next look"
            assert process.returncode == status
        finally:
            process.kill()
            process.wait(10)
            os.close(ours)
