"""Tokens to text while they arrive: whole characters only, and nothing that may turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

_BROKEN = "\ufffd"
"""A decoder writes this for bytes that are no complete character (yet)."""

_CONTEXT = 4
"""Tokens of already emitted text that are decoded again, because decoders join a token with the one before it."""

Decode: TypeAlias = Callable[[Sequence[int]], str]


class IncrementalText:
    """Text of a growing token list. Pieces from `push` and `finish` join to `decode(all tokens)`.

    Only the last character can be incomplete, so only a trailing replacement character is held back.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._window = 0  # first token that is decoded again at each push
        self._emitted = 0  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        """The text that this token makes certain; often empty within a multi-byte character."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._window :])
        if text.endswith(_BROKEN):
            return self._give(text[: -len(_BROKEN)])
        piece = self._give(text)
        self._slide(text)
        return piece

    def finish(self) -> str:
        """What was held back; an incomplete character comes out as U+FFFD."""
        return self._give(self._decode(self._tokens[self._window :]))

    def _give(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece

    def _slide(self, text: str) -> None:
        """Forget tokens that can no longer matter. Only at a clean cut: the tail must decode to a suffix of the text."""
        start = len(self._tokens) - _CONTEXT
        if start - self._window < _CONTEXT:
            return
        tail = self._decode(self._tokens[start:])
        if text.endswith(tail) and not tail.startswith(_BROKEN):
            self._window, self._emitted = start, len(tail)


class StopBuffer:
    """Cuts text at the first stop string, wherever token borders lie."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._pending = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string. After a stop string `stopped` is set and no more text comes."""
        if self.stopped:
            return ""
        self._pending += text
        cuts = [at for s in self._stops if (at := self._pending.find(s)) >= 0]
        if cuts:
            self.stopped = True
            out, self._pending = self._pending[: min(cuts)], ""
            return out
        keep = max((_overlap(self._pending, s) for s in self._stops), default=0)
        out = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(out) :]
        return out

    def finish(self) -> str:
        """The beginning of a stop string that never came."""
        out, self._pending = self._pending, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
