"""Names in the order of a number that changes often: a heap whose outdated entries are dropped when they come up."""

from __future__ import annotations

import heapq

from moonpool.conductor.types import InstanceId, Random


class Ranking:
    """Equal numbers come in random order, and in another one each time."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._heap: list[tuple[float, float, int, InstanceId]] = []
        self._version: dict[InstanceId, int] = {}
        self._serial = 0

    def put(self, name: InstanceId, number: float) -> None:
        self._serial += 1
        self._version[name] = self._serial
        heapq.heappush(self._heap, (number, self._random.random(), self._serial, name))
        if len(self._heap) > 4 * len(self._version) + 64:
            self._heap = [e for e in self._heap if self._version.get(e[3]) == e[2]]
            heapq.heapify(self._heap)

    def drop(self, name: InstanceId) -> None:
        self._version.pop(name, None)

    def least(self, count: int, floor: float = float("-inf")) -> list[InstanceId]:
        """Up to `count` names with the smallest numbers; those under `floor` are equal."""
        found: list[tuple[float, float, int, InstanceId]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._version.get(entry[3]) == entry[2]:
                found.append(entry)
        for number, _, version, name in found:
            heapq.heappush(self._heap, (max(number, floor), self._random.random(), version, name))
        return [name for _, _, _, name in found]
