"""Keys as callers pass them: any text. One that no pool can hold is missing, or a put's -600; it never fails its batch."""

from __future__ import annotations

from moonpool.wire.messages import MAX_KEY


def usable(key: str) -> bool:
    """Whether the pool can hold this key. Raises TypeError for what is no text."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY:
        return False
    if key.isascii():
        return True
    try:
        key.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True
