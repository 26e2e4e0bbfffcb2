"""`get_into_ranges`: pieces of many objects into many registered buffers, one result per piece."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.errors import MoonpoolError
from moonpool.integrations.mooncake_api.codes import Code, refused
from moonpool.integrations.mooncake_api.data import Data, Pointers
from moonpool.integrations.mooncake_api.memory import view_at
from moonpool.store.base import ReadLease
from moonpool.transfer.copying import copy

PerBuffer = Sequence[Sequence[Sequence[int]]]
"""[buffer][key][piece]"""


class RangedGets(Data):
    def get_into_ranges(
        self,
        buffer_ptrs: Pointers,
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: PerBuffer,
        all_src_offsets: PerBuffer,
        all_sizes: PerBuffer,
    ) -> list[list[list[int]]]:
        """For each buffer, key and piece the bytes copied, or -704 (missing), or -600: a piece outside its object or outside
        the registered buffer, or lists that do not fit together."""
        lists = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if any(len(x) != len(buffer_ptrs) for x in lists):
            return [[[int(Code.INVALID_PARAMS)]] for _ in buffer_ptrs]
        try:
            with self.pool.open_read(self._present([k for keys in all_keys for k in keys])) as lease:
                return [self._buffer(lease, *one) for one in zip(buffer_ptrs, *lists, strict=True)]
        except MoonpoolError as e:
            code = refused("get_into_ranges", e)
            return [[[code] * max(1, len(p)) for p in buffer] for buffer in all_sizes]

    def _buffer(
        self,
        lease: ReadLease,
        pointer: int,
        keys: Sequence[str],
        dst: Sequence[Sequence[int]],
        src: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        if not len(keys) == len(dst) == len(src) == len(sizes):
            return [[int(Code.INVALID_PARAMS)] for _ in keys]
        room = self._ranges.room_at(pointer)
        views = dict(zip(lease.keys, lease.views, strict=True))
        return [_pieces(views.get(key), pointer, room, *one) for key, *one in zip(keys, dst, src, sizes, strict=True)]


def _pieces(
    view: memoryview | None, pointer: int, room: int, dst: Sequence[int], src: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    if not len(dst) == len(src) == len(sizes):
        return [int(Code.INVALID_PARAMS)] * max(len(dst), len(src), len(sizes))
    if view is None:
        return [int(Code.NOT_FOUND)] * len(sizes)
    results = []
    for to, at, n in zip(dst, src, sizes, strict=True):
        if min(to, at, n) < 0 or at + n > view.nbytes or to + n > room:
            results.append(int(Code.INVALID_PARAMS))
        else:
            copy(view_at(pointer + to, n, writable=True), view[at : at + n])
            results.append(n)
    return results
