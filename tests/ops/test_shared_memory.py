"""Where a segment's memory comes from, which is what container limits are about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.store.host import MessengerHost
from moonpool.store.messenger.service import MessengerService
from moonpool.testing.fake_clock import FakeClock
from moonpool.transfer.segment import Segment, _container_limit
from moonpool.wire import messages as m
from moonpool.wire.auth import THIS_PROCESS, Peer
from tests.ops.support import MIB

FILL = """
import os, re
from pathlib import Path
from moonpool.transfer.segment import Segment
taken = lambda: int(re.search(r"^Shmem: +([0-9]+)", Path("/proc/meminfo").read_text(), re.M)[1]) << 10
room, before = os.statvfs("/dev/shm"), taken()
segment = Segment.create(64 << 20)
segment.view[:] = b"x" * len(segment.view)
print(room.f_bfree * room.f_frsize, os.statvfs("/dev/shm").f_bfree * room.f_frsize, taken() - before)
"""


def test_l2_a_segment_needs_no_room_in_dev_shm() -> None:
    """64 MiB with a `/dev/shm` of 1 MiB, in a mount namespace of its own."""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, FILL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip(f"no mount namespaces here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    free_before, free_after, taken = map(int, ran.stdout.split())
    assert free_before == free_after == MIB
    assert taken > 48 * MIB, "it counts as shmem all the same"


def test_a_containers_limits_count_and_no_limit_is_none(tmp_path: Path) -> None:
    for text, limit in (("0\n", 0), ("4096\n", 4096), ("max\n", 77)):
        (tmp_path / "hugetlb.2MB.max").write_text(text)
        assert _container_limit("hugetlb.2MB.max", 77, tmp_path) == limit
    assert _container_limit("memory.max", 77, tmp_path) == 77


def test_pages_are_taken_when_first_written_or_all_at_the_start(tmp_path: Path) -> None:
    segment = Segment.create(16 * MIB)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.close()
    host = MessengerHost(name="m", socket=str(tmp_path / "m"), capacity=16 * MIB, prefault=True)
    assert os.fstat(host.segment.fd).st_blocks * 512 == 16 * MIB
    host.close()


def test_space_of_a_writer_in_a_container_that_cannot_be_seen_is_held_when_its_session_ends() -> None:
    """Its process number is 0 here, so nobody can say whether it has ended: it may be copying into the segment still."""
    clock = FakeClock()
    segment = Segment.create(MIB)
    service = MessengerService(segment, clock=clock)
    try:
        for peer, held in ((Peer("data", True, "pid 0 uid 0", 0), True), (THIS_PROCESS, False)):
            session = service.open_session()
            service.identify(session, peer)
            service.handle(session, m.Reserve([(f"key-{held}", MIB // 2)]))
            service.close_session(session)
            assert (service.stats().used > 0) == held, peer.name
            clock.advance(61)
            service.handle(other := service.open_session(), m.Exist(["key"]))
            service.close_session(other)
            assert service.stats().used == 0
    finally:
        service.close()
        segment.close()
