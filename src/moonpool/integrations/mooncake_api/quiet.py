"""A logger for paths that can fail a thousand times a second: one line a second for each kind, with how many it stands for."""

from __future__ import annotations

import logging
import threading

from moonpool.clock import Clock, SystemClock

_PERIOD_S = 1.0
_MAX_KINDS = 1024


class Quiet:
    def __init__(self, log: logging.Logger, clock: Clock | None = None) -> None:
        self._log, self._clock = log, clock or SystemClock()
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}
        """Kind → when it was last written, and how many were left out since."""

    def warning(self, kind: str, text: str, *args: object) -> None:
        now = self._clock.now()
        with self._lock:
            written, left_out = self._last.get(kind, (now - _PERIOD_S, 0))
            if now - written < _PERIOD_S:
                self._last[kind] = (written, left_out + 1)
                return
            if len(self._last) >= _MAX_KINDS:
                self._last.clear()
            self._last[kind] = (now, 0)
        self._log.warning(text + (f" (and {left_out} more like it)" if left_out else ""), *args)
