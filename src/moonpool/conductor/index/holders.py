"""Sets of holders, interned: a fleet has few different ones, and a block needs only a number for its own.

A set is five bit masks over instance slots, one for each plane. Steps from set to set (this instance, this plane, more or less) are
remembered, so that a run of blocks with one history costs one step.
"""

from __future__ import annotations

from enum import IntEnum

Masks = tuple[int, int, int, int, int]


class Plane(IntEnum):
    """What a holding rests on."""

    GPU = 0
    """An engine's event: in its own memory."""
    CPU = 1
    """An event: in a slower tier of the instance."""
    DISK = 2
    SENT = 3
    """No events come from there, but we saw the end of a prefill (and it may be gone since)."""
    GUESS = 4
    """A prompt was sent there, and waits."""


EMPTY: Masks = (0, 0, 0, 0, 0)


class HolderSets:
    def __init__(self) -> None:
        self.masks: list[Masks] = [EMPTY]
        self.any: list[int] = [0]
        """All planes of a set together."""
        self.sure: list[int] = [0]
        """All but guesses."""
        self._ids: dict[Masks, int] = {EMPTY: 0}
        self._steps: dict[tuple[int, int, int, bool], int] = {}

    def __len__(self) -> int:
        return len(self.masks)

    def id(self, masks: Masks) -> int:
        found = self._ids.get(masks)
        if found is None:
            found = self._ids[masks] = len(self.masks)
            self.masks.append(masks)
            self.sure.append(masks[0] | masks[1] | masks[2] | masks[3])
            self.any.append(self.sure[-1] | masks[4])
        return found

    def step(self, set_: int, slot: int, plane: int, more: bool) -> int:
        """The set with the instance added to the plane, or taken from it."""
        key = (set_, slot, plane, more)
        found = self._steps.get(key)
        if found is None:
            masks = list(self.masks[set_])
            masks[plane] = masks[plane] | 1 << slot if more else masks[plane] & ~(1 << slot)
            found = self._steps[key] = self.id((masks[0], masks[1], masks[2], masks[3], masks[4]))
        return found

    def without(self, dead: int) -> list[int]:
        """Drop the slots in `dead` from all sets → for each old set its new number. Steps are forgotten."""
        old = self.masks
        self.masks, self.any, self.sure, self._ids, self._steps = [EMPTY], [0], [0], {EMPTY: 0}, {}
        kept = ~dead
        return [self.id((m[0] & kept, m[1] & kept, m[2] & kept, m[3] & kept, m[4] & kept)) for m in old]
