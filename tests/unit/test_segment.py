"""Segments: sealed, shared by descriptor, gone with the last mapping."""

from __future__ import annotations

import os

import pytest

from moonpool.errors import ConfigError, ConnectionLost, ProtocolError
from moonpool.testing.leaks import no_leaks
from moonpool.transfer.segment import Segment


def test_two_mappings_share_bytes() -> None:
    with no_leaks():
        owner = Segment.create(4096)
        other = Segment(os.dup(owner.fd))
        owner.view[10:13] = b"abc"
        assert bytes(other.span(10, 3)) == b"abc"
        owner.close()
        assert bytes(other.span(10, 3)) == b"abc", "the memory lives while somebody maps it"
        other.close()
        other.close()


def test_nobody_can_truncate_it_under_a_reader() -> None:
    segment = Segment.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 8192)
    segment.close()


def test_an_unsealed_file_is_no_segment() -> None:
    with no_leaks():
        fd = os.memfd_create("moonpool-test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        with pytest.raises(ProtocolError):
            Segment(fd)
        r, w = os.pipe()
        os.close(w)
        with pytest.raises(ProtocolError):
            Segment(r)


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_sizes_that_cannot_be(size: int) -> None:
    with no_leaks(), pytest.raises(ConfigError):
        Segment.create(size)


def test_spans_stay_inside() -> None:
    segment = Segment.create(100)
    assert segment.span(0, 100).nbytes == 100
    assert segment.span(100, 0).nbytes == 0
    assert segment.span(3, 4, readonly=True).readonly
    for offset, size in ((0, 101), (100, 1), (-1, 1), (1, -1)):
        with pytest.raises(ProtocolError):
            segment.span(offset, size)
    segment.close()
    with pytest.raises(ConnectionLost):
        segment.span(0, 1)


def test_a_view_outlives_close() -> None:
    segment = Segment.create(4096)
    view = segment.span(0, 4)
    view[:] = b"kept"
    segment.close()
    assert bytes(view) == b"kept"


def test_huge_pages_are_taken_where_they_are_reserved_and_what_was_got_is_said() -> None:
    """L3: asked for or not, nobody has to guess which pages a segment is made of."""
    size = 4 << 20
    with no_leaks():
        segment = Segment.create(size)
        other = Segment(os.dup(segment.fd))
        segment.view[size - 3 :] = b"abc"
        assert bytes(other.span(size - 3, 3)) == b"abc"
        assert other.pages() == segment.pages()
        assert ("2 MiB" in segment.pages()) == segment.huge
        other.close()
        segment.close()
        assert "pages" in Segment.pages(segment)
