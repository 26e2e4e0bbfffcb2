"""Puts and gets: by value, by raw pointer, one and many, from and into one buffer or several."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.errors import ConfigError, KeyBusy, MoonpoolError, NativeExists
from moonpool.integrations.mooncake_api import copying
from moonpool.integrations.mooncake_api.buffers import BufferHandle
from moonpool.integrations.mooncake_api.codes import Code, coded, coded_each, otherwise, refused
from moonpool.integrations.mooncake_api.keys import usable
from moonpool.integrations.mooncake_api.life import Life
from moonpool.integrations.mooncake_api.memory import view_at
from moonpool.integrations.mooncake_api.replicate import ReplicateConfig, SoftPinAction
from moonpool.store.base import as_bytes_view
from moonpool.transfer.copying import copy_all
from moonpool.types import BufferLike, Pin, PutOptions, PutOutcome

Pointers = Sequence[int]
_PLAIN = ReplicateConfig()
_INVALID = int(Code.INVALID_PARAMS)


class Data(Life):
    """Existing keys keep their value and the put answers 0; `b""` answers -600; one key's failure is no other key's.

    `config` says how to store (`ReplicateConfig`). Sizes are bytes, pointers are addresses of memory that the caller keeps.
    """

    # -- put, by value

    @coded
    def put(self, key: str, value: BufferLike, config: ReplicateConfig = _PLAIN) -> int:
        """0, or why not. All bytes of `value` are stored, whatever the size of its items."""
        return self._put_values([key], [[value]], config)[0]

    @coded
    def put_parts(self, key: str, *parts: BufferLike, config: ReplicateConfig = _PLAIN) -> int:
        """One object from the concatenated `parts`."""
        return self._put_values([key], [parts], config)[0]

    @coded
    def put_batch(self, keys: Sequence[str], values: Sequence[BufferLike], config: ReplicateConfig = _PLAIN) -> int:
        """0 if all were stored or there, else the first failure's code; the others are stored all the same."""
        return _first_failure(self._put_values(keys, [[v] for v in values], config))

    @coded
    def upsert(self, key: str, value: BufferLike, config: ReplicateConfig = _PLAIN) -> int:
        """Insert or replace. A reader sees the old bytes or the new ones, never a mixture."""
        return self._put_values([key], [[value]], config, replace=True)[0]

    @coded
    def upsert_parts(self, key: str, *parts: BufferLike, config: ReplicateConfig = _PLAIN) -> int:
        return self._put_values([key], [parts], config, replace=True)[0]

    @coded
    def upsert_batch(self, keys: Sequence[str], values: Sequence[BufferLike], config: ReplicateConfig = _PLAIN) -> int:
        return _first_failure(self._put_values(keys, [[v] for v in values], config, replace=True))

    # -- put, by pointer

    @coded
    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = _PLAIN) -> int:
        return self._put([key], [[view_at(buffer_ptr, size)]], config)[0]

    @coded
    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = _PLAIN,
    ) -> int:
        """One object: first the metadata's bytes, then the buffer's."""
        parts = [view_at(metadata_buffer_ptr, metadata_size), view_at(buffer_ptr, size)]
        return self._put([key], [parts], config)[0]

    @coded_each
    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Pointers, sizes: Sequence[int], config: ReplicateConfig = _PLAIN
    ) -> list[int]:
        """One code per key; all -600 where the lists differ in length."""
        same_length(keys, buffer_ptrs, sizes)
        return self._put(keys, [[view_at(p, n)] for p, n in zip(buffer_ptrs, sizes, strict=True)], config)

    @coded_each
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Pointers],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig = _PLAIN,
    ) -> list[int]:
        """Each object is the concatenation of its buffers."""
        return self._put(keys, scattered(keys, all_buffer_ptrs, all_sizes), config)

    @coded
    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = _PLAIN) -> int:
        return self._put([key], [[view_at(buffer_ptr, size)]], config, replace=True)[0]

    @coded_each
    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Pointers, sizes: Sequence[int], config: ReplicateConfig = _PLAIN
    ) -> list[int]:
        same_length(keys, buffer_ptrs, sizes)
        values = [[view_at(p, n)] for p, n in zip(buffer_ptrs, sizes, strict=True)]
        return self._put(keys, values, config, replace=True)

    # -- get

    @otherwise(bytes)
    def get(self, key: str) -> bytes:
        """The object's bytes; `b""` if it is missing or could not be read (`get_size` and the log tell which)."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        found = self._present(keys)
        try:
            values = dict(zip(found, self.pool.batch_get(found), strict=True))
        except MoonpoolError as e:
            refused("get_batch", e)
            values = {}
        return [values.get(key) or b"" for key in keys]

    @otherwise(lambda: None)
    def get_buffer(self, key: str) -> BufferHandle | None:
        """A copy of the object's bytes that answers the buffer protocol; None if it is missing."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        handles: dict[str, BufferHandle] = {}
        try:
            found = self._present(keys)
            with self.pool.open_read(found) as lease:
                views = {key: view for key, view in zip(found, lease.views, strict=True) if view is not None}
                handles = {key: BufferHandle.allocate(view.nbytes) for key, view in views.items()}
                copy_all([(memoryview(handles[key]), view) for key, view in views.items()])
        except MoonpoolError as e:
            refused("batch_get_buffer", e)
        return [handles.get(key) for key in keys]

    @coded
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes read; -704 missing, -600 if `size` is too small. A larger buffer is filled from its start."""
        return self._get_into([key], [buffer_ptr], [size])[0]

    @coded_each
    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Pointers, sizes: Sequence[int]) -> list[int]:
        same_length(keys, buffer_ptrs, sizes)
        return self._get_into(keys, buffer_ptrs, sizes)

    @coded_each
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Pointers],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each object over its buffers, which must have its size in sum: -600 if they are too small, -800 if too large."""
        targets = scattered(keys, all_buffer_ptrs, all_sizes, writable=True)
        wanted = [i for i, key in enumerate(keys) if usable(key)]
        results = copying.read(self.pool, [keys[i] for i in wanted], [targets[i] for i in wanted])
        codes = [int(Code.NOT_FOUND)] * len(keys)
        for i, result in zip(wanted, results, strict=True):
            codes[i] = result if isinstance(result, int) else refused("batch_get_into_multi_buffers", result)
            if codes[i] == _INVALID and not self._fits(keys[i], targets[i]):
                codes[i] = int(Code.TRANSFER_FAILED)
        return codes

    def _fits(self, key: str, parts: copying.Parts) -> bool:
        size = self.pool.sizes([key])[0]
        return size is None or copying.size_of(parts) <= size

    # -- inside

    def _put_values(
        self,
        keys: Sequence[str],
        values: Sequence[Sequence[BufferLike]],
        config: ReplicateConfig,
        *,
        replace: bool = False,
    ) -> list[int]:
        parts = [[_flat(part) for part in value] for value in values]  # a wrong type is a TypeError first of all
        if not self.local_buffer_size and self.is_open:
            raise ConfigError(
                "the store was set up without a local buffer", key="local_buffer_size", fix="Use put_from."
            )
        return self._put(keys, parts, config, replace=replace)

    def _put(
        self, keys: Sequence[str], values: Sequence[copying.Parts], config: ReplicateConfig, *, replace: bool = False
    ) -> list[int]:
        """One code per key. Of a key that comes twice the first value is stored (with `replace` the last)."""
        same_length(keys, values)
        options = self._options(keys, config, replace)
        codes = [_INVALID] * len(keys)
        chosen: dict[str, int] = {}
        for i in range(len(keys)) if replace else reversed(range(len(keys))):
            if usable(keys[i]) and copying.size_of(values[i]):
                chosen[keys[i]] = i
        order = sorted(chosen.values())
        if options.groups:
            options = msgspec.structs.replace(options, groups=tuple(options.groups[i] for i in order))
        outcomes = copying.write(self.pool, [keys[i] for i in order], [values[i] for i in order], options)
        answers = {keys[i]: _answer(o, replace) for i, o in zip(order, outcomes, strict=True)}
        for i, key in enumerate(keys):
            if usable(key) and copying.size_of(values[i]):
                codes[i] = answers[key]
        return codes

    def _options(self, keys: Sequence[str], config: ReplicateConfig, replace: bool) -> PutOptions:
        if not isinstance(config, ReplicateConfig):
            raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
        kept = Pin.NONE
        if replace and config.soft_pin_action is SoftPinAction.PRESERVE and not config.with_hard_pin:
            pins = {r.pin for rs in self.pool.replicas(self._present(keys)) for r in rs}
            kept = Pin.SOFT if Pin.SOFT in pins else Pin.NONE
        return config.options(len(keys), home=self.segment, replace=replace, kept=kept)

    def _get_into(self, keys: Sequence[str], pointers: Pointers, sizes: Sequence[int]) -> list[int]:
        targets = [view_at(p, n, writable=True) for p, n in zip(pointers, sizes, strict=True)]
        wanted = [i for i, key in enumerate(keys) if usable(key)]
        results = self.pool.batch_get_into([keys[i] for i in wanted], [targets[i] for i in wanted])
        codes = [int(Code.NOT_FOUND)] * len(keys)
        for i, result in zip(wanted, results, strict=True):
            codes[i] = result if isinstance(result, int) else refused("get_into", result)
        return codes

    def _present(self, keys: Sequence[str]) -> list[str]:
        """The keys that can exist at all, each once, in order."""
        return list(dict.fromkeys(key for key in keys if usable(key)))


def scattered(
    keys: Sequence[str],
    all_pointers: Sequence[Pointers],
    all_sizes: Sequence[Sequence[int]],
    *,
    writable: bool = False,
) -> list[list[memoryview]]:
    """Views of each key's buffers. Raises ConfigError where lists that belong together differ in length."""
    same_length(keys, all_pointers, all_sizes)
    views = []
    for pointers, sizes in zip(all_pointers, all_sizes, strict=True):
        same_length(pointers, sizes)
        views.append([view_at(p, n, writable=writable) for p, n in zip(pointers, sizes, strict=True)])
    return views


def same_length(*lists: Sequence[object]) -> None:
    if len({len(x) for x in lists}) > 1:
        raise ConfigError("lists differ in length", have=", ".join(str(len(x)) for x in lists))


def _flat(value: BufferLike) -> memoryview:
    """All bytes of `value`; of one that does not lie in one piece a copy. Raises TypeError for what is no buffer."""
    if not hasattr(value, "data_ptr"):
        view = memoryview(value)
        if not view.c_contiguous:
            return memoryview(view.tobytes())
    return as_bytes_view(value)


def _first_failure(codes: Sequence[int]) -> int:
    return next((code for code in codes if code), 0)


def _answer(outcome: PutOutcome, replace: bool) -> int:
    """A key that another writer is just putting counts as there: the first writer wins."""
    if isinstance(outcome, NativeExists) or (isinstance(outcome, KeyBusy) and not replace):
        return 0
    return refused("put", outcome) if isinstance(outcome, MoonpoolError) else 0
