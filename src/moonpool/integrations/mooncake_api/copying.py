"""Moving bytes between callers' memory and the pool, when one object is scattered over several buffers.

A copy of 1 MiB and more lets other threads run (`memmove` through ctypes does, assigning to a memoryview does not). Smaller
ones do not: they are over in less than 0.1 ms, and after giving up the GIL a thread waits up to 5 ms for a busy one to return
it, for each copy of a batch. (Measured: beside a thread that counts in a loop, 64 KiB copies run 163 000 a second with the GIL
kept, 310 a second with it given up.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from moonpool.errors import MoonpoolError, NotFound, WrongSize
from moonpool.store.base import KVPool, Reservation
from moonpool.types import PutOptions, PutOutcome

Parts = Sequence[memoryview]
"""One object's bytes, in order, wherever they lie."""

_GIVE_UP_GIL = 1 << 20


def size_of(parts: Parts) -> int:
    return sum(p.nbytes for p in parts)


def copy(target: memoryview, source: memoryview) -> None:
    """`source` to `target`, which has the same size."""
    size = source.nbytes
    if size < _GIVE_UP_GIL:
        target[:] = source
    elif target.nbytes != size:
        raise WrongSize("buffers differ in size", need=f"{size} B", have=f"{target.nbytes} B")
    else:
        ctypes.memmove(address_of(target), address_of(source), size)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def gather(target: memoryview, parts: Parts) -> None:
    """All of `parts`, one after the other, from the start of `target`."""
    at = 0
    for part in parts:
        copy(target[at : at + part.nbytes], part)
        at += part.nbytes


def scatter(parts: Parts, source: memoryview) -> None:
    """`source` from its start, until all parts are full."""
    at = 0
    for part in parts:
        copy(part, source[at : at + part.nbytes])
        at += part.nbytes


def write(pool: KVPool, keys: Sequence[str], values: Sequence[Parts], options: PutOptions) -> list[PutOutcome]:
    """Store each value under its key; `keys` are distinct. One outcome per key."""
    if all(len(parts) == 1 for parts in values):
        return pool.batch_put(keys, [parts[0] for parts in values], options=options)
    outcomes: dict[int, PutOutcome] = {}
    reserved: list[tuple[int, Reservation]] = []
    asked = [(key, size_of(parts)) for key, parts in zip(keys, values, strict=True)]
    for i, got in enumerate(pool.reserve(asked, options)):
        if isinstance(got, Reservation):
            reserved.append((i, got))
        else:
            outcomes[i] = got
    reservations = [r for _, r in reserved]
    try:
        for i, r in reserved:
            gather(r.view, values[i])
    except BaseException:
        pool.revoke(reservations)
        raise
    outcomes.update(zip((i for i, _ in reserved), pool.commit(reservations), strict=True))
    return [outcomes[i] for i in range(len(keys))]


def read(pool: KVPool, keys: Sequence[str], targets: Sequence[Parts]) -> list[int | MoonpoolError]:
    """Fill each object's parts; its size, or NotFound, or WrongSize if it does not have exactly the size of its parts."""
    results: list[int | MoonpoolError] = []
    with pool.open_read(keys) as lease:
        for key, view, parts in zip(keys, lease.views, targets, strict=True):
            need = size_of(parts)
            if view is None:
                results.append(NotFound("no such object", key=key))
            elif view.nbytes != need:
                results.append(WrongSize("buffers of another size", key=key, need=f"{view.nbytes} B", have=f"{need} B"))
            else:
                scatter(parts, view)
                results.append(need)
    return results
