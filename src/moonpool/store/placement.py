"""Where a new object goes. Pure: figures of the messengers in, names in order of preference out."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from moonpool.types import MessengerInfo

HOME_KEEPS = 0.1
"""Share of the home's memory that must be free for it to be preferred to emptier ones."""
_EVEN = 0.5
"""Added to every free share: an empty newcomer gets more than the others, but not everything."""


def order(
    members: Sequence[MessengerInfo], *, home: str = "", preferred: Sequence[str] = (), random: Random
) -> list[str]:
    """All members that take objects: the preferred ones, then the home, unless it is full and others are not, then the others, at
    random, the emptier the likelier."""
    open_ = {m.name: m for m in members if not m.draining}
    first = [name for name in preferred if name in open_]
    rest = [name for name in open_ if name not in first]
    weights = {name: _EVEN + _free(open_[name]) for name in rest}
    shuffled = sorted(rest, key=lambda name: random.random() ** (1 / weights[name]), reverse=True)
    if home in shuffled:
        emptier = any(_free(open_[name]) > HOME_KEEPS for name in shuffled if name != home)
        if _free(open_[home]) >= HOME_KEEPS or not emptier:
            shuffled.remove(home)
            shuffled.insert(0, home)
    return first + shuffled


def _free(member: MessengerInfo) -> float:
    return 1 - member.used / member.capacity if member.capacity else 0.0
