"""Incremental text: pieces join to the whole, characters stay whole, stop strings cut across tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.text import IncrementalText, StopBuffer


def decode_bytes(tokens: Sequence[int]) -> str:
    """One byte per token: the hardest tokenizer for multi-byte characters."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=60))
def test_pieces_join_and_no_broken_character_is_sent(text: str) -> None:
    out = IncrementalText(decode_bytes)
    pieces = [out.push(b) for b in text.encode()]
    assert "".join(pieces) + out.finish() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.binary(max_size=60))
def test_any_bytes_join_to_the_whole(raw: bytes) -> None:
    out = IncrementalText(decode_bytes)
    assert "".join(out.push(b) for b in raw) + out.finish() == decode_bytes(list(raw))


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.data())
def test_stop_strings_cut_like_on_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    buffer, out, at = StopBuffer(stops), "", 0
    while at < len(text) and not buffer.stopped:
        step = data.draw(st.integers(1, 4))
        out += buffer.push(text[at : at + step])
        at += step
    out += buffer.finish()
    cuts = [i for s in stops if (i := text[:at].find(s)) >= 0]
    assert buffer.stopped == bool(cuts)
    assert out == (text[: min(cuts)] if cuts else text)
