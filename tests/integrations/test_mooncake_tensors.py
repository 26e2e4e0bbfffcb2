"""The tensor calls over a store that is a dict: values, keys, codes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.integrations.mooncake_api.tensors import ParallelAxis, deserialize_tensor, serialize_tensor
from moonpool.integrations.mooncake_api.tensors.header import DTYPES, SIZE
from tests.integrations.fake_mooncake import FakeStore

INVALID = -600
WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def tensor_of(name: str, *shape: int) -> torch.Tensor:
    """Random bits, whatever they mean in that dtype."""
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if name == "bool" else 256, (*shape, width), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Equal shape, dtype and bits."""
    if one is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


class Memory:
    """A caller's buffer."""

    def __init__(self, size: int) -> None:
        self.bytes = (ctypes.c_ubyte * size)()
        self.ptr, self.size = ctypes.addressof(self.bytes), size

    @staticmethod
    def holding(tensor: torch.Tensor) -> Memory:
        header, address, size, _ = serialize_tensor(tensor)
        memory = Memory(SIZE + size)
        ctypes.memmove(memory.ptr, header + ctypes.string_at(address, size), memory.size)
        return memory


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


class TestWholeTensors:
    @pytest.mark.parametrize("name", [n for n, _ in DTYPES])
    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 0, 3), (1, 2, 1, 2, 1, 2, 1, 2)])
    def test_come_back_as_they_were(self, store: FakeStore, name: str, shape: tuple[int, ...]) -> None:
        tensor = tensor_of(name, *shape)
        assert store.put_tensor("k", tensor) == 0
        assert len(store.objects["k"]) == SIZE + tensor.numel() * tensor.element_size()
        assert same(store.get_tensor("k"), tensor)

    def test_need_not_be_contiguous_nor_leaves(self, store: FakeStore) -> None:
        strange = {
            "turned": WHOLE.t(),
            "strided": WHOLE[::2, 1::3],
            "expanded": WHOLE[:, :1].expand(4, 6),
            "grad": WHOLE.clone().requires_grad_(),
            "parameter": torch.nn.Parameter(WHOLE.clone()),
            "negative view": torch.complex(WHOLE, WHOLE).conj().imag,
            "negative view of one": torch.complex(WHOLE[:1, :1], WHOLE[:1, 1:2]).conj().imag,
        }
        for key, tensor in strange.items():
            assert store.put_tensor(key, tensor) == 0, key
            found = store.get_tensor(key)
            assert found is not None
            assert torch.equal(found, tensor.detach()), key

    def test_a_read_tensor_has_memory_of_its_own(self, store: FakeStore) -> None:
        store.put_tensor("k", WHOLE)
        for _ in range(2):
            found = store.get_tensor("k")
            assert found is not None
            assert torch.equal(found, WHOLE)
            found.zero_()

    def test_putting_keeps_and_upserting_replaces(self, store: FakeStore) -> None:
        other = torch.ones(2, dtype=torch.int8)
        assert [store.put_tensor("k", WHOLE), store.put_tensor("k", other)] == [0, 0]
        assert same(store.get_tensor("k"), WHOLE)
        assert store.upsert_tensor("k", other) == 0
        assert same(store.get_tensor("k"), other)
        assert store.upsert_pub_tensor("k", WHOLE) == 0
        assert same(store.get_tensor("k"), WHOLE)

    @pytest.mark.parametrize(
        "call", ["batch_put_tensor", "batch_pub_tensor", "batch_upsert_tensor", "batch_upsert_pub_tensor"]
    )
    def test_batches(self, store: FakeStore, call: str) -> None:
        tensors = [WHOLE, torch.empty(0, 3), WHOLE.bool()]
        store.full.add("no room")
        codes = getattr(store, call)(["a", "no room", "wrong", "b", "c"], [tensors[0], WHOLE, 5, *tensors[1:]])
        assert codes == [0, -200, INVALID, 0, 0]
        for found, tensor in zip(store.batch_get_tensor(["a", "b", "c"]), tensors, strict=True):
            assert same(found, tensor)
        assert getattr(store, call)([], []) == []
        assert getattr(store, call)(["x", "y"], [WHOLE]) == [INVALID] * 2

    def test_what_is_missing_or_no_tensor_is_none(self, store: FakeStore) -> None:
        store.objects["raw"] = bytes(400)
        assert store.get_tensor("missing") is None
        assert store.batch_get_tensor(["missing", "raw"]) == [None, None]

    @pytest.mark.parametrize(
        "value",
        [
            None,
            5,
            b"bytes",
            [1.0],
            torch.zeros(2, dtype=torch.complex64),
            torch.zeros([1] * 9),
            torch.eye(3).to_sparse(),
            torch.empty(3, device="meta"),
        ],
    )
    def test_what_cannot_be_stored_is_refused(self, store: FakeStore, value: Any) -> None:
        assert store.put_tensor("k", value) == INVALID
        assert store.upsert_tensor("k", value) == INVALID
        assert store.put_tensor_with_tp("k", value, tp_size=2) == INVALID
        assert store.objects == {}

    def test_wrong_types_are_type_errors(self, store: FakeStore) -> None:
        wrong: list[Any] = [
            lambda: store.put_tensor(5, WHOLE),  # type: ignore[arg-type]
            lambda: store.get_tensor(b"k"),  # type: ignore[arg-type]
            lambda: store.batch_get_tensor("k"),
            lambda: store.batch_put_tensor(["k"], WHOLE),  # type: ignore[arg-type]
            lambda: store.put_tensor_from("k", -1, 400),
            lambda: store.put_tensor_from("k", 1 << 63, 400),
            lambda: store.get_tensor_into("k", 1, "400"),  # type: ignore[arg-type]
            lambda: store.put_tensor_with_tp("k", WHOLE, tp_size=1 << 40),
            lambda: store.get_tensor_with_tp("k", split_dim="0"),  # type: ignore[arg-type]
        ]
        for call in wrong:
            with pytest.raises(TypeError):
                call()

    def test_bytes_and_back_without_a_store(self, store: FakeStore) -> None:
        header, address, size, owner = serialize_tensor(WHOLE.t())
        assert address == owner.data_ptr()
        payload = header + ctypes.string_at(address, size)
        found = deserialize_tensor(payload)
        assert same(found, WHOLE.t())
        found.zero_()
        assert same(deserialize_tensor(payload), WHOLE.t())


class TestConfig:
    """The mixin only reads these fields; what they mean is the store's business."""

    def config(self, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"replica_num": 1, "preferred_segments": [], "group_ids": None} | fields)

    def test_each_key_and_each_of_its_pieces_has_its_group(self, store: FakeStore) -> None:
        groups = self.config(group_ids=["g", "bad", "h"])
        tensors: list[Any] = [WHOLE, None, WHOLE]
        assert store.batch_pub_tensor(["a", "x", "b"], tensors, groups) == [0, INVALID, 0]
        assert store.batch_pub_tensor_with_tp(["c", "x", "d"], tensors, groups, tp_size=2) == [
            0,
            INVALID,
            0,
        ]
        assert store.groups == {"a": "g", "b": "h"} | {"c_tp_0": "g", "c_tp_1": "g", "d_tp_0": "h", "d_tp_1": "h"}
        assert groups.group_ids == ["g", "bad", "h"]

    def test_lists_of_another_length_refuse_all(self, store: FakeStore) -> None:
        wrong = [self.config(group_ids=["g"]), self.config(preferred_segments=["a", "b"])]
        for config in wrong:
            assert store.batch_pub_tensor(["a", "b"], [WHOLE, WHOLE], config) == [INVALID] * 2
        assert store.pub_tensor("a", WHOLE, wrong[1]) == INVALID
        assert store.objects == {}


class TestPiecesByRank:
    @pytest.mark.parametrize("split_dim", [0, 1])
    @pytest.mark.parametrize("call", ["put_tensor_with_tp", "pub_tensor_with_tp"])
    def test_lie_under_a_key_for_each_rank(self, store: FakeStore, call: str, split_dim: int) -> None:
        assert getattr(store, call)("k", WHOLE, tp_size=2, split_dim=split_dim) == 0
        assert sorted(store.objects) == ["k_tp_0", "k_tp_1"]
        for rank, piece in enumerate(WHOLE.chunk(2, split_dim)):
            assert same(store.get_tensor_with_tp("k", tp_rank=rank, tp_size=2), piece)

    def test_batches(self, store: FakeStore) -> None:
        codes = store.batch_put_tensor_with_tp(["a", "uneven", "b"], [WHOLE, torch.ones(3), WHOLE], tp_size=2)
        assert codes == [0, INVALID, 0]
        pieces = store.batch_get_tensor_with_tp(["a", "b", "uneven"], tp_rank=1, tp_size=2)
        assert same(pieces[0], WHOLE[2:])
        assert same(pieces[1], WHOLE[2:])
        assert pieces[2] is None

    def test_one_rank_is_the_whole(self, store: FakeStore) -> None:
        assert store.put_tensor_with_tp("k", WHOLE) == 0
        assert same(store.get_tensor_with_tp("k", tp_rank=3, tp_size=1), WHOLE)
        assert list(store.objects) == ["k"]

    @pytest.mark.parametrize(("size", "split_dim"), [(5, 0), (2, 2), (2, -1), (1 << 20, 0)])
    def test_a_split_that_is_none_is_refused(self, store: FakeStore, size: int, split_dim: int) -> None:
        assert store.put_tensor_with_tp("k", WHOLE, tp_size=size, split_dim=split_dim) == INVALID
        assert store.objects == {}

    def test_the_first_failure_of_a_piece_is_the_answer(self, store: FakeStore) -> None:
        store.full.add("k_tp_0")
        assert store.put_tensor_with_tp("k", WHOLE, tp_size=2) == -200

    def test_nothing_to_split(self, store: FakeStore) -> None:
        assert store.put_tensor_with_tp("k", torch.empty(2, 0, 3), tp_size=2) == 0
        assert same(store.get_tensor_with_tp("k", 1, 2), torch.empty(1, 0, 3))


class TestBuffers:
    def test_read_into_shares_the_callers_memory(self, store: FakeStore) -> None:
        store.put_tensor("k", WHOLE)
        memory = Memory(1000)
        found = store.get_tensor_into("k", memory.ptr, memory.size)
        assert same(found, WHOLE)
        memory.bytes[SIZE + 3] = 0x40  # the last byte of the first float
        assert found is not None
        assert found[0, 0] == 2.0

    def test_put_from_takes_the_object_as_it_is(self, store: FakeStore) -> None:
        memory = Memory.holding(WHOLE)
        assert store.put_tensor_from("k", memory.ptr, memory.size) == 0
        assert store.upsert_tensor_from("u", memory.ptr, memory.size) == 0
        assert store.objects["k"] == store.objects["u"] == bytes(memory.bytes)
        assert same(store.get_tensor("k"), WHOLE)

    def test_batches(self, store: FakeStore) -> None:
        memories = [Memory.holding(WHOLE), Memory.holding(torch.empty(0))]
        ptrs, sizes = [m.ptr for m in memories], [m.size for m in memories]
        assert store.batch_put_tensor_from(["a", "b"], ptrs, sizes) == [0, 0]
        assert store.batch_upsert_tensor_from(["a", "b"], ptrs, sizes) == [0, 0]
        targets = [Memory(1000), Memory(400), Memory(400)]
        ptrs, sizes = [m.ptr for m in targets], [m.size for m in targets]
        found = store.batch_get_tensor_into(["a", "b", "missing"], ptrs, sizes)
        assert same(found[0], WHOLE)  # type: ignore[arg-type]
        assert same(found[1], torch.empty(0))  # type: ignore[arg-type]
        assert found[2] is None

    def test_pieces(self, store: FakeStore) -> None:
        memory, target = Memory.holding(WHOLE), Memory(1000)
        assert store.put_tensor_with_tp_from("k", memory.ptr, memory.size, tp_size=2, split_dim=1) == 0
        assert store.batch_put_tensor_with_tp_from(["l"], [memory.ptr], [memory.size], tp_size=2, split_dim=0) == [0]
        assert store.put_tensor_with_tp_from("one", memory.ptr, memory.size) == 0
        assert same(store.get_tensor_with_tp_into("k", target.ptr, target.size, tp_rank=1, tp_size=2), WHOLE[:, 3:])
        (found,) = store.batch_get_tensor_with_tp_into(["l"], [target.ptr], [target.size], tp_rank=1, tp_size=2)
        assert same(found, WHOLE[2:])  # type: ignore[arg-type]
        assert same(store.get_tensor("one"), WHOLE)

    def test_a_piece_is_not_split_again(self, store: FakeStore) -> None:
        store.put_tensor_with_tp("k", WHOLE, tp_size=2)
        memory = Memory(1000)
        size = store.batch_get_into(["k_tp_0"], [memory.ptr], [memory.size])[0]
        assert store.put_tensor_with_tp_from("again", memory.ptr, size, tp_size=2) == INVALID

    def test_too_small_and_null_and_garbage(self, store: FakeStore) -> None:
        store.put_tensor("k", WHOLE)
        memory, good = Memory(400), Memory.holding(WHOLE)
        assert store.get_tensor_into("k", memory.ptr, SIZE + 95) is None
        assert store.get_tensor_into("k", 0, 1000) is None
        assert store.put_tensor_from("x", 0, 400) == INVALID
        assert store.put_tensor_from("x", good.ptr, good.size - 1) == INVALID
        assert store.put_tensor_from("x", good.ptr, 0) == INVALID
        assert (
            store.batch_put_tensor_from(["x", "y"], [good.ptr, memory.ptr], [good.size, memory.size]) == [INVALID] * 2
        )
        assert store.put_tensor_with_tp_from("x", memory.ptr, memory.size, tp_size=2) == INVALID
        assert list(store.objects) == ["k"]
        ptrs, sizes = [good.ptr, memory.ptr, 0], [good.size, memory.size, memory.size]
        assert store.batch_put_tensor_with_tp_from(["x", "y", "z"], ptrs, sizes, tp_size=2) == [0, INVALID, INVALID]

    def test_lists_that_do_not_belong_together(self, store: FakeStore) -> None:
        good = Memory.holding(WHOLE)
        for ptrs, sizes in [([good.ptr], []), ([], [good.size]), ([good.ptr] * 2, [good.size] * 2)]:
            assert store.batch_put_tensor_from(["k"], ptrs, sizes) == [INVALID]
            assert store.batch_get_tensor_into(["k"], ptrs, sizes) == [INVALID]
            assert store.batch_put_tensor_with_tp_from(["k"], ptrs, sizes, tp_size=2) == [INVALID]


class TestCuda:
    def test_a_tensor_elsewhere_is_refused(self, store: FakeStore) -> None:
        store.put_tensor("k", WHOLE)
        assert store.get_tensor_into_cuda("k", torch.empty(4, 6)) == INVALID
        assert store.get_tensor_into_cuda("missing", torch.empty(4, 6)) == INVALID
        assert store.batch_get_tensor_into_cuda(["k", "k"], [torch.empty(4, 6)]) == [INVALID] * 2
        assert store.batch_get_tensor_into_cuda(["k"], [5]) == [INVALID]  # type: ignore[list-item]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_round_trip(self, store: FakeStore) -> None:
        device = WHOLE.bfloat16().cuda()
        assert store.put_tensor("k", device.t()) == 0
        target = torch.empty(6, 4, dtype=torch.bfloat16, device="cuda")
        assert store.get_tensor_into_cuda("k", target) == 48
        assert torch.equal(target, device.t())
        assert store.get_tensor_into_cuda("k", target.t()) == INVALID
        assert store.get_tensor_into_cuda("k", target.float()) == INVALID


class TestFiles:
    @pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e4m3fn"])
    def test_there_and_back(self, store: FakeStore, tmp_path: Any, name: str) -> None:
        path, tensor = str(tmp_path / "t.safetensors"), tensor_of(name, 3, 2)
        store.put_tensor("k", tensor)
        assert store.save_tensor_to_safetensor("k", path) == 0
        assert same(load_file(path)["k"], tensor)
        store.objects.clear()
        assert same(store.load_tensor_from_safetensor("k", path), tensor)
        assert same(store.get_tensor("k"), tensor)

    def test_names_by_default(self, store: FakeStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        store.put_tensor("k", WHOLE)
        assert store.save_tensor_to_safetensor("k") == 0
        assert same(store.load_tensor_from_safetensor(file_name="k"), WHOLE)
        save_file({"other": WHOLE + 1}, "two")
        assert same(store.load_tensor_from_safetensor("absent", "two"), WHOLE + 1)
        assert same(store.get_tensor("absent"), WHOLE + 1)
        assert same(store.load_tensor_from_safetensor(None, "two"), WHOLE + 1)
        assert same(store.get_tensor("two"), WHOLE + 1)

    def test_what_cannot_be(self, store: FakeStore, tmp_path: Any) -> None:
        store.put_tensor("k", WHOLE)
        assert store.save_tensor_to_safetensor("missing", str(tmp_path / "m")) == -1100
        assert store.save_tensor_to_safetensor("k", str(tmp_path / "no folder" / "m")) == INVALID
        assert store.load_tensor_from_safetensor("k", str(tmp_path / "m")) is None
        (tmp_path / "damaged").write_bytes(b"x" * 100)
        assert store.load_tensor_from_safetensor("k", str(tmp_path / "damaged")) is None
        save_file({}, str(tmp_path / "empty"))
        assert store.load_tensor_from_safetensor("k", str(tmp_path / "empty")) is None
        save_file({"t": WHOLE}, str(tmp_path / "good"))
        store.full.add("no room")
        assert store.load_tensor_from_safetensor("no room", str(tmp_path / "good")) is None


def test_an_axis_takes_only_what_it_can_be() -> None:
    axis = ParallelAxis()
    for name, value in [("rank", "1"), ("size", 1.0), ("kind", 1), ("split_dim", "0"), ("rank", True)]:
        with pytest.raises(TypeError):
            setattr(axis, name, value)
    with pytest.raises(AttributeError):
        axis.ranks = 1


def test_torch_is_not_imported_before_a_tensor_call() -> None:
    code = "import sys, moonpool.integrations.mooncake_api.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
