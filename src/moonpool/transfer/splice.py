"""Sending a process's own pages without copying them: vmsplice into a pipe, splice from there into the socket.

The socket holds the pages themselves, so they must not change until the peer has said that it has the bytes. (Python has `splice`
but no `vmsplice`.)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable

from moonpool.transfer.registry import address_of

_PIPE = 1 << 20
"""Bytes; what a process without privileges may have. A smaller pipe works too, in more steps."""
_STEP = _PIPE - 4096
"""Bytes in the pipe at once: pages that begin anywhere still fit."""
_NONBLOCK, _MORE = 2, 4


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_vmsplice = ctypes.CDLL(None, use_errno=True).vmsplice
_vmsplice.restype = ctypes.c_ssize_t
_vmsplice.argtypes = (ctypes.c_int, ctypes.POINTER(_Iovec), ctypes.c_size_t, ctypes.c_uint)


class PagePipe:
    """Owns a pipe. After an error it may hold bytes that were not sent, so the connection is of no more use."""

    def __init__(self) -> None:
        """Raises OSError (out of descriptors)."""
        self._out, self._in = os.pipe()
        try:
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE)
        except OSError:
            pass  # this user's pipes are at their limit; the default size works

    def send(self, sock: int, view: memoryview, before_each: Callable[[], None]) -> int:
        """Send `view`; returns how much of it, less only if these pages cannot be spliced (device memory), which the caller
        then copies. `before_each` runs before every wait. Raises what the socket raises."""
        start, sent = address_of(view), 0
        while sent < len(view):
            piece = _Iovec(start + sent, min(len(view) - sent, _STEP))
            taken = _vmsplice(self._in, ctypes.byref(piece), 1, _NONBLOCK)
            if taken < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                return sent
            sent += taken
            self._drain(sock, taken, before_each, _MORE if sent < len(view) else 0)
        return sent

    def _drain(self, sock: int, count: int, before_each: Callable[[], None], flags: int) -> None:
        while count:
            before_each()
            count -= os.splice(self._out, sock, count, flags=flags)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
