"""The bytes before a tensor: equal to the peer's, and safe to read whoever wrote them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.integrations.mooncake_api.tensors import codec, deserialize_tensor, serialize_tensor, tensor_metadata_size
from moonpool.integrations.mooncake_api.tensors.header import (
    DTYPES,
    MAX_AXES,
    MAX_DIMS,
    SIZE,
    Axis,
    Bytes,
    Header,
    Manifest,
    parse,
    parse_manifest,
)
from tests.integrations.fake_mooncake import FakeStore

UNUSED = "ff" * 8


def i64(*values: int) -> str:
    return struct.pack(f"<{len(values)}q", *values).hex()


# A float32 tensor of shape [4, 6], put with the axes (tp 1 of 2 along dimension 0, dp 0 of 2), and its manifest, as the peer's
# client (mooncake-transfer-engine 0.3.13.post1) stored them.
PEERS_PIECE = bytes.fromhex(
    "4e4f4f4d0100300100000000020000000100000000000000"
    + i64(304, 48)
    + i64(4, 6)
    + UNUSED * 6
    + i64(2, 6)
    + UNUSED * 6
    + "0200000000000000"
    + "0100000000000000010000000200000000000000000000000200000000000000"
    + "00000000010000000000000002000000ffffffff"
).ljust(SIZE, b"\0")
PEERS_MANIFEST = bytes.fromhex("4e414d570100600000000000020000000000000002000000" + "00" * 8 + i64(4, 6) + UNUSED * 6)


def bytes_of(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


class TestAgainstThePeer:
    def test_a_piece_is_the_same_bytes(self) -> None:
        axes = (Axis(1, rank=1, pieces=2, split_dim=0), Axis(0, rank=0, pieces=2))
        header = Header(0, shape=(2, 6), whole=(4, 6), axes=axes, shard=True)
        assert header.pack() == PEERS_PIECE
        assert parse(bytes_of(PEERS_PIECE + bytes(48))) == header

    def test_a_manifest_is_the_same_bytes(self) -> None:
        manifest = Manifest(dtype=0, whole=(4, 6), split_dim=0, pieces=2)
        assert manifest.pack() == PEERS_MANIFEST
        assert parse_manifest(bytes_of(PEERS_MANIFEST)) == manifest

    @pytest.mark.parametrize(("code", "name"), [*enumerate(n for n, _ in DTYPES)])
    def test_each_dtype_has_the_peers_code_and_its_size(self, code: int, name: str) -> None:
        tensor = torch.zeros(2, 3).to(getattr(torch, name))
        header, address, size, owner = serialize_tensor(tensor)
        assert struct.unpack_from("<i", header, 8) == (code,)
        assert (address, size) == (tensor.data_ptr(), 6 * DTYPES[code][1])
        assert owner.data_ptr() == tensor.data_ptr()
        assert len(header) == tensor_metadata_size() == SIZE


class TestRefusals:
    GOOD = Header(0, (2, 3), (2, 3)).pack() + bytes(24)

    def change(self, offset: int, form: str, value: int) -> Bytes:
        changed = bytearray(self.GOOD)
        struct.pack_into(form, changed, offset, value)
        return bytes_of(bytes(changed))

    @pytest.mark.parametrize(
        ("offset", "form", "value"),
        [
            (0, "<I", 0),  # magic
            (4, "<H", 2),  # version
            (6, "<H", 300),  # header size
            (8, "<i", -1),  # dtype
            (8, "<i", 15),
            (8, "<i", 1),  # a dtype of another size
            (12, "<i", -1),  # ndim
            (12, "<i", 9),
            (12, "<i", 1),  # fewer dimensions than sizes
            (16, "<I", 2),  # layout
            (24, "<Q", 0),  # data offset, inside the header
            (24, "<Q", 328),
            (24, "<Q", (1 << 64) - 1),
            (32, "<Q", 0),  # data bytes
            (32, "<Q", (1 << 64) - 1),
            (40, "<q", -2),  # global shape
            (104, "<q", -2),  # local shape
            (104, "<q", 1 << 62),
            (120, "<q", 1),  # an unused dimension
            (168, "<I", 5),  # axes
            (168, "<I", 1),  # an axis of 0 pieces
        ],
    )
    def test_one_wrong_field(self, offset: int, form: str, value: int) -> None:
        assert parse(bytes_of(self.GOOD)) is not None
        assert parse(self.change(offset, form, value)) is None

    @pytest.mark.parametrize("cut", [0, 1, SIZE - 1, SIZE, len(GOOD) - 1])
    def test_one_cut_short(self, cut: int) -> None:
        assert parse(bytes_of(self.GOOD[:cut])) is None

    def test_one_with_more_behind_it(self) -> None:
        assert parse(bytes_of(self.GOOD + b"\0")) is None

    def test_no_elements_but_strides_past_all_memory(self) -> None:
        header = Header(0, (1 << 40, 1 << 40, 0), (1 << 40, 1 << 40, 0)).pack()
        assert parse(bytes_of(header)) is None

    def test_more_axes_than_there_is_room_for(self) -> None:
        good = bytearray(Header(3, (32,), (32,), (Axis(0, 0, 1),) * MAX_AXES, True).pack() + bytes(32))
        good[SIZE : SIZE + 32] = good[176 : 176 + 32]  # a fifth one, in the data
        assert parse(bytes_of(bytes(good))) is not None
        struct.pack_into("<I", good, 168, MAX_AXES + 1)
        assert parse(bytes_of(bytes(good))) is None

    @pytest.mark.parametrize("axis", [(4, 0, 1, -1), (1, 1, 1, 0), (1, -1, 2, 0), (1, 0, 2, 2), (1, 0, 2, -2)])
    def test_an_axis_that_is_none(self, axis: tuple[int, int, int, int]) -> None:
        kind, rank, pieces, split_dim = axis
        good = bytearray(Header(0, (2, 3), (2, 3), (Axis(1, 0, 1, 0),), True).pack() + bytes(24))
        assert parse(bytes_of(bytes(good))) is not None
        struct.pack_into("<iiiii", good, 176, kind, 0, rank, pieces, split_dim)
        assert parse(bytes_of(bytes(good))) is None

    @pytest.mark.parametrize(
        ("offset", "value"), [(0, 0), (8, 15), (12, 9), (16, 2), (16, -1), (20, 0), (20, -1), (32, -1)]
    )
    def test_a_manifest_with_one_wrong_field(self, offset: int, value: int) -> None:
        changed = bytearray(PEERS_MANIFEST)
        struct.pack_into("<i" if offset < 32 else "<q", changed, offset, value)
        assert parse_manifest(bytes_of(bytes(changed))) is None
        assert parse_manifest(bytes_of(PEERS_MANIFEST[:-1])) is None

    def test_python_callers_get_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="invalid serialized"):
            deserialize_tensor(bytes(400))
        with pytest.raises(ValueError, match="unsupported tensor"):
            serialize_tensor(4)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            deserialize_tensor("text")  # type: ignore[arg-type]


shapes = st.lists(st.integers(0, 5), max_size=MAX_DIMS).map(tuple)
axes = st.lists(
    st.builds(
        lambda kind, pieces, ident: Axis(kind, pieces - 1, pieces, -1, ident),
        st.integers(0, 3),
        st.integers(1, 1 << 30),
        st.integers(-(1 << 31), (1 << 31) - 1),
    ),
    max_size=MAX_AXES,
).map(tuple)
headers = st.builds(
    lambda dtype, shape, axes, pad: Header(dtype, shape, shape, axes, bool(axes), SIZE + pad),
    st.integers(0, len(DTYPES) - 1),
    shapes,
    axes,
    st.integers(0, 99),
)
numbers = st.one_of(
    st.integers(-2, 16),
    st.sampled_from([304, 1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]),
)
fields = st.sampled_from(
    [(0, 4), (4, 2), (6, 2), (8, 4), (12, 4), (16, 4), (20, 4), (24, 8), (32, 8), (168, 4), (172, 4)]
    + [(o, 8) for o in range(40, 168, 8)]
    + [(o, 4) for o in range(176, 304, 4)]
)


@given(headers)
def test_what_is_packed_is_parsed(header: Header) -> None:
    data = header.pack().ljust(header.data_offset, b"\0") + bytes(header.data_bytes)
    assert parse(bytes_of(data)) == header


@given(headers, st.lists(st.tuples(fields, numbers), min_size=1, max_size=6), st.integers(0, 700))
def test_a_damaged_header_is_none_or_a_tensor_within_its_bytes(
    header: Header, damage: list[tuple[tuple[int, int], int]], length: int
) -> None:
    data = bytearray(header.pack()) + bytes(400)
    for (offset, width), value in damage:
        data[offset : offset + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    store = FakeStore()
    store.objects["k"] = bytes(data[:length])
    tensor = store.get_tensor("k")
    if tensor is not None:
        assert tensor.numel() * tensor.element_size() <= max(0, length - SIZE)
        tensor.clone()  # touches every byte


@given(st.binary(max_size=500))
def test_garbage_is_no_tensor(data: bytes) -> None:
    assert codec.read(bytes_of(data)) is None
    assert parse_manifest(bytes_of(data)) is None
