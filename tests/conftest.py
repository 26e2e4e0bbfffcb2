"""Options for the whole of the tests."""

from __future__ import annotations

import gc

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pool",
        choices=("embedded", "mooncake"),
        default="embedded",
        help="What the pool's contract tests run on: Moonpool's own (embedded and as processes), or a real Mooncake Store, "
        "whose master is started from the virtual environment that MOONPOOL_PEER_VENV names, or from PATH.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(ability): skipped, with the reason, on a pool that lacks it (`Cannot`)")


def pytest_collection_finish() -> None:
    """What the imports made stays: without this each leak check walks a million of torch's objects, a third of a second a time. What
    tests make is collected as before."""
    gc.collect()
    gc.freeze()
