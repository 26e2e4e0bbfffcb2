"""`python -m moonpool.store.master CONFIG_JSON [C2C_JSON_FILE]`: the master as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from moonpool.config import parse
from moonpool.store.processes import MasterConfig, run_master

if __name__ == "__main__":
    run_master(
        parse(sys.argv[1].encode(), MasterConfig, name="argument"),
        Path(sys.argv[2]).read_bytes() if len(sys.argv) > 2 else b"",
    )
