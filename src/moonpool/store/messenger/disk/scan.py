"""What a folder holds after a restart: headers are read, payloads are not (a read checks them)."""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass, field

from moonpool.store.messenger.disk.files import Files, Status, read_all
from moonpool.store.messenger.disk.folder import Folder, close_quietly
from moonpool.store.messenger.disk.record import FIXED, MAX_KEY, Damaged, Header, key_length, name_of

_FIRST = 512
"""Bytes read of each file: nearly every header is shorter."""
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}


def is_shortage(error: OSError) -> bool:
    """This process or machine lacks something for the moment; the file itself may be well."""
    return error.errno in _SHORTAGE


def reason_of(error: OSError) -> str:
    """How counters name it: "vanished", or the errno's name."""
    if error.errno == errno.ENOENT:
        return "vanished"
    return errno.errorcode.get(error.errno or 0, "unknown")


@dataclass
class Scan:
    found: list[tuple[Header, Status]] = field(default_factory=list)
    """Least recently used first."""
    dropped: Counter[str] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)
    """Files that should go and could not be removed, with their sizes."""


def scan(folder: Folder, files: Files, layout: int) -> Scan:
    """Read all headers. Leftovers of a killed owner, damaged records and those of another version or layout are unlinked;
    files that do not look like ours are left alone. Raises OSError if the folder cannot be listed, or for want of descriptors:
    then nothing may be taken for damaged."""
    result = Scan()
    for path, name in folder.listing():
        if Folder.is_record(name):
            try:
                result.found.append(_record(files, path, name, layout))
                continue
            except Damaged as e:
                result.dropped[e.reason] += 1
        elif not Folder.is_temporary(name):
            continue
        _unlink(files, path, result)
    result.found.sort(key=lambda found: found[1].mtime_ns)
    return result


def _record(files: Files, path: str, name: str, layout: int) -> tuple[Header, Status]:
    """Raises Damaged, with the reason; OSError for want of descriptors."""
    try:
        status = files.status(path)
        header = Header.unpack(_head(files, path))
    except OSError as e:
        if is_shortage(e):
            raise
        raise Damaged(reason_of(e)) from e
    if name_of(header.key) != name:
        raise Damaged("other key")
    if header.length + header.size != status.size:
        raise Damaged("truncated")
    if header.layout != layout:
        raise Damaged("other layout")
    return header, status


def _head(files: Files, path: str) -> memoryview:
    fd = files.open(path, os.O_RDONLY)
    try:
        raw = memoryview(bytearray(_FIRST))
        there = read_all(files, fd, [raw])
        need = FIXED + min(key_length(raw[:there]), MAX_KEY)
        if there < need and there == _FIRST:
            raw = memoryview(bytearray(need))
            there = read_all(files, fd, [raw])
        return raw[:there]
    finally:
        close_quietly(files, fd)


def _unlink(files: Files, path: str, result: Scan) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        pass  # that is what was wanted
    except OSError:
        result.left[path] = _size(files, path)


def _size(files: Files, path: str) -> int:
    try:
        return files.status(path).size
    except OSError:
        return 0
