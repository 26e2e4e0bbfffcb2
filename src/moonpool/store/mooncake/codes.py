"""The peer's integer codes as our errors. 0 and more is success; a code that is not listed is a plain PoolError."""

from __future__ import annotations

from moonpool.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    KeyBusy,
    LeaseExpired,
    MoonpoolError,
    NoSpace,
    NotFound,
    PoolError,
    QuotaExceeded,
    Unsupported,
)

NO_SPACE, INVALID_PARAMS, OBJECT_NOT_FOUND, HAS_LEASE = -200, -600, -704, -706

ERRORS: dict[int, tuple[type[MoonpoolError], str]] = {
    -1: (PoolError, "internal error of the peer"),
    -101: (NotFound, "no such segment"),
    -103: (NotFound, "the master does not know this client (any more)"),
    NO_SPACE: (NoSpace, "the cluster has no room at this moment; it evicts in the background"),
    -400: (PoolError, "the peer refuses the key"),
    -500: (PoolError, "the write failed"),
    INVALID_PARAMS: (PoolError, "the peer refuses the arguments"),
    -601: (PoolError, "another client's object"),
    -703: (KeyBusy, "another writer is putting this key"),
    OBJECT_NOT_FOUND: (NotFound, "no such object"),
    -705: (KeyBusy, "another writer was first"),
    HAS_LEASE: (KeyBusy, "read or probed a moment ago: the peer holds it until that lease ends"),
    -707: (LeaseExpired, "the peer's read lease ended before the bytes had come"),
    -708: (KeyBusy, "being copied or moved"),
    -710: (NotFound, "no such replica"),
    -712: (NotFound, "the replica is gone"),
    -714: (KeyBusy, "a replica is in use"),
    -800: (ConnectionLost, "the transfer failed: the holder does not answer"),
    -801: (PoolError, "checksum mismatch"),
    -900: (ConnectionLost, "the master does not answer"),
    -901: (DeadlineExceeded, "the master did not answer in time"),
    -1010: (ConnectionLost, "the master is not serving"),
    -1011: (Unsupported, "not in the mode that the master runs in"),
    -1012: (Unsupported, "the peer does not support it"),
    -1400: (NotFound, "no such task"),
    -1401: (NoSpace, "too many tasks are waiting"),
    -1700: (QuotaExceeded, "the tenant's quota is used up"),
    -1701: (ConfigError, "the master does not know this tenant"),
}
_ELECTION = range(-1007, -999)
"""Codes of the master's election (etcd, redis, k8s)."""


def error_of(code: int, key: str = "") -> MoonpoolError:
    """The error behind a negative code."""
    if code in _ELECTION:
        return ConnectionLost("the cluster has no leading master", key=key, have=f"code {code}")
    kind, what = ERRORS.get(code, (PoolError, "the peer failed"))
    return kind(what, key=key, have=f"code {code}")
