"""The leak check finds what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import no_leaks
from moonpool.transfer.segment import Segment


def test_clean_code_passes() -> None:
    with no_leaks(), EmbeddedPool(1 << 16) as pool, no_leaks(pool):
        pool.put("k", b"v")
        pool.get("k")


def test_descriptors() -> None:
    with pytest.raises(AssertionError, match="descriptors"), no_leaks(grace_s=0):
        fds = os.pipe()
    for fd in fds:
        os.close(fd)


def test_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left over")
    with pytest.raises(AssertionError, match="left over"), no_leaks(grace_s=0):
        thread.start()
    stop.set()
    thread.join()


def test_children() -> None:
    with pytest.raises(AssertionError, match="child processes"), no_leaks(grace_s=0):
        child = subprocess.Popen(["sleep", "60"])
    child.kill()
    child.wait()


def test_mappings() -> None:
    with pytest.raises(AssertionError, match="shared mappings"), no_leaks(grace_s=0):
        segment = Segment.create(4096)
    segment.close()


_STRANGER = """
import mmap, sys
sys.stdin.readline()
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("there", flush=True)
sys.stdin.read()
"""


def test_files_in_shared_memory_but_not_those_that_a_stranger_uses() -> None:
    path = Path(f"/dev/shm/moonpool-leak-{os.getpid()}")
    with pytest.raises(AssertionError, match=path.name), no_leaks(grace_s=0):
        path.touch()
    path.unlink()
    words = ["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, _STRANGER, str(path)]  # no child: a child's child
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdin
        assert shell.stdout
        with no_leaks(grace_s=0):
            print(file=shell.stdin, flush=True)
            assert shell.stdout.readline() == "there\n"
            assert path.exists()
    path.unlink()


def test_handles() -> None:
    with EmbeddedPool(1 << 16) as pool:
        pool.put("k", b"v")
        with pytest.raises(AssertionError, match="open handles"), no_leaks(pool, grace_s=0):
            lease = pool.open_read(["k"])
        lease.close()
