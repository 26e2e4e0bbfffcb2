"""matplotlib, where it is installed: an extra that nothing but pictures needs."""

from __future__ import annotations

from typing import Any

from moonpool.errors import ConfigError


def plotting() -> Any:
    """matplotlib's pyplot, for files. Raises ConfigError where it is missing."""
    try:
        import matplotlib
    except ImportError as e:
        raise ConfigError("curves need matplotlib", fix="pip install moonpool[plots]") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
