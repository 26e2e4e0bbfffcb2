"""Request traces as the Mooncake project publishes them (the `FAST25-release/traces` folder of its repository).

JSON Lines; a line is one request: `timestamp` (ms since the start), `input_length` and `output_length` (tokens) and `hash_ids`, one
id for each 512 tokens of the prompt, the last partial block included. Equal ids mean equal prompts up to there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from moonpool.errors import TraceError

BLOCK = 512
"""Tokens that an id of a published trace stands for."""


_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Line(msgspec.Struct, frozen=True):
    """A line of a file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[_Id, ...]


class Arrival(msgspec.Struct, frozen=True):
    """A request that arrives `at` seconds after the start."""

    at: float
    tokens: int
    output_tokens: int
    keys: tuple[int, ...]
    """Of its blocks, by `block_key`."""


class Trace(msgspec.Struct, frozen=True):
    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    @property
    def keys(self) -> list[tuple[int, ...]]:
        return [a.keys for a in self.arrivals]

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.arrivals)

    def faster(self, speed: float) -> Trace:
        """The same requests, `speed` times as many a second."""
        if speed <= 0:
            raise TraceError("cannot be played at this speed", key=self.name, need="more than 0", have=str(speed))
        return Trace(self.name, tuple(Arrival(a.at / speed, a.tokens, a.output_tokens, a.keys) for a in self.arrivals))


def block_key(hash_id: int) -> int:
    """Published traces number their blocks 0, 1, 2 …; the prefix index wants keys that are spread over 64 bits as hashes are."""
    return xxhash.xxh3_64_intdigest(hash_id.to_bytes(8, "little"))


def load(path: Path, *, spread: bool = True, limit: int | None = None) -> Trace:
    """The trace of a file, in order of arrival; `spread` see there; `limit` keeps the first so many requests.

    TraceError names the file, the line and what is wrong with it.
    """
    if not path.is_file():
        raise TraceError("no such trace", key=str(path), fix="Give a .jsonl file of Mooncake's FAST25-release/traces.")
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            lines.append(_line(decoder, text, f"{path.name}, line {number}", lines[-1] if lines else None))
            if limit is not None and len(lines) >= limit:
                break
    if not lines:
        raise TraceError("the trace is empty", key=str(path))
    times = spread_buckets([x.timestamp for x in lines]) if spread else [x.timestamp for x in lines]
    keys = {i: block_key(i) for line in lines for i in line.hash_ids}
    arrivals = (
        Arrival(at / 1000, x.input_length, x.output_length, tuple(keys[i] for i in x.hash_ids))
        for at, x in zip(times, lines, strict=True)
    )
    return Trace(path.name.removesuffix(".jsonl").removesuffix("_trace"), tuple(arrivals))


def _line(decoder: msgspec.json.Decoder[Line], text: bytes, where: str, before: Line | None) -> Line:
    try:
        line = decoder.decode(text)
    except msgspec.MsgspecError as e:
        raise TraceError(f"not a request: {e}", key=where) from e
    blocks = -(-line.input_length // BLOCK)
    if line.input_length < 1 or line.output_length < 0:
        raise TraceError(
            "lengths make no request",
            key=where,
            need="input_length of 1 and more, output_length of 0 and more",
            have=f"{line.input_length} and {line.output_length}",
        )
    if len(line.hash_ids) != blocks:
        raise TraceError(
            "hash_ids and input_length disagree", key=where, need=f"{blocks} ids", have=str(len(line.hash_ids))
        )
    if len(set(line.hash_ids)) != blocks:
        raise TraceError("an id stands for two places of one prompt", key=where)
    if line.timestamp < 0 or (before is not None and line.timestamp < before.timestamp):
        raise TraceError("time goes backwards", key=where, have=f"{line.timestamp} ms")
    return line


def spread_buckets(times: Sequence[float]) -> list[float]:
    """Arrivals that share a time stamp, evenly over the time until the next stamp.

    The recorded traces round times to 3 s, and would otherwise come in bursts that nobody sent. Order is kept; the last stamp's
    arrivals get the width of the one before.
    """
    spread: list[float] = []
    start, width = 0, 0.0
    while start < len(times):
        end = start
        while end < len(times) and times[end] == times[start]:
            end += 1
        width = times[end] - times[start] if end < len(times) else width
        # Long quiet is no bucket: nothing is moved further than the rounding can explain.
        step = min(width, _BUCKET_MS) / (end - start)
        spread += [times[start] + i * step for i in range(end - start)]
        start = end
    return spread


_BUCKET_MS = 3000.0


def prefix_breaks(prompts: Iterable[Sequence[int]]) -> int:
    """Ids that were seen after two different ids: 0 where the ids are chained hashes, as they must be."""
    parent: dict[int, int] = {}
    broken: set[int] = set()
    for keys in prompts:
        before = -1
        for key in keys:
            if parent.setdefault(key, before) != before:
                broken.add(key)
            before = key
    return len(broken)
