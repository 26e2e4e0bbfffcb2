"""An engine's blocks → our own keys: recomputed from the events' tokens, so that no engine's hashing ever has to be reproduced.

The engine's hash serves two uses only: to find the parent of a block, and the block that was removed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

from moonpool.conductor.chain import Context, chained
from moonpool.conductor.events.codec import Batch, BlockRemoved, BlockStored, Cleared, EngineHash
from moonpool.conductor.index import Plane
from moonpool.conductor.types import InstanceId

_ORPHANS = 4096
"""Events whose parent we have not seen, kept until it comes."""
REASONS = (
    "another block size than the conductor's",
    "another tokenizer or chat template than the engine's",
    "a salt, tenant or LoRA that the requests do not have",
    "another model name",
    "prompts shorter than one block",
    "the engine publishes only a part of its blocks (hybrid attention, or prefix caching is off)",
)


class Index(Protocol):
    def insert(self, instance: InstanceId, keys: list[int], plane: Plane = Plane.GPU) -> None: ...

    def remove(self, instance: InstanceId, keys: list[int], plane: Plane = Plane.GPU) -> None: ...

    def clear(self, instance: InstanceId) -> None: ...


class Translator:
    """Of one instance. `tenant` and `model` are those that its prompts' chains have."""

    def __init__(self, instance: InstanceId, index: Index, model: str, block_size: int, tenant: str = "") -> None:
        self._instance, self._index = instance, index
        self._model, self._block_size, self._tenant = model, block_size, tenant
        self._own: dict[EngineHash, int] = {}
        self._planes: dict[EngineHash, int] = {}
        self._orphans: dict[EngineHash, deque[BlockStored]] = {}
        self._order = OrderedDict[EngineHash, None]()
        self.stored = self.removed = self.orphaned = self.refused = self.other_groups = 0
        self.why_refused = ""

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case Cleared():
                    self.forget()

    def forget(self) -> None:
        """It holds nothing any more."""
        self._own.clear()
        self._planes.clear()
        self._orphans.clear()
        self._order.clear()
        self._index.clear(self._instance)

    def tiers(self, hashes: Sequence[EngineHash]) -> tuple[int, int, int]:
        """Of the engine's own hashes, how many from the start are in its memory, in that or the CPU's, and in any tier."""
        found = []
        for planes in (
            1 << Plane.GPU,
            1 << Plane.GPU | 1 << Plane.CPU,
            1 << Plane.GPU | 1 << Plane.CPU | 1 << Plane.DISK,
        ):
            found.append(next((i for i, h in enumerate(hashes) if not self._planes.get(h, 0) & planes), len(hashes)))
        return found[0], found[1], found[2]

    def _store(self, event: BlockStored) -> None:
        if event.group:
            self.other_groups += len(event.hashes)
            return
        if event.block_size != self._block_size or len(event.tokens) != event.block_size * len(event.hashes):
            self.refused += len(event.hashes)
            self.why_refused = f"blocks of {event.block_size} tokens, the conductor's have {self._block_size}"
            return
        parent = self._parent(event)
        if parent is None:
            self._wait(event)
            return
        keys, size = [], self._block_size
        raw = memoryview(array("I", event.tokens)).cast("B")
        for i, engine in enumerate(event.hashes):
            parent = chained(parent, bytes(raw[4 * i * size : 4 * (i + 1) * size]))
            keys.append(parent)
            self._own[engine] = parent
            self._planes[engine] = self._planes.get(engine, 0) | 1 << event.plane
        self._index.insert(self._instance, keys, event.plane)
        self.stored += len(keys)
        for engine in event.hashes:
            for child in self._orphans.pop(engine, ()):
                self._order.pop(engine, None)
                self._store(child)

    def _parent(self, event: BlockStored) -> int | None:
        if event.parent is None:
            return Context(self._tenant, self._model, event.lora, self._block_size, event.salt).root
        return self._own.get(event.parent)

    def _wait(self, event: BlockStored) -> None:
        assert event.parent is not None
        self._orphans.setdefault(event.parent, deque()).append(event)
        self._order[event.parent] = None
        self.orphaned += 1
        while len(self._order) > _ORPHANS:
            self._orphans.pop(self._order.popitem(last=False)[0], None)

    def _remove(self, event: BlockRemoved) -> None:
        if event.group:
            return
        known = [h for h in event.hashes if h in self._own]
        self._index.remove(self._instance, [self._own[h] for h in known], event.plane)
        self.removed += len(known)
        for engine in known:
            self._planes[engine] &= ~(1 << event.plane)
            if not self._planes[engine]:
                del self._own[engine], self._planes[engine]
