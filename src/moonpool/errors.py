"""Every error that Moonpool raises, in one tree.

    MoonpoolError
    ├── ConfigError               a file, flag or argument is wrong: mend it and start again
    │   └── TraceError            a request trace cannot be played: names the file and the line
    ├── WireError                 processes could not talk
    │   ├── ConnectionLost        the peer went away (the caller may reconnect)
    │   ├── FrameTooLarge         a message over its cap, refused before memory is taken for it
    │   ├── ProtocolError         bytes that are no message, or a message of another version
    │   ├── DeadlineExceeded      no answer in time
    │   └── AccessDenied          a secret was not proved, or the role may not do this
    ├── PoolError                 one key's operation failed
    │   ├── NotFound              no such object
    │   ├── NoSpace               nothing can be evicted to make room
    │   │   ├── NotEnoughMessengers   fewer than the copies that were asked for
    │   │   ├── QuotaExceeded     the tenant holds all that it may
    │   │   └── Draining          the messenger is being emptied and takes nothing new
    │   ├── ObjectTooLarge        larger than the segment could ever hold
    │   ├── KeyBusy               another writer is putting this key
    │   ├── LeaseExpired          a read or write handle outlived its time
    │   ├── WrongSize             buffer and object differ in size
    │   ├── NativeExists          a converted page lost to a native one
    │   ├── Unsupported           this pool's engine cannot do it
    │   └── PoolClosed            the pool was closed
    ├── TransferError             memory or bytes of a transfer are not what they must be
    │   ├── NotRegistered         the range is not, or not wholly, registered memory
    │   ├── StaleRegion           the region was given up and its id belongs to another now
    │   ├── Overlap               two ranges share bytes
    │   └── ChecksumMismatch      the bytes that arrived are not those that were sent
    ├── DiskError                 the disk tier's folder cannot be used
    │   ├── FolderInUse           another process owns it
    │   └── FolderForeign         it is not a disk tier's, or its marker is damaged
    ├── ModelError                a model folder is missing, broken or of a kind that is not supported
    ├── ConversionError           cross-model conversion
    │   ├── ConversionRefused     rule, bundle and models do not fit: says which field differs
    │   ├── BundleError           a projector bundle is unusable
    │   │   ├── DigestMismatch    bytes are not those that the rule names
    │   │   └── BundleCorrupt     truncated, of the wrong shape, NaN or Inf
    │   └── DownloadFailed        the bundle could not be fetched
    └── RequestError              a client's HTTP request is wrong (its status is 4xx)
        └── ContextTooLong        prompt and answer exceed the model's positions

An error carries what was wrong in fields (`key`, `need`, `have`, `fix`), so that a message, a log line and a wire reply
say the same. This module imports nothing.
"""

from __future__ import annotations


class MoonpoolError(Exception):
    """Base of all. `key` names the thing, `need`/`have` what was needed and what there is, `fix` how to mend it."""

    def __init__(self, what: str, *, key: str = "", need: str = "", have: str = "", fix: str = "") -> None:
        self.what, self.key, self.need, self.have, self.fix = what, key, need, have, fix
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [f"{self.key}: {self.what}" if self.key else self.what]
        if self.need:
            parts.append(f"needed {self.need}")
        if self.have:
            parts.append(f"there is {self.have}")
        text = "; ".join(parts)
        return f"{text}. {self.fix}" if self.fix else text

    def fields(self) -> dict[str, str]:
        """The fields as plain text, for the wire and for JSON logs; `from_fields` is the inverse."""
        return {"what": self.what, "key": self.key, "need": self.need, "have": self.have, "fix": self.fix}


class ConfigError(MoonpoolError): ...


class TraceError(ConfigError): ...


class WireError(MoonpoolError): ...


class ConnectionLost(WireError): ...


class FrameTooLarge(WireError): ...


class ProtocolError(WireError): ...


class DeadlineExceeded(WireError): ...


class AccessDenied(WireError): ...


class PoolError(MoonpoolError): ...


class NotFound(PoolError): ...


class NoSpace(PoolError): ...


class NotEnoughMessengers(NoSpace): ...


class QuotaExceeded(NoSpace): ...


class Draining(NoSpace): ...


class ObjectTooLarge(PoolError): ...


class KeyBusy(PoolError): ...


class LeaseExpired(PoolError): ...


class WrongSize(PoolError): ...


class NativeExists(PoolError): ...


class Unsupported(PoolError): ...


class PoolClosed(PoolError): ...


class TransferError(MoonpoolError): ...


class NotRegistered(TransferError): ...


class StaleRegion(TransferError): ...


class Overlap(TransferError): ...


class ChecksumMismatch(TransferError): ...


class DiskError(MoonpoolError): ...


class FolderInUse(DiskError): ...


class FolderForeign(DiskError): ...


class ModelError(MoonpoolError): ...


class ConversionError(MoonpoolError): ...


class ConversionRefused(ConversionError): ...


class BundleError(ConversionError): ...


class DigestMismatch(BundleError): ...


class BundleCorrupt(BundleError): ...


class DownloadFailed(ConversionError): ...


class RequestError(MoonpoolError): ...


class ContextTooLong(RequestError): ...


def _tree(root: type[MoonpoolError]) -> dict[str, type[MoonpoolError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_fields(name: str, fields: dict[str, str]) -> MoonpoolError:
    """The error that a peer reported; an unknown name becomes the base class, never an arbitrary type."""
    kind = _tree(MoonpoolError).get(name, MoonpoolError)
    known = {k: v for k, v in fields.items() if k in ("key", "need", "have", "fix")}
    return kind(fields.get("what", name), **known)
