"""One object in one file: a header, the key, the bytes. Pure.

    0   8   magic "MOONDISK"           24  16  xxh3-128 of the payload
    8   2   version of this format     40   8  xxh3-64 of the caller's layout label
    10  2   nothing                    48  16  xxh3-128 of bytes 0–47 and of the key
    12  4   length of the key          64      key (UTF-8), then the payload
    16  8   length of the payload

The name comes from a cryptographic hash, so that nobody can make two keys meet in one file; the key in the header is compared all
the same. The checksums guard against a bad disk, not against an enemy who may write to it, so a fast one does.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import xxhash

MAGIC = b"MOONDISK"
VERSION = 1
_FIELDS = struct.Struct("<8sHHIQ16sQ")
_CHECK = 16
FIXED = _FIELDS.size + _CHECK
"""Bytes before the key."""
MAX_KEY = 1 << 16
"""Bytes. A longer key is refused, so that a damaged length cannot ask for much memory."""


class Damaged(Exception):
    """Bytes that are no record of ours; `reason` in a word or two. It does not leave the disk tier."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    key: str
    size: int
    """Bytes of the payload."""
    checksum: bytes
    layout: int

    @property
    def length(self) -> int:
        """Bytes before the payload."""
        return header_length(self.key)

    def pack(self) -> bytes:
        key = encoded(self.key)
        fields = _FIELDS.pack(MAGIC, VERSION, 0, len(key), self.size, self.checksum, self.layout)
        return fields + xxhash.xxh3_128_digest(fields + key) + key

    @staticmethod
    def unpack(raw: bytes | memoryview) -> Header:
        """`raw`: at least the header. Raises Damaged."""
        if len(raw) < FIXED:
            raise Damaged("truncated")
        magic, version, _, key_length, size, checksum, layout = _FIELDS.unpack_from(raw)
        if magic != MAGIC:
            raise Damaged("header")
        if version != VERSION:
            raise Damaged("other version")
        key = bytes(raw[FIXED : FIXED + key_length])
        fields = bytes(raw[: _FIELDS.size])
        if xxhash.xxh3_128_digest(fields + key) != bytes(raw[_FIELDS.size : FIXED]):
            raise Damaged("header")
        try:
            return Header(key.decode("utf-8", "surrogatepass"), size, checksum, layout)
        except UnicodeDecodeError as e:
            raise Damaged("header") from e


def key_length(raw: bytes | memoryview) -> int:
    """Bytes of the key that a header announces; 0 if it is cut short. Not to be trusted before `unpack`."""
    return int(_FIELDS.unpack_from(raw)[3]) if len(raw) >= FIXED else 0


def encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def header_length(key: str) -> int:
    return FIXED + len(encoded(key))


def checksum(payload: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(payload)


def layout_tag(layout: str) -> int:
    return xxhash.xxh3_64_intdigest(encoded(layout))


def name_of(key: str) -> str:
    """32 hex digits: the file's name."""
    return hashlib.blake2b(encoded(key), digest_size=16).hexdigest()
