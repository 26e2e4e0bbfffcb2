"""Tensors stored in one layout and read in another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.integrations.mooncake_api.tensors import ParallelAxis, ReadTarget, TensorParallelism, serialize_tensor
from moonpool.integrations.mooncake_api.tensors.header import SIZE, Axis, Header, Manifest, parse
from tests.integrations.fake_mooncake import FakeStore

INVALID = -600
WHOLE = torch.arange(8 * 12 * 4, dtype=torch.float32).view(8, 12, 4)


def axis(kind: str, rank: int, size: int, **fields: int) -> ParallelAxis:
    made = ParallelAxis()
    made.kind, made.rank, made.size = kind, rank, size
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def axes(*some: ParallelAxis) -> TensorParallelism:
    made = TensorParallelism()
    made.axes = list(some)
    return made


def tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    return axes(axis("tp", rank, size, split_dim=split_dim))


def dp_tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    return axes(axis("dp", 1, 2), axis("tp", rank, size, split_dim=split_dim))


def ep_pp_tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    return axes(
        axis("pp", 0, 2, stage_id=7), axis("TP", rank, size, split_dim=split_dim), axis("ep", 1, 4, expert_id=11)
    )


def part(rank: int, size: int, split_dim: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, size=size, split_dim=split_dim)


def target(mode: str, parallelism: TensorParallelism | None = None) -> ReadTarget:
    made = ReadTarget()
    made.mode, made.parallelism = mode, parallelism
    return made


def buffer(tensor: torch.Tensor) -> Any:
    header, address, size, _ = serialize_tensor(tensor)
    return (ctypes.c_ubyte * (SIZE + size)).from_buffer_copy(header + ctypes.string_at(address, size))


def put_pieces(
    store: FakeStore, key: str, layout: Callable[[int, int, int], TensorParallelism], size: int, split_dim: int
) -> None:
    """All pieces of WHOLE: with tp alone each rank puts its own, else each puts the whole."""
    for rank, piece in enumerate(WHOLE.chunk(size, split_dim)):
        value = piece if layout is tp else WHOLE
        assert store.put_tensor_with_parallelism(key, value, layout(rank, size, split_dim)) == 0


LAYOUTS = [tp, dp_tp, ep_pp_tp]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def reads(store: FakeStore, key: str, wanted: ReadTarget) -> list[torch.Tensor | None]:
    """The same read, into memory of its own and into a buffer."""
    memory = (ctypes.c_ubyte * 10_000)()
    into = store.get_tensor_with_parallelism_into(key, ctypes.addressof(memory), len(memory), wanted)
    if into is not None:
        header = parse(np.frombuffer(memoryview(memory), np.uint8)[: SIZE + into.numel() * 4])
        assert header is not None
        assert header.shape == tuple(into.shape)
        into = into.clone()
    return [store.get_tensor_with_parallelism(key, wanted), into]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split_dim", [0, 1, 2])
@pytest.mark.parametrize(("written", "read"), [(4, 4), (4, 2), (2, 4), (1, 2)])
def test_pieces_are_cut_and_joined(store: FakeStore, layout: Any, split_dim: int, written: int, read: int) -> None:
    put_pieces(store, "k", layout, written, split_dim)
    for rank, piece in enumerate(WHOLE.chunk(read, split_dim)):
        for found in reads(store, "k", target("shard", layout(rank, read, split_dim))):
            assert found is not None
            assert torch.equal(found, piece)
    for found in reads(store, "k", target("full", layout(0, read, split_dim))):
        assert found is not None
        assert torch.equal(found, WHOLE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_that_holds_the_whole_gives_all_pieces(store: FakeStore, layout: Any) -> None:
    memory = buffer(WHOLE)
    args = ctypes.addressof(memory), len(memory)
    assert store.put_tensor_with_parallelism_from("k", *args, layout(1, 4, 1)) == 0
    assert store.batch_put_tensor_with_parallelism_from(["l"], [args[0]], [args[1]], [layout(0, 2, 1)]) == [0]
    for key, size in (("k", 4), ("l", 2)):
        for found in reads(store, key, target("full", layout(0, size, 1))):
            assert found is not None
            assert torch.equal(found, WHOLE)


def test_keys_are_the_peers(store: FakeStore) -> None:
    store.put_tensor_with_parallelism("a", WHOLE[:4], tp(1, 2))
    store.put_tensor_with_parallelism("b", WHOLE, ep_pp_tp(1, 2, 2))
    store.put_tensor_with_parallelism("c", WHOLE, axes(axis("ep", 1, 2, expert_id=7), axis("dp", 0, 3)))
    store.put_tensor_with_parallelism("d", WHOLE, writer_partition=part(1, 3, 1))
    assert sorted(store.objects) == [
        *("a__parallelism_manifest", "a_tp_1"),
        *("b__parallelism_manifest", "b__tp_1of2_sd2__ep_1of4_eid11__pp_0of2_sid7"),
        "c__dp_0of3__ep_1of2_eid7",
        *("d__writer_1of3_sd1", "d__writer_manifest"),
    ]


def test_axes_without_tp_hold_whole_copies(store: FakeStore) -> None:
    layout = axes(axis("ep", 1, 2, expert_id=7), axis("dp", 0, 3))
    memory = buffer(WHOLE)
    assert store.put_tensor_with_parallelism("k", WHOLE, layout) == 0
    assert store.put_tensor_with_parallelism_from("l", ctypes.addressof(memory), len(memory), layout) == 0
    assert store.objects["k__dp_0of3__ep_1of2_eid7"] == store.objects["l__dp_0of3__ep_1of2_eid7"]
    turned = axes(axis("dp", 0, 3), axis("EP", 1, 2, expert_id=7))
    for found in reads(store, "k", target("shard", turned)):
        assert found is not None
        assert torch.equal(found, WHOLE)
    assert reads(store, "k", target("full", layout)) == [None, None]
    assert reads(store, "k", target("shard", axes(axis("dp", 1, 3)))) == [None, None]


def test_parts_of_several_writers(store: FakeStore) -> None:
    memory = buffer(WHOLE)
    for rank in range(4):
        assert store.put_tensor_with_parallelism("k", WHOLE, writer_partition=part(rank, 4, 1)) == 0
        args = "l", ctypes.addressof(memory), len(memory)
        assert store.upsert_tensor_with_parallelism_from(*args, writer_partition=part(rank, 4, 1)) == 0
    for key in "kl":
        for found in reads(store, key, target("full")):
            assert found is not None
            assert torch.equal(found, WHOLE)
        for found in reads(store, key, target("shard", tp(2, 4, 1))):
            assert found is not None
            assert torch.equal(found, WHOLE[:, 6:9])
    del store.objects["k__writer_2of4_sd1"]
    assert reads(store, "k", target("full")) == [None, None]


def test_without_a_layout_it_is_the_plain_tensor(store: FakeStore) -> None:
    memory = buffer(WHOLE + 1)
    args = ctypes.addressof(memory), len(memory)
    assert store.put_tensor_with_parallelism("a", WHOLE) == 0
    assert store.put_tensor_with_parallelism_from("b", *args) == 0
    assert store.upsert_tensor_with_parallelism_from("a", *args) == 0
    assert store.batch_put_tensor_with_parallelism(["c", "d"], [WHOLE, 5], None) == [0, INVALID]  # type: ignore[list-item]
    assert sorted(store.objects) == ["a", "b", "c"]
    for wanted in (None, target("as_stored"), target("full")):
        found = store.batch_get_tensor_with_parallelism(["a", "missing"], None if wanted is None else [wanted] * 2)
        assert found[0] is not None
        assert torch.equal(found[0], WHOLE + 1)
        assert found[1] is None


def test_upserting_replaces_the_pieces(store: FakeStore) -> None:
    for layout in LAYOUTS:
        put_pieces(store, "k", layout, 2, 0)
        update = WHOLE[:4] * 2 if layout is tp else WHOLE * 2
        assert store.upsert_tensor_with_parallelism("k", update, layout(0, 2, 0)) == 0
        found = store.get_tensor_with_parallelism("k", target("full", layout(0, 2, 0)))
        assert found is not None
        assert torch.equal(found, torch.cat([WHOLE[:4] * 2, WHOLE[4:]]))


def test_batches_answer_key_by_key(store: FakeStore) -> None:
    layouts = [dp_tp(0, 2), dp_tp(0, 5), dp_tp(1, 2)]
    assert store.batch_put_tensor_with_parallelism(["a", "a", "a"], [WHOLE] * 3, layouts) == [0, INVALID, 0]
    assert store.batch_upsert_tensor_with_parallelism(["a"] * 2, [WHOLE * 2] * 2, layouts[::2]) == [0, 0]
    parts = [part(0, 1), part(0, 2, 5)]
    assert store.batch_put_tensor_with_parallelism(["b", "b"], [WHOLE] * 2, writer_partitions=parts) == [0, INVALID]
    memory = (ctypes.c_ubyte * 20_000)()
    ptrs, sizes = [ctypes.addressof(memory), ctypes.addressof(memory) + 10_000], [10_000, 10_000]
    wanted = [target("full", dp_tp(0, 2)), target("full")]
    for found in (
        store.batch_get_tensor_with_parallelism(["a", "b"], wanted),
        store.batch_get_tensor_with_parallelism_into(["a", "b"], ptrs, sizes, wanted),
    ):
        assert found[0] is not None
        assert torch.equal(found[0], WHOLE * 2)
        assert found[1] is not None
        assert torch.equal(found[1], WHOLE)


def test_each_key_of_a_batch_has_its_group(store: FakeStore) -> None:
    config = SimpleNamespace(replica_num=1, preferred_segments=[], group_ids=["g", "h"])
    assert store.batch_put_tensor_with_parallelism(["a", "b"], [WHOLE] * 2, [tp(0, 2)] * 2, config) == [0, 0]
    assert {store.groups[k] for k in store.groups if k.startswith("a")} == {"g"}
    assert {store.groups[k] for k in store.groups if k.startswith("b")} == {"h"}
    assert store.batch_put_tensor_with_parallelism(["c"], [WHOLE], [tp(0, 2)], config) == [INVALID]


@pytest.mark.parametrize(
    "request_",
    [
        5,
        axes(),
        axes(axis("dp", 0, 2, split_dim=0)),
        axes(axis("tp", 0, 2)),
        axes(axis("ep", 0, 2)),
        axes(axis("pp", 0, 2)),
        axes(axis("xp", 0, 2)),
        axes(axis("tp", 2, 2, split_dim=0)),
        axes(axis("tp", -1, 2, split_dim=0)),
        axes(axis("tp", 0, 0, split_dim=0)),
        axes(axis("tp", 0, 1 << 20, split_dim=0)),
        axes(axis("tp", 0, 2, split_dim=3)),
        axes(axis("tp", 0, 2, split_dim=-1)),
        axes(axis("dp", 0, 2), axis("dp", 1, 2)),
        axes(axis("ep", 0, 2, expert_id=1 << 40)),
        SimpleNamespace(axes=[SimpleNamespace(kind="tp", rank="0", size=2, split_dim=0)]),
        SimpleNamespace(axes=[axis("tp", 0, 2, split_dim=0)] * 5),
        dp_tp(0, 5),
    ],
)
def test_a_layout_that_is_none_is_refused(store: FakeStore, request_: Any) -> None:
    memory = buffer(WHOLE)
    args = ctypes.addressof(memory), len(memory)
    assert store.put_tensor_with_parallelism("k", WHOLE, request_) == INVALID
    assert store.upsert_tensor_with_parallelism_from("k", *args, request_) == INVALID
    assert store.objects == {}
    store.put_tensor("k", WHOLE)
    wanted = SimpleNamespace(mode="shard", parallelism=request_)
    assert reads(store, "k", wanted) == [None, None]  # type: ignore[arg-type]


@pytest.mark.parametrize("part_", [5, part(2, 2), part(-1, 2), part(0, 0), part(0, 5), part(0, 2, 3), part(0, 2, -1)])
def test_a_part_that_is_none_is_refused(store: FakeStore, part_: Any) -> None:
    assert store.put_tensor_with_parallelism("k", WHOLE, writer_partition=part_) == INVALID
    assert store.objects == {}


def test_requests_that_do_not_belong_together(store: FakeStore) -> None:
    memory = buffer(WHOLE)
    ptr, size = ctypes.addressof(memory), len(memory)
    put, read = store.batch_put_tensor_with_parallelism, store.batch_get_tensor_with_parallelism
    assert store.put_tensor_with_parallelism("k", WHOLE, tp(0, 2), None, part(0, 2)) == INVALID
    assert put(["k"], [WHOLE], [tp(0, 2)], None, [part(0, 2)]) == [INVALID]
    assert put(["k"], [WHOLE], tp(0, 2)) == put(["k"], [WHOLE], [tp(0, 2)] * 2) == [INVALID]
    assert put(["k", "l"], [WHOLE], [tp(0, 2)] * 2) == put(["k", "l"], [WHOLE]) == [INVALID] * 2
    assert store.batch_put_tensor_with_parallelism_from(["k"], [ptr], [], [tp(0, 2)]) == [INVALID]
    assert store.batch_put_tensor_with_parallelism_from(["k"], [ptr], [size - 1], [tp(0, 2)]) == [INVALID]
    assert store.batch_put_tensor_with_parallelism_from(["k", "l"], [ptr, ptr], [size, size - 1]) == [INVALID] * 2
    assert store.put_tensor_with_parallelism_from("k", ptr, size - 1) == INVALID
    assert store.objects == {}
    store.put_tensor("k", WHOLE)
    assert read(["k"], 5) == read(["k"], []) == [None]
    assert store.batch_get_tensor_with_parallelism_into(["k"], [ptr], []) == [None]
    assert store.get_tensor_with_parallelism_into("k", 0, 10_000) is None
    assert store.get_tensor_with_parallelism_into("k", ptr, size - 1) is None
    assert store.get_tensor_with_parallelism("k", target("as_stored", tp(0, 2))) is None
    assert store.get_tensor_with_parallelism("k", target("shard")) is None
    with pytest.raises(RuntimeError, match="Unsupported ReadTarget mode"):
        target("half")


class TestDamage:
    """What is wrong in the store is never put together to a tensor."""

    def test_a_missing_piece(self, store: FakeStore) -> None:
        put_pieces(store, "k", tp, 4, 0)
        del store.objects["k_tp_2"]
        assert reads(store, "k", target("full", tp(0, 4))) == [None, None]
        assert reads(store, "k", target("shard", tp(1, 2))) == [None, None]
        assert reads(store, "k", target("shard", tp(0, 2))) == [None, None]

    def test_a_buffer_too_small_for_what_is_joined(self, store: FakeStore) -> None:
        put_pieces(store, "k", tp, 4, 0)
        memory = (ctypes.c_ubyte * (SIZE + WHOLE.numel() * 4))()
        args = "k", ctypes.addressof(memory), len(memory) - 1, target("full", tp(0, 4))
        assert store.get_tensor_with_parallelism_into(*args) is None

    @pytest.mark.parametrize("other", [WHOLE[2:4].double(), WHOLE[2:4, :6], torch.ones(1, 12, 4)])
    def test_a_piece_of_another_tensor(self, store: FakeStore, other: torch.Tensor) -> None:
        put_pieces(store, "k", tp, 4, 0)
        store.upsert_tensor_with_parallelism("k", other, tp(1, 4))
        assert reads(store, "k", target("full", tp(0, 4))) == [None, None]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_pieces_under_each_others_keys(self, store: FakeStore, layout: Any) -> None:
        put_pieces(store, "k", layout, 2, 0)
        one, other = (k for k in store.objects if not k.endswith("manifest"))
        store.objects[one], store.objects[other] = store.objects[other], store.objects[one]
        assert reads(store, "k", target("full", layout(0, 2))) == [None, None]
        assert reads(store, "k", target("shard", layout(0, 2))) == [None, None]

    @pytest.mark.parametrize("pieces", [1, 3, 8, 1 << 30])
    def test_a_manifest_that_lies(self, store: FakeStore, pieces: int) -> None:
        """With tp alone the pieces themselves tell better; else there is no other place to look."""
        for key, layout in (("k", tp), ("l", dp_tp)):
            put_pieces(store, key, layout, 4, 0)
            store.objects[f"{key}__parallelism_manifest"] = Manifest(0, (8, 12, 4), 0, pieces).pack()
            for found in reads(store, key, target("full", layout(0, 4))):
                assert found is not None
                assert torch.equal(found, WHOLE)
        store.objects["m__writer_manifest"] = Manifest(0, (8, 12, 4), 0, pieces).pack()
        assert reads(store, "m", target("full")) == [None, None]

    def test_pieces_that_do_not_make_up_the_whole(self, store: FakeStore) -> None:
        """Each is a tensor and all agree, but between them there would be memory that nobody wrote."""
        for rank in range(2):
            header = Header(0, shape=(2,), whole=(8,), axes=(Axis(1, rank, 2, 0),), shard=True)
            store.objects[f"k_tp_{rank}"] = header.pack() + bytes(8)
        assert store.get_tensor("k_tp_0") is not None
        assert reads(store, "k", target("full", tp(0, 2))) == [None, None]
        assert reads(store, "k", target("shard", tp(0, 1))) == [None, None]

    def test_a_header_that_claims_millions_of_pieces(self, store: FakeStore) -> None:
        store.put_tensor_with_parallelism("k", torch.ones(1), tp(0, 4096))
        claim = bytearray(store.objects["k_tp_0"])
        claim[40:48] = (1 << 30).to_bytes(8, "little")  # the whole's size
        claim[188:192] = (1 << 30).to_bytes(4, "little")  # the pieces
        store.objects = {"k_tp_0": bytes(claim)}
        assert parse(np.frombuffer(bytes(claim), np.uint8)) is not None
        assert reads(store, "k", target("full", tp(0, 2))) == [None, None]

    def test_an_unnamed_piece_is_taken_but_not_another_rank_s(self, store: FakeStore) -> None:
        store.put_tensor("k_tp_0", WHOLE[:4])
        found = store.get_tensor_with_parallelism("k", target("shard", tp(0, 2)))
        assert found is not None
        assert torch.equal(found, WHOLE[:4])
        store.put_tensor_with_parallelism("l", WHOLE[:4], tp(0, 2))
        assert store.get_tensor_with_parallelism("l", target("shard", tp(0, 4, 1))) is None


def test_assigning_copies_as_in_the_peer() -> None:
    one = axis("dp", 0, 2)
    layout = axes(one)
    one.rank = 1
    assert layout.axes[0].rank == 0
    wanted = target("shard", layout)
    layout.axes[0].rank = 1
    assert (layout.axes[0].rank, wanted.parallelism.axes[0].rank) == (1, 0)  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        layout.axes = [5]  # type: ignore[list-item]
    for name in ("mode", "parallelism"):
        with pytest.raises(TypeError):
            setattr(wanted, name, 5)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    split_dim=st.integers(0, 3),
    written=st.integers(1, 6),
    read=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_cut_joins_to_any_other(shape: list[int], split_dim: int, written: int, read: int, layout: Any) -> None:
    split_dim %= len(shape)
    shape[split_dim] *= written * read
    whole = torch.randn(shape)
    store = FakeStore()
    for rank, piece in enumerate(whole.tensor_split(written, split_dim)):
        value = piece if layout is tp else whole
        assert store.put_tensor_with_parallelism("k", value, layout(rank, written, split_dim)) == 0
    for rank, piece in enumerate(whole.tensor_split(read, split_dim)):
        found = store.get_tensor_with_parallelism("k", target("shard", layout(rank, read, split_dim)))
        assert found is not None
        assert torch.equal(found, piece)
