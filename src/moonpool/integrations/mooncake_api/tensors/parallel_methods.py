"""The calls that say with axes which piece of a tensor they mean (`*_with_parallelism*`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moonpool.integrations.mooncake_api.tensors import reading, writing
from moonpool.integrations.mooncake_api.tensors.raw import (
    INVALID,
    Config,
    RawStore,
    check_int,
    check_ints,
    check_key,
    check_keys,
    check_list,
    refuse,
)

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


class ParallelTensorMethods:
    """`parallelism` is a TensorParallelism, `writer_partition` anything with rank, size and split_dim; at most one of them.

    With tp as the only axis, the tensor that is put is the rank's piece. With other axes beside it, or as a writer's
    partition, it is the whole tensor and the piece is cut out of it. The `*_from` calls take a buffer that holds the whole
    tensor and write all its tp pieces. Reading takes a ReadTarget, and cuts and joins as needed.
    """

    def put_tensor_with_parallelism(
        self: RawStore,
        key: str,
        tensor: Tensor,
        parallelism: object = None,
        config: Config = None,
        writer_partition: object = None,
    ) -> int:
        pieces = writing.requested(parallelism, writer_partition)
        return writing.write_each(self, [check_key(key)], [tensor], pieces, config, replace=False)[0]

    def upsert_tensor_with_parallelism(
        self: RawStore,
        key: str,
        tensor: Tensor,
        parallelism: object = None,
        config: Config = None,
        writer_partition: object = None,
    ) -> int:
        pieces = writing.requested(parallelism, writer_partition)
        return writing.write_each(self, [check_key(key)], [tensor], pieces, config, replace=True)[0]

    def batch_put_tensor_with_parallelism(
        self: RawStore,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: object = None,
        config: Config = None,
        writer_partitions: object = None,
    ) -> list[int]:
        return _write_batch(self, keys, tensors_list, parallelisms, config, writer_partitions, replace=False)

    def batch_upsert_tensor_with_parallelism(
        self: RawStore,
        keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        parallelisms: object = None,
        config: Config = None,
        writer_partitions: object = None,
    ) -> list[int]:
        return _write_batch(self, keys, tensors_list, parallelisms, config, writer_partitions, replace=True)

    def put_tensor_with_parallelism_from(
        self: RawStore,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: object = None,
        config: Config = None,
        writer_partition: object = None,
    ) -> int:
        asked = _one(parallelism), _one(writer_partition)
        return _write_batch_from(self, [key], [buffer_ptr], [size], asked, config, replace=False)[0]

    def upsert_tensor_with_parallelism_from(
        self: RawStore,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: object = None,
        config: Config = None,
        writer_partition: object = None,
    ) -> int:
        asked = _one(parallelism), _one(writer_partition)
        return _write_batch_from(self, [key], [buffer_ptr], [size], asked, config, replace=True)[0]

    def batch_put_tensor_with_parallelism_from(
        self: RawStore,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: object = None,
        config: Config = None,
        writer_partitions: object = None,
    ) -> list[int]:
        asked = parallelisms, writer_partitions
        return _write_batch_from(self, keys, buffer_ptrs, sizes, asked, config, replace=False)

    def batch_upsert_tensor_with_parallelism_from(
        self: RawStore,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: object = None,
        config: Config = None,
        writer_partitions: object = None,
    ) -> list[int]:
        asked = parallelisms, writer_partitions
        return _write_batch_from(self, keys, buffer_ptrs, sizes, asked, config, replace=True)

    def get_tensor_with_parallelism(self: RawStore, key: str, target: object = None) -> Tensor | None:
        """A tensor of its own memory, on the CPU."""
        return reading.read_target(self, check_key(key), target, reading.Fresh())

    def batch_get_tensor_with_parallelism(
        self: RawStore, keys: Sequence[str], targets: object = None
    ) -> list[Tensor | None]:
        keys = check_keys(keys)
        each = _each(targets, len(keys))
        if each is None:
            return [None] * len(keys)
        return [reading.read_target(self, key, target, reading.Fresh()) for key, target in zip(keys, each, strict=True)]

    def get_tensor_with_parallelism_into(
        self: RawStore, key: str, buffer_ptr: int, size: int, target: object = None
    ) -> Tensor | None:
        """A tensor that is a view of the caller's buffer, which must outlive it."""
        into = reading.Into(check_int(buffer_ptr, "buffer_ptr"), check_int(size, "size"))
        return reading.read_target(self, check_key(key), target, into)

    def batch_get_tensor_with_parallelism_into(
        self: RawStore,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: object = None,
    ) -> list[Tensor | None]:
        keys, ptrs, sizes = check_keys(keys), check_ints(buffer_ptrs, "buffer_ptrs"), check_ints(sizes, "sizes")
        each = _each(targets, len(keys))
        if each is None or not len(keys) == len(ptrs) == len(sizes):
            return [None] * len(keys)
        return [
            reading.read_target(self, key, target, reading.Into(ptr, size))
            for key, ptr, size, target in zip(keys, ptrs, sizes, each, strict=True)
        ]


def _write_batch(
    store: RawStore,
    keys: Sequence[str],
    tensors: object,
    parallelisms: object,
    config: Config,
    partitions: object,
    *,
    replace: bool,
) -> list[int]:
    keys, values = check_keys(keys), check_list(tensors, "tensors_list")
    if parallelisms is None and partitions is None:
        return writing.write_each(store, keys, values, writing.whole, config, replace=replace)
    axes, parts = _each(parallelisms, len(keys)), _each(partitions, len(keys))
    if axes is None or parts is None or len(values) != len(keys) or _both(parallelisms, partitions):
        return [INVALID] * len(keys)
    asked = [writing.requested(a, p) for a, p in zip(axes, parts, strict=True)]
    return writing.write_requests(store, keys, values, asked, config, replace=replace)


def _write_batch_from(
    store: RawStore,
    keys: Sequence[str],
    ptrs: Sequence[int],
    sizes: Sequence[int],
    requests: tuple[object, object],
    config: Config,
    *,
    replace: bool,
) -> list[int]:
    keys, ptrs, sizes = check_keys(keys), check_ints(ptrs, "buffer_ptrs"), check_ints(sizes, "sizes")
    if requests[0] is None and requests[1] is None:
        return writing.write_from(store, keys, ptrs, sizes, config, replace=replace)
    buffers = writing.buffers_at(ptrs, sizes)
    axes, parts = _each(requests[0], len(keys)), _each(requests[1], len(keys))
    if axes is None or parts is None or len(buffers) != len(keys) or _both(*requests):
        return [INVALID] * len(keys)
    asked = [writing.requested_of_whole(a, p) for a, p in zip(axes, parts, strict=True)]
    return writing.write_requests(store, keys, buffers, asked, config, replace=replace)


def _both(parallelisms: object, partitions: object) -> bool:
    return parallelisms is not None and partitions is not None


def _one(request: object) -> list[object] | None:
    return None if request is None else [request]


def _each(requests: object, count: int) -> list[Any] | None:
    """One request per key; None for all of them if there are none. None (and a line in the log) for anything but a list."""
    if requests is None:
        return [None] * count
    if not isinstance(requests, list | tuple) or len(requests) != count:
        refuse(f"needs a list of {count} requests, one per key, or None")
        return None
    return list(requests)
