"""A tier in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.store.messenger.disk import DiskTier
from moonpool.testing.leaks import no_leaks
from tests.store.disk.support import (
    open_tier,
)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with no_leaks():
        opened = open_tier(tmp_path / "disk")
        yield opened
        opened.check_integrity()
        opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"
