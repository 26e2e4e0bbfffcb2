"""`Pool.open()`: the embedded pool. Master, messenger and converter in this process, one object to open and close."""

from __future__ import annotations

from pathlib import Path

from moonpool import paths
from moonpool.c2c.config import C2CConfig, load_c2c
from moonpool.c2c.converter import Converter
from moonpool.store.embedded import EmbeddedPool


class Pool(EmbeddedPool):
    """An `EmbeddedPool` with its converter. Use `open`."""

    def __init__(self, capacity: int, c2c: C2CConfig, *, cache_dir: Path | None = None) -> None:
        super().__init__(capacity, c2c_config=c2c.encode())
        self.c2c = c2c
        self.converter = Converter(self, c2c, cache_dir=cache_dir or paths.cache_dir())
        try:
            self.converter.start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def open(capacity: int = 1 << 30, *, c2c: str | Path | C2CConfig | None = None) -> Pool:
        """A pool of `capacity` bytes in this process; `c2c` is a C2C file (or its resolved form) whose rules it runs."""
        config = c2c if isinstance(c2c, C2CConfig) else load_c2c(c2c, paths.models_dir()) if c2c else C2CConfig()
        return Pool(capacity, config)

    def close(self) -> None:
        self.converter.close()
        super().close()
