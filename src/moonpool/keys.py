"""Identity of KV pages: the only place that hashes.

A page is addressed by *whose* KV it is (`KVIdentity`: model, revision, tokenizer, dtype, layout, ...) and *which* tokens it
covers (the chained block hash and the page's index in the sequence). Two identities that differ in any field are different
keys, and the same identity gives the same key in every process: fields are tagged and length-prefixed before they are
hashed with BLAKE2b, so no two field lists can collide by concatenation (field-bugs B).

The block hash covers the *token* side only (tokenizer, page size, salt, tenant, token ids), never the model, so pages of two
models over the same tokens share it; that is what lets a rule find the source page of a missing target page.

    key text:  mp1:<identity digest>:<index>:<block hash>                native page
               mp1:<identity digest>:<index>:<block hash>~x2x:<bundle>   page converted by that bundle

The index is implied by the chained hash; it stands in the key because rotary keys cannot be un-rotated without their
position, and this way every put path carries it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from moonpool.errors import ConfigError

LAYOUT = "mp1:kv,token,layer,head,dim"
"""Canonical page layout: two halves, K after RoPE then V, each `[token, layer, head, dim]`, C order."""

_DIGEST_BYTES = 16
_KEY = re.compile(r"mp1:([0-9a-f]{32}):(\d{1,9}):([0-9a-f]{32})(?:~x2x:([0-9a-f]{32}))?")


def digest(tag: str, fields: Iterable[tuple[str, str | bytes | int]]) -> str:
    """32 hex digits over tagged, length-prefixed fields; `tag` separates the uses of this function."""
    h = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=tag.encode()[:16])
    for name, value in fields:
        raw = value if isinstance(value, bytes) else str(value).encode()
        h.update(len(name).to_bytes(4, "little") + name.encode())
        h.update(len(raw).to_bytes(8, "little") + raw)
    return h.hexdigest()


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose KV a page holds. Every field takes part in the key."""

    model: str
    revision: str
    """Digest of the weights or the hub's commit: same name, other weights, other KV."""
    tokenizer: str
    """Digest of the tokenizer's content."""
    kv_dtype: str = "bfloat16"
    layout: str = LAYOUT
    page_size: int = 16
    """Tokens of a page."""
    component: str = "kv"
    """`kv`, or `k` / `v` where an engine stores the halves apart."""
    layer_start: int = 0
    layer_end: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    adapter: str = ""
    adapter_digest: str = ""
    salt: str = ""
    tenant: str = ""

    def digest(self) -> str:
        """The `owner` of this identity's page keys: all fields but salt and tenant.

        Those two stand in the chain seed, so they still tell keys apart, and a rule recognises a model's pages whatever
        their salt or tenant.
        """
        fields = [f for f in self.__struct_fields__ if f not in ("salt", "tenant")]
        return digest("moonpool.kv", [(f, getattr(self, f)) for f in fields])

    def chain_seed(self) -> str:
        """Start of the block hash chain: what two models must share for their pages to cover the same tokens."""
        names = ("tokenizer", "page_size", "salt", "tenant")
        return digest("moonpool.seed", [(f, getattr(self, f)) for f in names])

    def page_keys(self, tokens: Sequence[int]) -> list[PageKey]:
        """Keys of the full pages of `tokens`, in order; a partial last page has no key."""
        owner = self.digest()
        return [PageKey(owner, i, h) for i, h in enumerate(block_hashes(tokens, self.page_size, self.chain_seed()))]


def block_hashes(tokens: Sequence[int], page_size: int, seed: str) -> list[str]:
    """Chained hashes: the i-th covers tokens `[0, (i + 1) * page_size)`."""
    if page_size < 1:
        raise ConfigError("page size must be at least one token", need=">= 1", have=str(page_size))
    hashes: list[str] = []
    parent = seed
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = b"".join(int(t).to_bytes(8, "little") for t in tokens[start : start + page_size])
        parent = digest("moonpool.block", [("parent", parent), ("tokens", page)])
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class PageKey:
    """One page's key. `owner` is a `KVIdentity` digest; `origin` is the bundle digest of a converted page, else empty."""

    owner: str
    index: int
    block: str
    origin: str = ""

    @property
    def text(self) -> str:
        base = f"mp1:{self.owner}:{self.index}:{self.block}"
        return f"{base}~x2x:{self.origin}" if self.origin else base

    @property
    def native(self) -> PageKey:
        return replace(self, origin="") if self.origin else self

    def of(self, owner: str) -> PageKey:
        """The native page of the same tokens under another identity."""
        return PageKey(owner, self.index, self.block)

    def converted(self, bundle: str) -> PageKey:
        """The page of the same identity and tokens, as made by the bundle with this digest (32 hex digits)."""
        return replace(self, origin=bundle)

    @staticmethod
    def parse(text: str) -> PageKey | None:
        """The key behind `text`; None for a key that is no Moonpool page (the pool stores any key)."""
        m = _KEY.fullmatch(text)
        return PageKey(m[1], int(m[2]), m[3], m[4] or "") if m else None


def owner_of(text: str) -> str:
    """`PageKey.parse(text).owner` without making the rest; empty for a key that is no page."""
    return text[4:36] if text.startswith("mp1:") and _KEY.fullmatch(text) else ""
