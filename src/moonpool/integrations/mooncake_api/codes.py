"""The peer's integer return codes, and which of our errors answers with which."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Concatenate, ParamSpec, TypeVar

from moonpool import errors as e
from moonpool.integrations.mooncake_api.quiet import Quiet

log = logging.getLogger(__name__)
_quiet = Quiet(log)

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


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


def coded(call: Callable[Concatenate[S, P], int]) -> Callable[Concatenate[S, P], int]:
    """The method answers a MoonpoolError with its code. Anything else (TypeError for a wrong argument) goes through."""

    @functools.wraps(call)
    def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return call(self, *args, **kwargs)
        except e.MoonpoolError as error:
            return refused(call.__name__, error)

    return guarded


def coded_each(
    call: Callable[Concatenate[S, Sequence[str], P], list[int]],
) -> Callable[Concatenate[S, Sequence[str], P], list[int]]:
    """`coded` for a batch: what makes the whole call impossible is every key's code."""

    @functools.wraps(call)
    def guarded(self: S, keys: Sequence[str], *args: P.args, **kwargs: P.kwargs) -> list[int]:
        try:
            return call(self, keys, *args, **kwargs)
        except e.MoonpoolError as error:
            return [refused(call.__name__, error)] * len(keys)

    return guarded


def otherwise(fallback: Callable[[], R]) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For calls that have no code: what they answer instead of an error, which the log tells."""

    def wrap(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(call)
        def guarded(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(self, *args, **kwargs)
            except e.MoonpoolError as error:
                refused(call.__name__, error)
                return fallback()

        return guarded

    return wrap
