"""The tensor calls of the peer's store, as mixins over its raw calls. Names, order of arguments and return codes are the peer's:
a put answers 0 or a negative code, a get a tensor or None; a wrong type of argument is a TypeError.

An object is [304-byte header | data], see `header`. Putting an existing key changes nothing and is 0; upserting replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moonpool.integrations.mooncake_api.tensors import codec, files, layout, reading, writing
from moonpool.integrations.mooncake_api.tensors.header import Bytes, parse
from moonpool.integrations.mooncake_api.tensors.layout import Refusal
from moonpool.integrations.mooncake_api.tensors.raw import (
    INVALID,
    Config,
    RawStore,
    check_ints,
    check_key,
    check_keys,
    check_list,
    check_rank,
    fetch,
    refuse,
)

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


class PlainTensorMethods:
    """Whole tensors, and their pieces under `<key>_tp_<rank>`."""

    def put_tensor(self: RawStore, key: str, tensor: Tensor) -> int:
        return _put(self, [check_key(key)], [tensor])[0]

    def batch_put_tensor(self: RawStore, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        return _put(self, check_keys(keys), check_list(tensors_list, "tensors_list"))

    def pub_tensor(self: RawStore, key: str, tensor: Tensor, config: Config = None) -> int:
        return _put(self, [check_key(key)], [tensor], config)[0]

    def batch_pub_tensor(
        self: RawStore, keys: Sequence[str], tensors_list: Sequence[Tensor], config: Config = None
    ) -> list[int]:
        return _put(self, check_keys(keys), check_list(tensors_list, "tensors_list"), config)

    def upsert_tensor(self: RawStore, key: str, tensor: Tensor) -> int:
        return _put(self, [check_key(key)], [tensor], replace=True)[0]

    def batch_upsert_tensor(self: RawStore, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        return _put(self, check_keys(keys), check_list(tensors_list, "tensors_list"), replace=True)

    def upsert_pub_tensor(self: RawStore, key: str, tensor: Tensor, config: Config = None) -> int:
        return _put(self, [check_key(key)], [tensor], config, replace=True)[0]

    def batch_upsert_pub_tensor(
        self: RawStore, keys: Sequence[str], tensors_list: Sequence[Tensor], config: Config = None
    ) -> list[int]:
        return _put(self, check_keys(keys), check_list(tensors_list, "tensors_list"), config, replace=True)

    def put_tensor_with_tp(
        self: RawStore, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Splits the whole tensor evenly along `split_dim` and puts all `tp_size` pieces; `tp_rank` is not used."""
        return _put_split(self, [check_key(key)], [tensor], None, tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self: RawStore,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        tensors = check_list(tensors_list, "tensors_list")
        return _put_split(self, check_keys(base_keys), tensors, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self: RawStore,
        key: str,
        tensor: Tensor,
        config: Config = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        return _put_split(self, [check_key(key)], [tensor], config, tp_rank, tp_size, split_dim)[0]

    def batch_pub_tensor_with_tp(
        self: RawStore,
        base_keys: Sequence[str],
        tensors_list: Sequence[Tensor],
        config: Config = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        tensors = check_list(tensors_list, "tensors_list")
        return _put_split(self, check_keys(base_keys), tensors, config, tp_rank, tp_size, split_dim)

    def get_tensor(self: RawStore, key: str) -> Tensor | None:
        """A tensor of its own memory, on the CPU."""
        return codec.read(fetch(self, [check_key(key)])[0])

    def batch_get_tensor(self: RawStore, keys: Sequence[str]) -> list[Tensor | None]:
        return [codec.read(data) for data in fetch(self, check_keys(keys))]

    def get_tensor_with_tp(
        self: RawStore, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """The piece of this rank; `split_dim` is not used, the piece is as it was put."""
        check_rank(split_dim, "split_dim")
        return codec.read(fetch(self, _piece_keys([check_key(key)], tp_rank, tp_size))[0])

    def batch_get_tensor_with_tp(
        self: RawStore, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        return [codec.read(data) for data in fetch(self, _piece_keys(check_keys(base_keys), tp_rank, tp_size))]

    def get_tensor_into_cuda(self: RawStore, key: str, tensor: Tensor) -> int:
        """Fills a CUDA tensor of the same dtype and shape; its bytes, or -600."""
        return _to_cuda(key, fetch(self, [check_key(key)])[0], tensor)

    def batch_get_tensor_into_cuda(self: RawStore, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        keys, tensors = check_keys(keys), check_list(tensors_list, "tensors_list")
        if len(keys) != len(tensors):
            return [refuse(f"{len(keys)} keys but {len(tensors)} tensors")] * len(keys)
        return [_to_cuda(k, data, t) for k, data, t in zip(keys, fetch(self, keys), tensors, strict=True)]

    def save_tensor_to_safetensor(self: RawStore, key: str, file_name: str | None = None) -> int:
        """Writes the tensor to a safetensors file, under its key; the file is named after the key if no name is given.

        -1100 for a missing tensor, -600 for a file that cannot be written.
        """
        tensor = codec.read(fetch(self, [check_key(key)])[0])
        if tensor is None:
            return files.NO_SUCH_TENSOR
        return files.save(key, tensor, key if file_name is None else check_key(file_name))

    def load_tensor_from_safetensor(self: RawStore, key: str | None = None, file_name: str = "") -> Tensor | None:
        """Puts a tensor of the file and returns it: the one named `key`, else the file's first. None if that fails."""
        name = check_key(file_name)
        tensor = files.load(None if key is None else check_key(key), name)
        if tensor is None or _put(self, [name if key is None else key], [tensor])[0] != 0:
            return None
        return tensor


class BufferTensorMethods:
    """The same from and into the caller's buffers, which hold [header | data]; nothing is copied on the way."""

    def put_tensor_from(self: RawStore, key: str, buffer_ptr: int, size: int) -> int:
        """-600 unless the buffer holds a tensor object of exactly `size` bytes."""
        return _put_from(self, [check_key(key)], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(
        self: RawStore, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """One buffer that holds no tensor refuses the batch, as in the peer."""
        return _put_from(self, check_keys(keys), buffer_ptrs, sizes)

    def upsert_tensor_from(self: RawStore, key: str, buffer_ptr: int, size: int) -> int:
        return _put_from(self, [check_key(key)], [buffer_ptr], [size], replace=True)[0]

    def batch_upsert_tensor_from(
        self: RawStore, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return _put_from(self, check_keys(keys), buffer_ptrs, sizes, replace=True)

    def put_tensor_with_tp_from(
        self: RawStore, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """The buffer holds the whole tensor; all `tp_size` pieces are put."""
        return _put_split_from(self, [check_key(key)], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self: RawStore,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return _put_split_from(self, check_keys(base_keys), buffer_ptrs, sizes, tp_rank, tp_size, split_dim)

    def get_tensor_into(self: RawStore, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """A tensor that is a view of the caller's buffer, which must outlive it."""
        found = _get_into(self, [check_key(key)], [buffer_ptr], [size])[0]
        return None if isinstance(found, int) else found

    def batch_get_tensor_into(
        self: RawStore, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | int | None]:
        """A list of tensors and None; of -600 if the call as a whole is wrong, as in the peer."""
        return _get_into(self, check_keys(keys), buffer_ptrs, sizes)

    def get_tensor_with_tp_into(
        self: RawStore, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        check_rank(split_dim, "split_dim")
        found = _get_into(self, _piece_keys([check_key(key)], tp_rank, tp_size), [buffer_ptr], [size])[0]
        return None if isinstance(found, int) else found

    def batch_get_tensor_with_tp_into(
        self: RawStore,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | int | None]:
        return _get_into(self, _piece_keys(check_keys(base_keys), tp_rank, tp_size), buffer_ptrs, sizes)


def _put(
    store: RawStore, keys: Sequence[str], tensors: Sequence[Any], config: Config = None, *, replace: bool = False
) -> list[int]:
    return writing.write_each(store, keys, tensors, writing.whole, config, replace=replace)


def _put_split(
    store: RawStore,
    keys: Sequence[str],
    values: Sequence[Any],
    config: Config,
    tp_rank: int,
    tp_size: int,
    split_dim: int,
) -> list[int]:
    check_rank(tp_rank, "tp_rank")
    if check_rank(tp_size, "tp_size") <= 1:
        return _put(store, keys, values, config)
    pieces = writing.all_pieces(tp_size, check_rank(split_dim, "split_dim"))
    return writing.write_each(store, keys, values, pieces, config, replace=False)


def _put_from(
    store: RawStore, keys: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int], *, replace: bool = False
) -> list[int]:
    ptrs, sizes = check_ints(ptrs, "buffer_ptrs"), check_ints(sizes, "sizes")
    return writing.write_from(store, keys, ptrs, sizes, None, replace=replace)


def _put_split_from(
    store: RawStore,
    keys: Sequence[str],
    ptrs: Sequence[int],
    sizes: Sequence[int],
    tp_rank: int,
    tp_size: int,
    split_dim: int,
) -> list[int]:
    if check_rank(tp_size, "tp_size") <= 1:
        return _put_from(store, keys, ptrs, sizes)
    buffers = writing.buffers_at(check_ints(ptrs, "buffer_ptrs"), check_ints(sizes, "sizes"))
    return _put_split(store, keys, buffers, None, tp_rank, tp_size, split_dim)


def _get_into(
    store: RawStore, keys: Sequence[str], ptrs: Sequence[int], sizes: Sequence[int]
) -> list[Tensor | int | None]:
    ptrs, sizes = check_ints(ptrs, "buffer_ptrs"), check_ints(sizes, "sizes")
    if not len(keys) == len(ptrs) == len(sizes):
        return [refuse(f"{len(keys)} keys, {len(ptrs)} buffers, {len(sizes)} sizes")] * len(keys)
    if 0 in ptrs:
        return [refuse("a buffer's address is null")] * len(keys)
    return [codec.read(data) for data in reading.fetch_into(store, keys, ptrs, sizes)]


def _piece_keys(keys: Sequence[str], tp_rank: int, tp_size: int) -> Sequence[str]:
    check_rank(tp_rank, "tp_rank")
    return keys if check_rank(tp_size, "tp_size") <= 1 else [layout.tp_key(k, tp_rank) for k in keys]


def _to_cuda(key: str, data: Bytes | None, tensor: object) -> int:
    header = None if data is None else parse(data)
    if data is None or header is None:
        return INVALID
    try:
        return codec.copy_to(data, header, tensor)
    except Refusal as e:
        return refuse(str(e), key)
