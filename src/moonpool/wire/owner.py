"""Who listens on a port of this machine, for error messages. Linux only (it reads /proc); elsewhere nobody is known."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTENING = "0A"


def owner_of(port: int) -> str:
    """The process, in words; empty if it is another user's, or not known."""
    wanted = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    if not wanted:
        return ""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
            if any(str(fd.readlink()) in wanted for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _listening(table: Path, port: int) -> list[str]:
    """Inodes of the sockets that listen on `port`."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
