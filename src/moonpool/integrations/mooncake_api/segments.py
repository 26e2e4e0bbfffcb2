"""Capacity that comes and goes while a store is open."""

from __future__ import annotations

import operator
import threading
import uuid
from collections.abc import Sequence

from moonpool.errors import ConfigError, MoonpoolError
from moonpool.integrations.mooncake_api.codes import Code, coded, refused
from moonpool.integrations.mooncake_api.joining import Segment
from moonpool.integrations.mooncake_api.life import Life

_ROUNDED_TO = 16 << 20


class Segments(Life):
    def __init__(self) -> None:
        super().__init__()
        self._segments: dict[str, Segment] = {}
        self._segment_lock = threading.Lock()

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, object]:
        """Add `size` bytes, rounded up to 16 MiB: {ret, segment_ids, allocated_size}. The id names it until it is unmounted."""
        try:
            wanted = operator.index(size)
            if wanted <= 0:
                raise ConfigError("not a size", key="size", need="> 0", have=str(wanted))
            capacity = -(-wanted // _ROUNDED_TO) * _ROUNDED_TO
            segment = self._joined_open().add_segment(capacity)
            name = str(uuid.uuid4())
            with self._segment_lock:
                self._segments[name] = segment
            return {"ret": 0, "segment_ids": [name], "allocated_size": capacity}
        except MoonpoolError as e:
            code = refused("allocate_and_mount_segment", e)
            return {"ret": code, "segment_ids": [], "allocated_size": 0}

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, object]:
        """Not supported: a messenger serves memory that it made itself. {ret: -1012, segment_ids: []}"""
        fix = "Use allocate_and_mount_segment."
        refused("mount_segment", ConfigError("foreign memory cannot be mounted", key=path, fix=fix))
        return {"ret": int(Code.UNSUPPORTED), "segment_ids": []}

    @coded
    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take segments away; their objects go with them. 0, or -600 for an id that none has: then nothing is unmounted.

        `grace_period_seconds` is how long readers get to end: they keep their bytes until they are done, so none is needed.
        """
        with self._segment_lock:
            for name in segment_ids:
                if name not in self._segments:
                    raise ConfigError("no such segment", key=name)
            ended = [self._segments.pop(name) for name in dict.fromkeys(segment_ids)]
        for segment in ended:
            segment.close()
        return 0

    @coded
    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        return self.unmount_segment(segment_ids, grace_period_seconds)

    @coded
    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Not supported (-1012): a messenger's disk goes with the messenger."""
        self._joined_open()
        return int(Code.UNSUPPORTED)

    def _closing(self) -> None:
        with self._segment_lock:
            segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.close()
        super()._closing()
