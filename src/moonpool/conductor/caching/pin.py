"""What a pin is. `pins` has the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from moonpool.conductor.chain import KeyChain
from moonpool.conductor.types import Chain

Source = Literal["moonshot", "gemini", "anthropic", "openai"]
State = Literal["pending", "ready", "error", "inactive"]
PinId: TypeAlias = str


class Content(msgspec.Struct, frozen=True):
    """The beginning itself, for those who refer to it instead of sending it. Empty where nobody does."""

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] = ()
    original: Mapping[str, Any] = {}
    """As the API that made it wants it back."""

    @property
    def nbytes(self) -> int:
        """As JSON: what it costs to keep, about."""
        return len(msgspec.json.encode(self))


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    id: PinId
    source: Source
    """The API that made it, and that lists it."""
    owner: str
    model: str
    chain: KeyChain
    """The blocks that every prompt with this beginning has."""
    saves: int
    """Tokens of the chain's blocks: what a hit need not compute."""
    tokens: int
    """Of the beginning as it was given: what the quota counts."""
    created: float
    updated: float
    expires: float
    replicas: int = 1
    """Instances that should hold it."""
    state: State = "pending"
    error: str = ""
    uses: int = 0
    saved: int = 0
    """Tokens that its uses did not compute, so far."""
    name: str = ""
    description: str = ""
    metadata: dict[str, str] = {}
    content: Content = Content()
    nbytes: int = 0
    """Of `content` and of the chain's keys."""

    @property
    def blocks(self) -> int:
        return len(self.chain)

    @property
    def end(self) -> int:
        """Key of the last block: a prompt that has it at this place begins so."""
        return self.chain.key(self.blocks - 1)

    @property
    def alive(self) -> bool:
        return self.state in ("pending", "ready")

    def ttl(self, now: float) -> float:
        """Seconds left, 0 if none."""
        return max(0.0, self.expires - now)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A pin that is asked for. `chain` is of the blocks that every prompt with this beginning has, and of no more."""

    source: Source
    owner: str
    model: str
    chain: Chain
    tokens: int
    block_size: int
    expires: float
    replicas: int = 1
    name: str = ""
    description: str = ""
    metadata: dict[str, str] = {}
    content: Content = Content()


class PinLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    owner_pins: int = 1000
    """Pins that one owner may have at once, expired ones left out."""
    owner_tokens: int = 10_000_000
    pins: int = 20_000
    """Of all owners, expired ones included."""
    content_bytes: int = 256 << 20
    """Of all contents that are kept for reference, and all keys."""
    ttl_s: float = 3600.0
    """Where none is asked for."""
    max_ttl_s: float = 86400.0
    """Whatever is asked for. Moonshot's API has a lower one of its own."""
    keep_s: float = 3600.0
    """How long an expired pin can be looked at."""
