"""What the commands share: logs, version, and how they end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from moonpool import __version__
from moonpool.errors import MoonpoolError


def run(program: str, main: Callable[[Sequence[str]], None]) -> int:
    """Run `main` with the command line; a MoonpoolError is one line and exit status 1."""
    arguments = sys.argv[1:]
    if "--version" in arguments:
        print(f"{program} (moonpool {__version__})")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        main(arguments)
    except MoonpoolError as e:
        print(f"{program}: {e}", file=sys.stderr)
        return 1
    return 0
