"""Names that an owner gives to caches: a tag points to one cache, a cache may have many tags."""

from __future__ import annotations

import re

import msgspec

from moonpool.conductor.caching.pin import PinId
from moonpool.errors import NotFound, QuotaExceeded, RequestError

_FORM = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}")
OWNER_TAGS = 1000
"""An owner may have so many."""


class Tag(msgspec.Struct, frozen=True):
    tag: str
    pin: PinId
    created: float


class Tags:
    def __init__(self, most: int = OWNER_TAGS) -> None:
        self._most = most
        self._all: dict[str, dict[str, Tag]] = {}
        """Owner → name → tag."""

    def set(self, owner: str, name: str, pin: PinId, now: float) -> Tag:
        """A tag that is there points to another cache from now on. Raises RequestError (not a tag's name), QuotaExceeded."""
        if not _FORM.fullmatch(name):
            raise RequestError(
                "not a tag",
                key="tag",
                need="a letter, then up to 127 letters, digits, `_`, `-` or `.`",
                have=name[:140],
            )
        mine = self._all.get(owner, {})
        if name not in mine and len(mine) >= self._most:
            raise QuotaExceeded("too many tags", key=owner, need=f"<= {self._most}")
        found = Tag(name, pin, now)
        self._all.setdefault(owner, mine)[name] = found
        return found

    def get(self, owner: str, name: str) -> Tag:
        """Raises NotFound."""
        found = self._all.get(owner, {}).get(name)
        if found is None:
            raise NotFound("no such tag", key=name)
        return found

    def of(self, owner: str, pin: PinId = "") -> list[Tag]:
        """All, or those of one cache; the oldest first."""
        found = [t for t in self._all.get(owner, {}).values() if pin in ("", t.pin)]
        return sorted(found, key=lambda t: (t.created, t.tag))

    def delete(self, owner: str, name: str) -> None:
        """Also if there is none."""
        mine = self._all.get(owner, {})
        mine.pop(name, None)
        if not mine:
            self._all.pop(owner, None)

    def forget(self, owner: str, pin: PinId) -> None:
        """The cache is gone, and its tags with it."""
        for tag in self.of(owner, pin):
            self.delete(owner, tag.tag)
