"""`make fit-qwen`: fits the second pair of the benchmark, projector and baseline, on the same 24 k tokens of Python's own library.

Captures of both models' KV are the long part (minutes on two cores) and are kept in the cache folder.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.c2c import library_texts, qwen


def main() -> None:
    pair = qwen()
    for out, more in ((pair.bundle, []), (pair.baseline, ["--kind", "mlp", "--epochs", "8"])):
        command = ["-m", "moonpool", "c2c", "fit", "--source", pair.source, "--target", pair.target, "--out", str(out)]
        subprocess.run([sys.executable, *command, *more, *library_texts()], check=True)


if __name__ == "__main__":
    main()
