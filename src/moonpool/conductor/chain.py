"""A prompt's blocks as chained 64-bit keys.

    key(0) = xxh3(tokens of block 0, seed = root)        key(i) = xxh3(tokens of block i, seed = key(i - 1))

Tokens are hashed as little-endian u32. The root stands for everything besides the tokens that decides whether KV may be shared, so
one table of keys serves all contexts and a hit across contexts cannot be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from moonpool.errors import ConfigError

_U32 = "I"
_BYTES = array(_U32).itemsize
if _BYTES != 4:  # pragma: no cover
    raise ConfigError("this platform's unsigned int is not 32 bits wide", have=str(8 * _BYTES))


@dataclass(frozen=True, slots=False)
class Context:
    """Whose KV it is: prompts of two contexts share nothing."""

    tenant: str
    model: str
    lora: str = ""
    block_size: int = 16
    salt: str = ""

    @cached_property
    def root(self) -> int:
        """Seed of the first block's key."""
        parts = (self.tenant, self.model, self.lora, str(self.block_size), self.salt)
        return xxhash.xxh3_64_intdigest(b"".join(len(p).to_bytes(4, "little") + p for p in (x.encode() for x in parts)))


def chained(parent: int, tokens: bytes) -> int:
    """Key of a block behind `parent`; `tokens` are its ids as little-endian u32."""
    return xxhash.xxh3_64_intdigest(tokens, seed=parent)


class TokenChain:
    """Keys of token ids, each computed when it is first asked for (and all before it)."""

    __slots__ = ("_count", "_keys", "_raw", "_root", "_size")

    def __init__(self, tokens: Sequence[int], context: Context) -> None:
        """Raises ConfigError for an id that is no u32."""
        try:
            ids = array(_U32, tokens)
        except (OverflowError, TypeError) as e:
            raise ConfigError(f"not token ids: {e}", need="0 <= id < 2**32") from e
        self._raw = memoryview(ids).cast("B")
        self._size = 4 * context.block_size
        self._count = len(ids) // context.block_size
        self._root, self._keys = context.root, list[int]()

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        keys = self._keys
        if index < len(keys):
            return keys[index]
        size, raw, hashed, add = self._size, self._raw, xxhash.xxh3_64_intdigest, keys.append
        parent = keys[-1] if keys else self._root
        for at in range(len(keys) * size, (index + 1) * size, size):
            parent = hashed(raw[at : at + size], parent)
            add(parent)
        return parent

    def keys(self) -> Sequence[int]:
        if self._count:
            self.key(self._count - 1)
        return self._keys


class KeyChain:
    """Keys that are known already: a trace's, or an engine's events'."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, index: int) -> int:
        return self._keys[index]

    def keys(self) -> Sequence[int]:
        return self._keys
