"""The pool's interface. Engines, the converter and the conductor know this module and nothing below it.

Life of an object: `reserve` (space is taken, nothing visible) → fill `Reservation.view` → `commit` (visible, immutable) or
`revoke`. A writer that dies between the two leaves nothing: the holder revokes what its session had open.
Reading: `open_read` returns zero-copy views that stay valid until `close`, whatever eviction wants meanwhile.

Batch calls return one result per key, in the order of the keys; one key's failure never fails another key.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from moonpool.errors import ConfigError, FrameTooLarge, MoonpoolError, NotFound, PoolError, WrongSize
from moonpool.keys import PageKey
from moonpool.transfer.copying import copy, copy_all
from moonpool.types import (
    BufferLike,
    MessengerInfo,
    PoolEvent,
    PoolStats,
    Put,
    PutOptions,
    PutOutcome,
    Removed,
    Replica,
    Rules,
    RuleStatus,
    TaskStatus,
)
from moonpool.wire.messages import MAX_BATCH, MAX_KEY

T = TypeVar("T")

PLAIN = PutOptions()
_CHUNK = 4096
"""Keys of one removal by pattern."""


def as_bytes_view(buffer: BufferLike, *, writable: bool = False) -> memoryview:
    """A flat byte view of `buffer` without copying. Torch CPU tensors (any dtype, contiguous) are taken too.

    Raises WrongSize for a buffer that is not contiguous, or read-only where it is to be written.
    """
    if (
        type(buffer) is memoryview
        and buffer.format == "B"
        and buffer.ndim == 1
        and buffer.c_contiguous
        and not (writable and buffer.readonly)
    ):
        return buffer
    if hasattr(buffer, "data_ptr"):  # a torch tensor; numpy has no bfloat16, so go through its bytes
        if not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise WrongSize(
                "tensor must be contiguous and on the CPU",
                have=f"{buffer.device}",
                fix="Call .cpu().contiguous().",
            )
        buffer = buffer.detach().reshape(-1).view(_torch_uint8()).numpy()
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise WrongSize("buffer must be C-contiguous", fix="Copy it first.")
    if writable and view.readonly:
        raise WrongSize("buffer is read-only", fix="Pass a writable buffer, e.g. a bytearray or a numpy array.")
    return view.cast("B") if view.nbytes else memoryview(bytearray(0))


def check_keys(keys: Sequence[str]) -> None:
    """Refuse what a messenger would hang up on. Raises FrameTooLarge, PoolError."""
    if len(keys) > MAX_BATCH:
        raise FrameTooLarge("batch too large", need=f"<= {MAX_BATCH} keys", have=str(len(keys)), fix="Split it.")
    if "".join(keys).isascii() and all(0 < n <= MAX_KEY for n in map(len, keys)):
        return
    for key in keys:
        if not 0 < len(key) <= MAX_KEY or not _is_unicode(key):
            raise PoolError("not a key", key=repr(key[:80]), need=f"1 to {MAX_KEY} characters of valid Unicode")


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _torch_uint8() -> object:
    import torch  # only a caller that holds a tensor gets here; the pool itself does not need torch

    return torch.uint8


class Reservation(ABC):
    """Space for one object that is not visible yet. `view` is writable until commit or revoke."""

    key: str

    @property
    @abstractmethod
    def view(self) -> memoryview: ...

    def fill(self, value: memoryview) -> bool:
        """Take `value` for the object's content, if that saves copying it into `view`. It is as large, and must stay as it is until
        commit or revoke."""
        return False


class ReadLease(ABC):
    """Open zero-copy reads. `views[i]` belongs to the i-th key, None where it was missing.

    Views are read-only and must not be used after `close()`; closing twice is safe.
    """

    keys: tuple[str, ...]
    views: tuple[memoryview | None, ...]

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Match(NamedTuple):
    """What would serve one page: `key` is the object to read; `converted` says that it is an approximation."""

    key: str
    converted: bool


class EventStream(ABC):
    """Events of a subscription in order. Bounded: when the reader lags, the oldest are dropped and counted."""

    dropped: int

    @abstractmethod
    def next(self, limit: int, timeout: float) -> list[PoolEvent]:
        """Up to `limit` events; waits at most `timeout` seconds for the first; empty on timeout. Raises PoolClosed or
        ConnectionLost when no more can come."""

    @abstractmethod
    def close(self) -> None: ...


class KVPool(ABC):
    """One pool of immutable objects, as seen by one client. Safe to use from several threads."""

    # -- writing

    @abstractmethod
    def reserve(
        self, items: Sequence[tuple[str, int]], options: PutOptions = PLAIN
    ) -> list[Reservation | Put | MoonpoolError]:
        """Take space for (key, bytes) each. `Put.EXISTED` if the key is visible; else a reservation, or why there is none
        (NoSpace, ObjectTooLarge, KeyBusy, NativeExists). Evicts if it must; never waits for space."""

    @abstractmethod
    def commit(self, reservations: Sequence[Reservation]) -> list[PutOutcome]:
        """Make the objects visible, each all-or-nothing. A reservation that outlived its time, and whose
        key another writer took meanwhile, gives LeaseExpired. The views are closed here, whatever the result; an array that is
        still over one must not be written any more."""

    @abstractmethod
    def revoke(self, reservations: Sequence[Reservation]) -> None:
        """Give the space back; nothing became visible."""

    # -- reading

    @abstractmethod
    def open_read(self, keys: Sequence[str]) -> ReadLease:
        """Views of what exists, None for what does not. Touches the LRU. Nothing opened can be evicted until closed."""

    @abstractmethod
    def lookup(self, keys: Sequence[PageKey], origins: Sequence[str] = ()) -> list[Match | None]:
        """For each native page key what would serve it: the native object, or else one converted by one of the bundles
        in `origins` (first one wins). With `origins`, pages found nowhere are announced as `Missed`. Protects nothing."""

    @abstractmethod
    def batch_is_exist(self, keys: Sequence[str]) -> list[bool]:
        """Probe. Neither touches the LRU nor protects from eviction."""

    # -- the rest

    @abstractmethod
    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each object, None for what does not exist. A probe."""

    @abstractmethod
    def replicas(self, keys: Sequence[str]) -> list[list[Replica]]:
        """Where the copies of each object are; empty for what does not exist. A probe."""

    @abstractmethod
    def batch_remove(self, keys: Sequence[str], *, force: bool = False, messenger: str = "") -> list[Removed]:
        """Remove what exists, all copies of it, or only the one on `messenger`. What is hard-pinned stays unless `force`. Bytes under
        an open read stay valid until it closes. Raises NotFound for an unknown messenger."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """All keys, each once. What comes or goes meanwhile may be there or not."""

    @abstractmethod
    def copy(self, key: str, targets: Sequence[str], *, source: str = "") -> str:
        """Begin to copy an object to these messengers; returns the task's id. Raises NotFound (key, messenger)."""

    @abstractmethod
    def move(self, key: str, target: str, *, source: str = "") -> str:
        """Like `copy`; the source's copy is removed when the target has its own."""

    @abstractmethod
    def task(self, task: str) -> TaskStatus:
        """How far a copy or move is. Raises NotFound."""

    @abstractmethod
    def messengers(self) -> list[MessengerInfo]:
        """Who holds the pool's memory, by name."""

    @abstractmethod
    def subscribe(self, owners: Sequence[str], capacity: int = 4096) -> EventStream:
        """Events of native pages of these `KVIdentity` digests."""

    @abstractmethod
    def hint(self, keys: Sequence[PageKey]) -> None:
        """Announce that these native pages will be wanted (`Hinted`). Best effort, returns at once."""

    @abstractmethod
    def get_c2c_config(self) -> bytes:
        """The cluster's C2C config as the master holds it (JSON bytes; empty if none). `c2c.config` reads it."""

    def report_rules(self, sender: str, rules: Sequence[RuleStatus]) -> Rules:
        """Tell the pool what this process (`sender`) has to say of the conversion rules; the answer is what all have said, and
        what is disabled. A pool without a master remembers nothing."""
        return Rules()

    def disable_rule(self, digest: str, reason: str) -> None:  # noqa: B027 - without a master there is nobody to tell
        """Nobody in the cluster takes or makes pages of this bundle until it is enabled again."""

    def enable_rule(self, digest: str) -> None:
        """Undo `disable_rule`. Raises NotFound if it is not disabled, AccessDenied for who is no admin."""
        raise NotFound("this rule is not disabled", key=digest)

    @abstractmethod
    def stats(self) -> PoolStats: ...

    @abstractmethod
    def close(self) -> None:
        """Release everything this client holds. Idempotent."""

    # -- conveniences, the same for every implementation

    def batch_put(
        self, keys: Sequence[str], values: Sequence[BufferLike], options: PutOptions = PLAIN
    ) -> list[PutOutcome]:
        """Copy each value into the pool under its key. A key that comes twice is stored once, with its first value."""
        if len(set(keys)) < len(keys):
            return self._batch_put_once(keys, values, options)
        views = [as_bytes_view(v) for v in values]
        return self._fill(views, self.reserve([(k, len(v)) for k, v in zip(keys, views, strict=True)], options))

    def _fill(
        self, views: Sequence[memoryview], space: Sequence[Reservation | Put | MoonpoolError]
    ) -> list[PutOutcome]:
        """Copy the values to where they were given space, and commit."""
        outcomes: list[PutOutcome | None] = [None] * len(views)
        reserved: list[tuple[int, Reservation]] = []
        for i, got in enumerate(space):
            if isinstance(got, Reservation):
                reserved.append((i, got))
            else:
                outcomes[i] = got
        try:
            copy_all([(r.view, views[i]) for i, r in reserved if not r.fill(views[i])])
        except BaseException:
            self.revoke([r for _, r in reserved])
            raise
        for (i, _), done in zip(reserved, self.commit([r for _, r in reserved]), strict=True):
            outcomes[i] = done
        return [o for o in outcomes if o is not None]

    def _batch_put_once(
        self, keys: Sequence[str], values: Sequence[BufferLike], options: PutOptions
    ) -> list[PutOutcome]:
        """`batch_put` for keys with repetitions: a later one of the same key fares as if it had come after the batch."""
        first: dict[str, int] = {}
        for i, key in enumerate(keys):
            first.setdefault(key, i)
        if options.groups:
            options = msgspec.structs.replace(options, groups=tuple(options.groups[i] for i in first.values()))
        outcome = dict(
            zip(first, self.batch_put(list(first), [values[i] for i in first.values()], options), strict=True)
        )
        results: list[PutOutcome] = []
        for key in keys:
            results.append(outcome[key])
            if outcome[key] is Put.STORED:
                outcome[key] = Put.EXISTED
        return results

    def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Copies of the objects, None for what does not exist."""
        with self.open_read(keys) as lease:
            return [None if v is None else bytes(v) for v in lease.views]

    def batch_get_into(self, keys: Sequence[str], buffers: Sequence[BufferLike]) -> list[int | MoonpoolError]:
        """Copy each object into its buffer; the result is the object's size. A buffer that is too small is WrongSize and
        stays untouched; a larger one is filled from its start."""
        outs = [as_bytes_view(b, writable=True) for b in buffers]
        results: list[int | MoonpoolError] = []
        with self.open_read(keys) as lease:
            for key, view, out in zip(keys, lease.views, outs, strict=True):
                if view is None:
                    results.append(NotFound("no such object", key=key))
                elif out.nbytes < view.nbytes:
                    results.append(
                        WrongSize("buffer too small", key=key, need=f"{view.nbytes} B", have=f"{out.nbytes} B")
                    )
                else:
                    copy(out[: view.nbytes], view)
                    results.append(view.nbytes)
        return results

    def put(self, key: str, value: BufferLike, options: PutOptions = PLAIN) -> Put:
        """Store one object. Raises what `batch_put` would return as an error."""
        return _value(self.batch_put([key], [value], options)[0])

    put_from = put

    def get(self, key: str) -> bytes:
        """A copy of one object. Raises NotFound."""
        got = self.batch_get([key])[0]
        if got is None:
            raise NotFound("no such object", key=key)
        return got

    def get_into(self, key: str, buffer: BufferLike) -> int:
        """Copy one object into `buffer`; returns its size. Raises NotFound, WrongSize."""
        return _value(self.batch_get_into([key], [buffer])[0])

    batch_put_from = batch_put

    def is_exist(self, key: str) -> bool:
        return self.batch_is_exist([key])[0]

    def remove(self, key: str, *, force: bool = False) -> bool:
        return bool(self.batch_remove([key], force=force)[0])

    def query_by_regex(self, pattern: str) -> list[str]:
        """Keys in which `pattern` (Python's `re`) is found. It runs here, not at a messenger, so a pattern that takes
        for ever takes only this client's time. Raises ConfigError for what is no pattern."""
        try:
            found = re.compile(pattern).search
        except re.error as e:
            raise ConfigError(f"not a regular expression: {e}", key=pattern) from e
        return [key for key in self.keys() if found(key)]

    def remove_by_regex(self, pattern: str, *, force: bool = False) -> int:
        """How many were removed."""
        return self._remove_listed(self.query_by_regex(pattern), force)

    def remove_all(self, *, force: bool = False) -> int:
        """Everything that this tenant has. How many were removed."""
        return self._remove_listed(list(self.keys()), force)

    def _remove_listed(self, keys: list[str], force: bool) -> int:
        pieces = (keys[i : i + _CHUNK] for i in range(0, len(keys), _CHUNK))
        return sum(sum(map(bool, self.batch_remove(piece, force=force))) for piece in pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _value(result: T | MoonpoolError) -> T:
    if isinstance(result, MoonpoolError):
        raise result
    return result
