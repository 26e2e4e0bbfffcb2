"""The messenger's second tier: files on a local disk."""

from moonpool.store.messenger.disk.config import DiskConfig, DiskStats
from moonpool.store.messenger.disk.files import Files, OsFiles
from moonpool.store.messenger.disk.tier import DiskTier

__all__ = ["DiskConfig", "DiskStats", "DiskTier", "Files", "OsFiles"]
