"""KV event batches of vLLM, SGLang and the Mooncake Store's master, as they come over ZMQ.

A batch is a msgpack array `[ts, [event, …], dp rank?]`. An event is a map with `type`, or (older engines) an array that begins with
it. Hashes are bytes or integers. What is unknown is left out: fields silently, events counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from moonpool.conductor.index import Plane
from moonpool.errors import ProtocolError

EngineHash: TypeAlias = "int | bytes"
END = (1 << 64) - 1
"""Sequence number that ends a replay."""

_PLANES = {
    **dict.fromkeys(("gpu", "hbm", "device"), Plane.GPU),
    **dict.fromkeys(("cpu", "cpu_pinned", "host", "dram", "external"), Plane.CPU),
    **dict.fromkeys(("disk", "storage", "ssd"), Plane.DISK),
}
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")


@dataclass(frozen=True, slots=True)
class BlockStored:
    hashes: Sequence[EngineHash]
    parent: EngineHash | None
    tokens: Sequence[int]
    block_size: int
    plane: Plane = Plane.GPU
    lora: str = ""
    salt: str = ""
    group: int = 0
    """Of hybrid models: only group 0, full attention, gives a prefix."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    hashes: Sequence[EngineHash]
    plane: Plane = Plane.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared: ...


Event: TypeAlias = BlockStored | BlockRemoved | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    events: list[Event]
    rank: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    """Types of events that we do not know, with their number."""


def decode(raw: bytes | memoryview) -> Batch:
    """Raises ProtocolError for anything but a batch."""
    try:
        found: Any = msgspec.msgpack.decode(raw)
    except msgspec.DecodeError as e:
        raise ProtocolError(f"a KV event batch that is no msgpack: {e}") from e
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[1], list):
        raise ProtocolError("not a KV event batch", need="[ts, [event, …], rank?]")
    events: list[Event] = []
    unknown: dict[str, int] = {}
    for one in found[1]:
        kind, fields = _fields(one)
        try:
            event = _event(kind, fields)
        except (TypeError, ValueError, KeyError) as e:
            raise ProtocolError(f"a KV event of a wrong shape: {e!r}", key=kind) from e
        if event is None:
            unknown[kind] = unknown.get(kind, 0) + 1
        else:
            events.append(event)
    rank = found[2] if len(found) > 2 and isinstance(found[2], int) else 0
    return Batch(events, rank, unknown)


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type", event.get("event_type", ""))), event
    if isinstance(event, list) and event and isinstance(event[0], str):
        names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(event[0], ())
        return event[0], dict(zip(names, event[1:], strict=False))
    raise ProtocolError("not a KV event", need="a map with `type`, or an array that begins with it")


def _event(kind: str, f: dict[str, Any]) -> Event | None:
    match kind:
        case "BlockStored" | "stored":
            hashes = f["block_hashes"] if "block_hashes" in f else f["seq_hashes"]
            parent = f.get("parent_block_hash", f.get("parent_hash"))
            return BlockStored(
                [_hash(h) for h in hashes],
                None if parent is None else _hash(parent),
                [int(t) for t in f.get("token_ids") or ()],
                int(f["block_size"]),
                _plane(f),
                str(f.get("lora_name") or f.get("lora_id") or ""),
                str(f.get("cache_salt") or f.get("additional_salt") or ""),
                int(f.get("group_idx") or 0),
            )
        case "BlockRemoved" | "removed":
            hashes = f["block_hashes"] if "block_hashes" in f else f["seq_hashes"]
            return BlockRemoved([_hash(h) for h in hashes], _plane(f), int(f.get("group_idx") or 0))
        case "AllBlocksCleared" | "cleared":
            return Cleared()
    return None


def _hash(found: Any) -> EngineHash:
    if isinstance(found, bool) or not isinstance(found, int | bytes):
        raise TypeError(f"a hash is bytes or a number, not {type(found).__name__}")
    return found


def _plane(f: dict[str, Any]) -> Plane:
    """A medium that nobody has heard of counts as slow."""
    medium = f.get("medium")
    return Plane.GPU if medium is None else _PLANES.get(str(medium).lower(), Plane.CPU)


def live(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """`[topic, sequence, payload]` → (sequence, payload). Raises ProtocolError."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ProtocolError(
            "not a KV event message", need="topic, 8 bytes, payload", have=str([len(f) for f in frames])
        )
    return int.from_bytes(frames[1], "big"), frames[2]


def replayed(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """A replay's answer, with or without a topic frame → (sequence, payload); None at its end. Raises ProtocolError."""
    inner = list(frames[1:]) if frames and not frames[0] else list(frames)
    if len(inner) == 3:
        inner = inner[1:]
    if len(inner) != 2 or len(inner[0]) != 8:
        raise ProtocolError(
            "not a replayed KV event", need="[topic,] 8 bytes, payload", have=str([len(f) for f in frames])
        )
    number = int.from_bytes(inner[0], "big")
    return None if number == END else (number, inner[1])
