"""`python -m moonpool.store.messenger CONFIG_JSON`: a messenger as a process of its own."""

from __future__ import annotations

import sys

from moonpool.config import parse
from moonpool.store.processes import MessengerConfig, run_messenger

if __name__ == "__main__":
    run_messenger(parse(sys.argv[1].encode(), MessengerConfig, name="argument"))
