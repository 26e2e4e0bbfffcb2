"""The public surface: sorted, importable, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import moonpool


def test_all_is_sorted_and_importable() -> None:
    assert sorted(moonpool.__all__) == moonpool.__all__
    for name in moonpool.__all__:
        assert getattr(moonpool, name) is not None


def test_importing_the_pool_needs_no_torch() -> None:
    code = "import sys, moonpool; moonpool.PoolClient, moonpool.KVIdentity; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
