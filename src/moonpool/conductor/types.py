"""What a policy is asked, and what it answers. Plain data: no clock, no sockets, no engine.

Lengths are tokens, times seconds, sizes bytes. A *block* is `Request.block_size` tokens; block i of a chain stands for all tokens
up to its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

InstanceId: TypeAlias = str
Role = Literal["prefill", "decode"]
Tier = Literal["gpu", "cpu", "disk"]


class Chain(Protocol):
    """A prompt's full blocks as chained 64-bit keys: equal keys, equal tokens from the start (and equal context)."""

    def __len__(self) -> int:
        """Full blocks."""
        ...

    def key(self, index: int) -> int:
        """Key of block `index`. May be computed only now."""
        ...

    def keys(self) -> Sequence[int]:
        """All of them, in order."""
        ...


class SLO(msgspec.Struct, frozen=True):
    """Limits that admission holds predictions against."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1


class Convertible(msgspec.Struct, frozen=True):
    """The same tokens as pages of another model, that a conversion rule can make into this one's."""

    model: str
    chain: Chain
    seconds_per_token: float
    """Of conversion, from the cost model."""
    max_share: float = 1.0
    """Of the prompt that may be converted."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    chain: Chain
    tokens: int
    """Prompt length, the last partial block included."""
    block_size: int = 512
    output_tokens: int = 256
    """Asked for at most, or expected."""
    session: str = ""
    slo: SLO = SLO()
    priority: int = 0
    """Higher is served longer under overload."""
    convertible: tuple[Convertible, ...] = ()
    pinned: frozenset[InstanceId] = frozenset()
    """Instances that hold a context cache which this prompt begins with: at equal cost they come first."""


class Transfer(msgspec.Struct, frozen=True):
    """Blocks `[first, last)` of the request's chain go from one instance's cache to another's."""

    source: InstanceId
    target: InstanceId
    first: int
    last: int


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a plan's estimate. `ttft_s` is their sum."""

    queue_s: float = 0.0
    transfer_s: float = 0.0
    convert_s: float = 0.0
    prefill_s: float = 0.0
    tbt_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.transfer_s + self.convert_s + self.prefill_s


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    prefill: InstanceId
    decode: InstanceId
    cached_tokens: int = 0
    """Tokens of the prompt that the prefill instance need not compute: what it holds, what is moved or converted for it."""
    own_tokens: int = 0
    """Of these, what it holds itself."""
    converted_tokens: int = 0
    transfers: tuple[Transfer, ...] = ()
    predicted: Predicted = Predicted()
    policy: str = ""
    why: str = ""
    """One line for people: headers, `/debug/decisions`."""
    considered: int = 0
    """Candidates that were scored."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Not served now. `soft` admission serves the plan all the same and tells."""

    stage: Literal["prefill", "decode", "pool"]
    why: str
    retry_after_s: float = 1.0
    predicted: Predicted = Predicted()


class Depth(NamedTuple):
    """How far an instance holds a chain from its start, in blocks."""

    blocks: int
    """What a request that is queued there now would find when its turn comes: prompts that wait before it included."""
    gpu: int = 0
    """Of these, held in the engine's own memory (0 where unknown); the others lie in slower tiers."""
    sure: int = 0
    """Of these, there already: an event, or the end of a prefill, has told. Only these can be sent elsewhere."""


class ClusterView(Protocol):
    """What a policy may look at. All of one model; all answers are for `now`, which the view was made with."""

    now: float

    def instances(self, role: Role) -> Sequence[InstanceId]:
        """Those that take requests: alive, not draining, breaker closed. Order carries no meaning."""
        ...

    def least_loaded(self, role: Role, count: int) -> Sequence[InstanceId]:
        """Up to `count`, least work first, equal ones in random order."""
        ...

    def matches(self, chain: Chain) -> Mapping[InstanceId, Depth]:
        """Prefill instances that hold at least the chain's first block."""
        ...

    def shared_depth(self, chain: Chain) -> int:
        """Blocks from the start that (nearly) the whole fleet holds: no reason to prefer anybody."""
        ...

    def requests(self, instance: InstanceId, role: Role) -> int:
        """Queued and running."""
        ...

    def kind(self, instance: InstanceId) -> Hashable:
        """Instances of one kind take the same time for the same prefill."""
        ...

    def queue_s(self, instance: InstanceId) -> float:
        """Predicted work before a new request on a prefill instance."""
        ...

    def prefill_s(self, instance: InstanceId, tokens: int, cached: int) -> float:
        """Of a prompt of `tokens` of which `cached` are there."""
        ...

    def transfer_s(self, source: InstanceId, target: InstanceId, tokens: int) -> float:
        """Of the KV of `tokens`, the sender's queue included."""
        ...

    def tbt_s(self, instance: InstanceId, request: Request) -> float:
        """Predicted time between tokens on a decode instance with the request in its batch."""
        ...

    def kv_room(self, instance: InstanceId) -> int:
        """Tokens that a decode instance can still hold."""
        ...

    def penalty_s(self, instance: InstanceId) -> float:
        """Added to the score of one that failed lately; 0 else."""
        ...

    def fresh(self, instance: InstanceId) -> bool:
        """Joined so lately that its cache is still empty (warm-up credit, exploration)."""
        ...


class Random(Protocol):
    """As much of `random.Random` as policies use: ties are broken by it, so that equal candidates do not herd."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


class Policy(Protocol):
    name: str

    def plan(self, request: Request, view: ClusterView) -> Plan | Refusal:
        """Refusal only where no instance can take the request at all (`stage="pool"`); whether a plan meets its SLO is
        admission's question."""
        ...
