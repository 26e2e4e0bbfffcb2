"""The tensor calls over the store's own raw calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from moonpool.integrations.mooncake_api.buffers import BufferPool
from moonpool.integrations.mooncake_api.replicate import ReplicateConfig
from moonpool.integrations.mooncake_api.store import MooncakeDistributedStore
from moonpool.integrations.mooncake_api.tensors import ParallelAxis, RawStore, ReadTarget, TensorParallelism
from moonpool.integrations.mooncake_api.tensors.header import SIZE
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import no_leaks

WHOLE = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
CAPACITY = 1 << 20


@pytest.fixture
def store() -> Any:
    with no_leaks(), EmbeddedPool(CAPACITY) as pool:
        opened = MooncakeDistributedStore.over(pool)
        yield opened
        opened.close()


def layout(rank: int) -> TensorParallelism:
    dp, tp, made = ParallelAxis(), ParallelAxis(), TensorParallelism()
    dp.kind = "dp"
    tp.kind, tp.rank, tp.size, tp.split_dim = "tp", rank, 2, 1
    made.axes = [dp, tp]
    return made


def test_the_store_has_the_raw_calls_that_the_tensor_calls_need() -> None:
    store: RawStore = MooncakeDistributedStore()  # what mypy checks
    assert store.batch_get_buffer([]) == []


def test_whole_tensors(store: MooncakeDistributedStore) -> None:
    tensors = [WHOLE, torch.empty(2, 0, 3), torch.tensor(1.5), WHOLE.t()]
    keys = ["a", "b", "c", "d"]
    assert store.batch_put_tensor(keys, tensors) == [0] * 4
    for found, tensor in zip(store.batch_get_tensor(keys), tensors, strict=True):
        assert found is not None
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        found.zero_()  # memory of its own: what is stored does not change
    assert torch.equal(store.get_tensor("a"), WHOLE)  # type: ignore[arg-type]
    assert store.get_size("a") == SIZE + 48
    assert store.upsert_tensor("a", tensors[2]) == store.upsert_pub_tensor("b", WHOLE, ReplicateConfig()) == 0
    assert [t.shape for t in store.batch_get_tensor(["a", "b"]) if t is not None] == [tensors[2].shape, WHOLE.shape]
    assert store.batch_put_tensor(["twice", "twice"], [WHOLE, WHOLE + 1]) == [0, 0]
    assert torch.equal(store.get_tensor("twice"), WHOLE)  # type: ignore[arg-type]


def test_pieces_and_buffers(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig(group_ids=["g"])
    assert store.batch_pub_tensor_with_tp(["k"], [WHOLE], config, tp_size=2) == [0]
    memory = (ctypes.c_ubyte * 1000)()
    address = ctypes.addressof(memory)
    piece = store.get_tensor_with_tp_into("k", address, 1000, tp_rank=1, tp_size=2)
    assert piece is not None
    assert torch.equal(piece, WHOLE[2:])
    assert store.put_tensor("whole", WHOLE) == 0
    assert store.get_tensor_into("whole", address, 1000) is not None
    assert store.put_tensor_with_parallelism_from("l", address, SIZE + 48, layout(0)) == 0
    target = ReadTarget()
    target.mode, target.parallelism = "full", layout(0)
    for found in (
        store.get_tensor_with_parallelism("l", target),
        store.get_tensor_with_parallelism_into("l", address, 1000, target),
    ):
        assert found is not None
        assert torch.equal(found, WHOLE)


def test_what_has_no_room_gets_its_code_and_others_do_not_suffer(store: MooncakeDistributedStore) -> None:
    large = torch.zeros(CAPACITY)
    assert store.batch_put_tensor(["large", "small"], [large, WHOLE]) == [-200, 0]
    assert store.put_tensor("", WHOLE) == -600
    assert store.pub_tensor("k", WHOLE, ReplicateConfig(replica_num=0)) == -600
    with pytest.raises(TypeError):
        store.pub_tensor("k", WHOLE, {"replica_num": 1})


def test_a_store_that_is_not_set_up_refuses_with_codes() -> None:
    store = MooncakeDistributedStore()
    memory = (ctypes.c_ubyte * 1000)()
    assert store.put_tensor("k", WHOLE) == store.upsert_tensor("k", WHOLE) == -600
    assert store.batch_put_tensor(["k", "l"], [WHOLE, WHOLE]) == [-600, -600]
    assert store.get_tensor("k") is None
    assert store.batch_get_tensor(["k"]) == [None]
    assert store.get_tensor_into("k", ctypes.addressof(memory), 1000) is None
    assert store.get_tensor_with_parallelism("k") is None
    with pytest.raises(RuntimeError, match="local buffer"):
        BufferPool(store)


def test_pool_buffers_are_registered_with_the_store(store: MooncakeDistributedStore) -> None:
    assert store.put_tensor("k", WHOLE) == 0
    pool = BufferPool(store)
    with pool.buffer(SIZE + 48) as lease:
        assert store.register_buffer(lease.ptr, 1) == -600  # it is already
        found = store.get_tensor_into("k", lease.ptr, lease.size)
        assert found is not None
        assert torch.equal(found, WHOLE)
    pool.close()
