"""Which instance holds which blocks."""

from moonpool.conductor.index.holders import Plane
from moonpool.conductor.index.prefix import PrefixIndex

__all__ = ["Plane", "PrefixIndex"]
