"""Pages that are another model's and the same: read in place, never copied under a second name.

lookup   the target's own page ─► else the source's of an alias, up to its invocation sequence ─► else what `prefix` has left
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.c2c.alias import equal_tokens
from moonpool.c2c.config import Alias
from moonpool.keys import PageKey, owner_of
from moonpool.store.base import KVPool, Match


class Aliases:
    """The aliases of one target, in the config's order."""

    def __init__(self, pool: KVPool, aliases: Sequence[Alias], page_size: int) -> None:
        self._pool, self._aliases, self._page_size = pool, aliases, page_size
        self._sources = {a.source.owner for a in aliases} - {a.target.owner for a in aliases}

    def find(self, keys: Sequence[PageKey], tokens: Sequence[int]) -> dict[int, Match]:
        """By index, the pages that are there exactly: under their own key, or under a source's. `keys` are those of the full
        pages of `tokens`. Announces nothing. Raises PoolError, WireError."""
        found = {i: m for i, m in enumerate(self._pool.lookup(keys)) if m is not None}
        for alias in self._aliases:
            end = equal_tokens(tokens, alias.until) // self._page_size
            wanted = [i for i in range(min(end, len(keys))) if i not in found and keys[i].owner == alias.target.owner]
            matches = self._pool.lookup([keys[i].of(alias.source.owner) for i in wanted]) if wanted else []
            found |= {i: m for i, m in zip(wanted, matches, strict=True) if m is not None}
        return found

    def shared(self, match: object) -> bool:
        """Whether a page was found under another model's key, and is exact."""
        return isinstance(match, Match) and not match.converted and owner_of(match.key) in self._sources
