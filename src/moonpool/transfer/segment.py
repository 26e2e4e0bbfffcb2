"""One block of memory that a node lends to the pool.

A memfd has no name: it lives as long as a process maps it or holds its descriptor, so kill -9 of all of them leaves nothing
behind. Its size is sealed: no peer can truncate it under a reader (which would be SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

from moonpool.errors import ConfigError, ConnectionLost, ProtocolError

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not in the mmap module yet."""
_HUGE = 2 << 20
_MFD_HUGETLB_2M = 0x4 | 21 << 26
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A mapped segment. `view` is the whole of it, writable; slices of it are the objects."""

    def __init__(self, fd: int) -> None:
        """Takes over `fd`, a sealed memfd. Raises ProtocolError if it is not."""
        self.fd = fd
        try:
            self.size = os.fstat(fd).st_size
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ProtocolError("the segment's size is not sealed")
            self._map = mmap.mmap(fd, self.size, mmap.MAP_SHARED)
        except (OSError, ValueError, ProtocolError) as e:
            os.close(fd)
            raise ProtocolError(f"not a segment: {e}") from e
        self.view = memoryview(self._map)

    @staticmethod
    def create(size: int) -> Segment:
        """A new segment of `size` bytes; pages are taken from the machine when they are first written.

        Raises ConfigError for more than the machine (or this container) could ever give, where a later write would be fatal.
        """
        most = _memory_limit()
        if not 1 <= size <= most:
            raise ConfigError(
                "no segment can have this size",
                need=f"1 to {most} B, the memory of this machine or container",
                have=f"{size} B",
                fix="Choose another capacity.",
            )
        if size % _HUGE == 0 and size <= _reserved_huge_pages():
            try:
                return Segment(_sealed(size, _MFD_HUGETLB_2M))
            except (OSError, ProtocolError):
                pass  # somebody else took them meanwhile; the mapping would have reserved them
        try:
            segment = Segment(_sealed(size, 0))
        except OSError as e:
            raise ConfigError("cannot make the segment", need=f"{size} B", have=e.strerror or str(e)) from e
        with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
            segment._map.madvise(mmap.MADV_HUGEPAGE)
        return segment

    @property
    def huge(self) -> bool:
        """Of reserved huge pages. The kernel cannot splice from their file."""
        return self.fd >= 0 and os.fstat(self.fd).st_blksize >= _HUGE

    def pages(self) -> str:
        """Which pages it is made of, in words: copies out of small ones are slower, by a fourth up to three times."""
        if self.huge:
            return "huge pages of 2 MiB"
        if _transparent_huge_pages():
            return "transparent huge pages, where the kernel finds some"
        return "pages of 4 KiB: no huge ones are reserved (vm.nr_hugepages), nor transparent ones on (shmem_enabled)"

    def span(self, offset: int, size: int, *, readonly: bool = False) -> memoryview:
        """The bytes `[offset, offset + size)`. Raises ProtocolError if they are not all inside, ConnectionLost after `close`."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ProtocolError("outside the segment", need=f"<= {self.size} B", have=f"{offset} + {size} B")
        try:
            view = self.view[offset : offset + size]
        except ValueError as e:
            raise ConnectionLost("the segment was given up") from e
        return view.toreadonly() if readonly else view

    def populate(self) -> None:
        """Take all pages from the machine now. A container is charged for the pages that it touches first, so this one pays for all,
        and not each client for what it writes. Raises ConfigError if they cannot be had."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as e:
            raise ConfigError(
                "cannot take the segment's memory", need=f"{self.size} B", have=e.strerror or str(e)
            ) from e

    def close(self) -> None:
        """Give up the descriptor and the mapping. A view that somebody still holds keeps the mapping until it is dropped."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a reader's view outlives the pool; the mapping goes with it


def _sealed(size: int, flags: int) -> int:
    """A memfd of this size, for ever. Raises OSError."""
    fd = os.memfd_create("moonpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserved_huge_pages() -> int:
    """Bytes of them that are free."""
    try:
        free = _HUGE * int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    # A container that may not have them can still map them, and is killed (SIGBUS) at the first touch.
    return min(free, _container_limit("hugetlb.2MB.max", free), _container_limit("hugetlb.2MB.rsvd.max", free))


def _transparent_huge_pages() -> bool:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return not ("[never]" in setting or "[deny]" in setting)


def _memory_limit() -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, _container_limit("memory.max", machine))


def _container_limit(name: str, otherwise: int, folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this container may have; `otherwise` where there is no limit."""
    try:
        limit = (folder / name).read_text().strip()
    except OSError:
        return otherwise
    return int(limit) if limit.isdigit() else otherwise
