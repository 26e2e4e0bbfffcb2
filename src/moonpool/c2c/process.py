"""The converter as a process: joins a pool by its master, takes the config from there, runs until SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

import torch

from moonpool import paths
from moonpool.c2c.config import C2CConfig
from moonpool.c2c.converter import Converter
from moonpool.errors import ConfigError
from moonpool.store.base import KVPool

log = logging.getLogger(__name__)


def convert_until_stopped(pool: KVPool, threads: int) -> None:
    """Run the rules that the pool holds. Raises ConfigError if it holds none."""
    config = C2CConfig.decode(pool.get_c2c_config())
    if not config.rules:
        raise ConfigError(
            "the pool holds no C2C rules", fix="Start the master, or an existing engine's converter, with `--c2c FILE`."
        )
    torch.set_num_threads(threads)
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    converter = Converter(pool, config, cache_dir=paths.cache_dir()).start()
    log.info("converting for %s", ", ".join(r.name for r in config.rules))
    try:
        while not stop.wait(0.5):
            pass  # a signal that comes just before a wait without end would not be heard in it
    finally:
        converter.close()
