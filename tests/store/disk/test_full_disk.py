"""A disk that is really full (F9): a tmpfs of 16 MiB in a mount namespace of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size=16m tmpfs "$1" || exit 77; shift; exec "$@"'


@pytest.mark.cluster
def test_f9_quota_holds_on_a_small_disk_and_a_full_one_degrades_to_reads(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace")
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.store.disk.on_tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "held\n", done.stderr
