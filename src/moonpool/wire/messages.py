"""All messages between Moonpool's processes. Typed, versioned, msgpack; decoded straight into these structs.

Requests are one tagged union per service, so that an unknown or misplaced message is a ProtocolError, never a guess.
Bounds that the decoder enforces stand here; the frame's size cap is in `framing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from moonpool.types import MessengerInfo, Pin, PoolEvent, PoolStats, PutOptions, Removed, Rules, RuleStatus, TaskStatus

MAX_BATCH = 65536
MAX_KEY = 1024
MAX_SIZE = 1 << 48
MAX_TENANT = 64
ROW_ALIGN = 64

Key: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY)]
Keys: TypeAlias = Annotated[list[Key], msgspec.Meta(max_length=MAX_BATCH)]
Ids: TypeAlias = Annotated[list[int], msgspec.Meta(max_length=MAX_BATCH)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Tenant: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TENANT, pattern=r"^[A-Za-z0-9._@/-]*$")]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
Items: TypeAlias = Annotated[list[tuple[Key, Size]], msgspec.Meta(max_length=MAX_BATCH)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True): ...


# -- any service


class Hello(Message, frozen=True):
    """Who are you? The version stands in the frame. What this session does from now on, it does as this tenant."""

    tenant: Tenant = ""


class Error(Message, frozen=True):
    """A refusal; `errors.from_fields` makes it an exception again."""

    name: str
    fields: dict[str, str]


class Done(Message, frozen=True):
    """Success with nothing to say."""


# -- messenger


class Welcome(Message, frozen=True):
    """Answer to Hello; the segment's descriptor travels beside it."""

    generation: str
    """Changes with every start of the messenger: what was learnt from another generation is void."""
    capacity: int
    name: str = ""
    region: int = 0
    """Of the segment, for transfers from other machines; 0 if there are none."""
    region_generation: int = 0
    token: bytes = b""
    """Names this session on its data connections: the first bytes of each."""


class Reserve(Message, frozen=True):
    items: Items
    options: PutOptions | None = None


class Span(Message, frozen=True):
    """Where an object lies in the segment. `id` is the reservation."""

    id: int
    offset: int
    size: int


class Existed(Message, frozen=True): ...


class Reserved(Message, frozen=True):
    """One per item, or for all of them a `row`: (first id, offset). Then the ids follow each other, and so do the spans, each
    beginning at the next multiple of ROW_ALIGN."""

    results: list[Span | Existed | Error]
    row: tuple[int, int] | None = None

    def spans(self, sizes: Sequence[int]) -> list[Span | Existed | Error]:
        """One per item, whichever way they came; `sizes` are those that were asked for."""
        if self.row is None:
            return self.results
        (first, offset), spans = self.row, []
        for i, size in enumerate(sizes):
            spans.append(Span(first + i, offset, size))
            offset += -(-size // ROW_ALIGN) * ROW_ALIGN
        return list(spans)


class Commit(Message, frozen=True):
    ids: Ids


class Committed(Message, frozen=True):
    """One per reservation; None: all are done."""

    results: list[Done | Error] | None


class Revoke(Message, frozen=True):
    ids: Ids


class OpenRead(Message, frozen=True):
    keys: Keys


class Opened(Message, frozen=True):
    lease: int
    spans: list[tuple[int, int] | None]
    """(offset, size) per key."""


class CloseRead(Message, frozen=True):
    """The answer's flags say which leases were still held: what was read through another one is not to be believed."""

    leases: Ids


class EndCopy(Message, frozen=True):
    """Close a read by which something was copied. The answer's flag: whether what was read is still what is there under its key. With
    `remove`, and if so, it is not there any more afterwards; what came in its place stays."""

    lease: int
    remove: bool


class Lookup(Message, frozen=True):
    keys: Keys
    origins: Annotated[list[str], msgspec.Meta(max_length=64)]


class Matches(Message, frozen=True):
    keys: list[str | None]


class Announce(Message, frozen=True):
    """Native keys that were missed (`hinted` false) or will be wanted (true)."""

    keys: Keys
    hinted: bool


class Exist(Message, frozen=True):
    keys: Keys


class Remove(Message, frozen=True):
    keys: Keys
    force: bool = False


class Removals(Message, frozen=True):
    values: list[Removed]


class RemoveAll(Message, frozen=True):
    """All that the session's tenant has here."""

    force: bool = False


class Count(Message, frozen=True):
    value: int


class ListKeys(Message, frozen=True):
    """The next page of the tenant's keys, or the first one (`restart`)."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    restart: bool = False


class KeyPage(Message, frozen=True):
    """Empty: that was all."""

    keys: list[str]


class DescribeObjects(Message, frozen=True):
    keys: Keys


class Description(msgspec.Struct, frozen=True, array_like=True):
    size: int
    in_memory: bool
    pin: Pin
    pinned_for_s: float
    offset: int


class Descriptions(Message, frozen=True):
    items: list[Description | None]


class Pull(Message, frozen=True):
    """Copy these from another messenger; `move` removes them there afterwards. The answer's ids are those of `GetTasks`."""

    keys: Keys
    source: MessengerInfo
    """The messenger that has them; whoever pulls chooses how to reach it."""
    move: bool


class Started(Message, frozen=True):
    ids: list[str]


class GetTask(Message, frozen=True):
    id: Annotated[str, msgspec.Meta(max_length=64)]


class Task(Message, frozen=True):
    status: TaskStatus


class Drain(Message, frozen=True):
    """Take nothing new from now on, or do so again. An admin's verb."""

    on: bool


class ListTenants(Message, frozen=True):
    """Whose objects are here, in memory or on disk? Looks at every key. An admin's verb."""


class Tenants(Message, frozen=True):
    names: list[str]


class Flags(Message, frozen=True):
    values: list[bool]


class Subscribe(Message, frozen=True):
    owners: Annotated[list[str], msgspec.Meta(max_length=4096)]
    capacity: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Subscribed(Message, frozen=True):
    id: int


class NextEvents(Message, frozen=True):
    subscription: int
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH)]
    timeout: Annotated[float, msgspec.Meta(ge=0, le=60)]


class Events(Message, frozen=True):
    events: list[PoolEvent]
    dropped: int


class GetStats(Message, frozen=True): ...


class Stats(Message, frozen=True):
    stats: PoolStats


# -- master


class Register(Message, frozen=True):
    """A messenger joins, or joins again after the master's or its own restart."""

    info: MessengerInfo
    generation: str


class Registered(Message, frozen=True):
    generation: str
    """The master's; a change means that it remembers nothing."""
    quotas: dict[str, int] = {}
    """What this messenger may hold of each tenant that has a quota."""
    members: int = 0
    """Messengers in the pool."""


class Heartbeat(Message, frozen=True):
    """Sign of life. While the connection that it came over is open, the messenger lives; when it breaks, it is gone."""

    info: MessengerInfo
    generation: str
    tenants: dict[str, int]
    """Bytes held, by tenant."""


class Publish(Message, frozen=True):
    """What a messenger holds since its last publication."""

    name: Key
    added: Keys
    removed: Keys


class ListMessengers(Message, frozen=True): ...


class Messengers(Message, frozen=True):
    """Those alive."""

    messengers: list[MessengerInfo]


class Locate(Message, frozen=True):
    keys: Keys


class Located(Message, frozen=True):
    """Names of the messengers that hold each key."""

    holders: list[list[str]]


class SetQuota(Message, frozen=True):
    """Bytes that a tenant may hold in the whole pool; None = no limit. An admin's verb."""

    tenant: Tenant
    limit: Size | None


class GetQuotas(Message, frozen=True): ...


class Quotas(Message, frozen=True):
    """By tenant: (limit or -1, bytes held as of the last heartbeats)."""

    tenants: dict[str, tuple[int, int]]


class GetC2C(Message, frozen=True): ...


class C2C(Message, frozen=True):
    config: bytes


class ReportRules(Message, frozen=True):
    """What `sender` has to say of the conversion rules, in place of what it said before; the answer is what all said. With an empty
    sender: only ask."""

    sender: Annotated[str, msgspec.Meta(max_length=200)] = ""
    rules: Annotated[list[RuleStatus], msgspec.Meta(max_length=256)] = []


class RulesAre(Message, frozen=True):
    rules: Rules


class DisableRule(Message, frozen=True):
    """Nobody takes or makes pages of this bundle until it is enabled again."""

    digest: Digest
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class EnableRule(Message, frozen=True):
    """An admin's verb: what a drift alarm stopped goes on only if somebody answers for it."""

    digest: Digest


# -- transfer engine


class Describe(Message, frozen=True):
    """Which memory can be named in transfers?"""


class Described(Message, frozen=True):
    """(address, size) of each region, in the order of registration."""

    regions: list[tuple[int, int]]


class Notify(Message, frozen=True):
    """A word to the owner of the memory, after a transfer."""

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]


MessengerRequest: TypeAlias = (
    Hello
    | Reserve
    | Commit
    | Revoke
    | OpenRead
    | CloseRead
    | EndCopy
    | Lookup
    | Announce
    | Exist
    | Remove
    | RemoveAll
    | ListKeys
    | DescribeObjects
    | Pull
    | GetTask
    | Drain
    | ListTenants
    | Subscribe
    | NextEvents
    | GetStats
)
MasterRequest: TypeAlias = (
    Hello
    | Register
    | Heartbeat
    | Publish
    | ListMessengers
    | Locate
    | SetQuota
    | GetQuotas
    | GetStats
    | GetC2C
    | ReportRules
    | DisableRule
    | EnableRule
)
ADMIN: tuple[type[Message], ...] = (Drain, ListTenants, SetQuota, EnableRule)
"""Verbs that only an admin may use."""
EngineRequest: TypeAlias = Hello | Describe | Notify
Reply: TypeAlias = (
    Error
    | Done
    | Welcome
    | Reserved
    | Committed
    | Opened
    | Matches
    | Flags
    | Removals
    | Count
    | KeyPage
    | Descriptions
    | Started
    | Task
    | Quotas
    | Tenants
    | Subscribed
    | Events
    | Stats
    | Registered
    | Messengers
    | Located
    | C2C
    | RulesAre
    | Described
)
