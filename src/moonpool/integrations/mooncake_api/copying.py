"""Moving bytes between callers' memory and the pool, when one object is scattered over several buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.errors import MoonpoolError, NotFound, WrongSize
from moonpool.store.base import KVPool, Reservation
from moonpool.transfer.copying import copy_all
from moonpool.types import PutOptions, PutOutcome

Parts = Sequence[memoryview]
"""One object's bytes, in order, wherever they lie."""


def size_of(parts: Parts) -> int:
    return sum(p.nbytes for p in parts)


def pieces(whole: memoryview, parts: Parts) -> Iterator[tuple[memoryview, memoryview]]:
    """(the piece of `whole` that belongs to a part, the part), from the start of `whole`."""
    at = 0
    for part in parts:
        yield whole[at : at + part.nbytes], part
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
        copy_all([pair for i, r in reserved for pair in pieces(r.view, values[i])])
    except BaseException:
        pool.revoke(reservations)
        raise
    outcomes.update(zip((i for i, _ in reserved), pool.commit(reservations), strict=True))
    return [outcomes[i] for i in range(len(keys))]


def read(pool: KVPool, keys: Sequence[str], targets: Sequence[Parts]) -> list[int | MoonpoolError]:
    """Fill each object's parts; its size, or NotFound, or WrongSize if it does not have exactly the size of its parts."""
    results: list[int | MoonpoolError] = []
    pairs: list[tuple[memoryview, memoryview]] = []
    with pool.open_read(keys) as lease:
        for key, view, parts in zip(keys, lease.views, targets, strict=True):
            need = size_of(parts)
            if view is None:
                results.append(NotFound("no such object", key=key))
            elif view.nbytes != need:
                results.append(WrongSize("buffers of another size", key=key, need=f"{view.nbytes} B", have=f"{need} B"))
            else:
                pairs += [(part, piece) for piece, part in pieces(view, parts)]
                results.append(need)
        copy_all(pairs)
    return results
