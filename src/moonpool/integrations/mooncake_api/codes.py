"""The peer's integer return codes, and which of our errors answers with which."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar, cast

from moonpool import errors as e
from moonpool.integrations.mooncake_api.quiet import Quiet

log = logging.getLogger(__name__)
_quiet = Quiet(log)

One = TypeVar("One", bound=Callable[..., int])
Each = TypeVar("Each", bound=Callable[..., list[int]])
Any_ = TypeVar("Any_", bound=Callable[..., object])


class Code(IntEnum):
    """What callers compare with (`store-peer` names without their prefix); the rest of the peer's table has no case here."""

    OK = 0
    INTERNAL = -1
    NO_SPACE = -200
    INVALID_PARAMS = -600
    NOT_READY = -703
    NOT_FOUND = -704
    EXISTS = -705
    PINNED = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAILED = -800
    CHECKSUM = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901
    UNSUPPORTED = -1012
    TASK_NOT_FOUND = -1400


_CODES: tuple[tuple[type[e.MoonpoolError], Code], ...] = (
    (e.NotFound, Code.NOT_FOUND),
    (e.NoSpace, Code.NO_SPACE),
    (e.ObjectTooLarge, Code.NO_SPACE),
    (e.KeyBusy, Code.EXISTS),
    (e.NativeExists, Code.EXISTS),
    (e.LeaseExpired, Code.LEASE_EXPIRED),
    (e.DeadlineExceeded, Code.RPC_TIMEOUT),
    (e.FrameTooLarge, Code.INVALID_PARAMS),
    (e.WireError, Code.RPC_FAILED),
    (e.Unsupported, Code.UNSUPPORTED),
    (e.ChecksumMismatch, Code.CHECKSUM),
    (e.TransferError, Code.TRANSFER_FAILED),
    (e.PoolError, Code.INVALID_PARAMS),  # WrongSize, PoolClosed, a key that is none
    (e.ConfigError, Code.INVALID_PARAMS),
)


def code_of(error: e.MoonpoolError) -> int:
    """The plain int that stands for this error."""
    return int(next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL))


def refused(call: str, error: e.MoonpoolError) -> int:
    """`code_of`, with the cause in the log: the code alone does not tell it. A missing key is no news."""
    if not isinstance(error, e.NotFound):
        _quiet.warning(f"{call}:{type(error).__name__}", "%s: %s (%s)", call, error, type(error).__name__)
    return code_of(error)


def coded(call: One) -> One:
    """The method answers a MoonpoolError with its code. Anything else (TypeError for a wrong argument) goes through."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> int:
        try:
            return call(*args, **kwargs)
        except e.MoonpoolError as error:
            return refused(call.__name__, error)

    return cast(One, guarded)


def told(call: One) -> One:
    """`coded` for calls that are made once: each refusal is an error in the log."""

    @functools.wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> int:
        try:
            return call(*args, **kwargs)
        except e.MoonpoolError as error:
            log.error("%s: %s (%s)", call.__name__, error, type(error).__name__)
            return code_of(error)

    return cast(One, guarded)


def coded_each(call: Each) -> Each:
    """`coded` for a batch, whose first argument is `keys`: what makes the whole call impossible is every key's code."""

    @functools.wraps(call)
    def guarded(self: Any, keys: Sequence[str], *args: Any, **kwargs: Any) -> list[int]:
        try:
            return call(self, keys, *args, **kwargs)
        except e.MoonpoolError as error:
            return [refused(call.__name__, error)] * len(keys)

    return cast(Each, guarded)


def otherwise(fallback: Callable[[], object]) -> Callable[[Any_], Any_]:
    """For calls that have no code: what they answer instead of an error, which the log tells."""

    def wrap(call: Any_) -> Any_:
        @functools.wraps(call)
        def guarded(*args: Any, **kwargs: Any) -> object:
            try:
                return call(*args, **kwargs)
            except e.MoonpoolError as error:
                refused(call.__name__, error)
                return fallback()

        return cast(Any_, guarded)

    return wrap
