"""What a run is to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    peer: Path | None
    """The peer's Python; None: only our side."""
    rounds: int
    quick: bool
    keys: int
    """Keys of the index section."""
    slow: bool

    @property
    def buffer(self) -> int:
        """Bytes of a client's source and of its target."""
        return (16 if self.quick else 128) << 20

    @property
    def segment(self) -> int:
        return (128 if self.quick else 1024) << 20

    def sizes(self) -> dict[str, int]:
        return {"64k": 64 << 10, "1m": 1 << 20}
