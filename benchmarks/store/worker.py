"""`python -m benchmarks.store.worker KIND JSON`: one client process. Reads a JSON command a line, answers a JSON line.

KIND says which side, JSON its arguments. Runs in the environment of either side, so each adapter is imported when it is wanted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.store import workload
from benchmarks.store.workload import Side


def make(kind: str, arguments: dict[str, Any]) -> Side:
    if kind.startswith("peer"):
        from benchmarks.store.peer import Peer

        return {"peer": Peer.setup, "peer-shm": Peer.dummy}[kind](**arguments)
    from benchmarks.store.ours import Ours

    return {"ours": Ours.client, "ours-embedded": Ours.embedded}[kind](**arguments)


def commands(side: Side) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "batch": lambda **a: workload.batch_rate(side, **a),
        "single": lambda **a: workload.single_times(side, **a),
        "exist": lambda **a: workload.exist_rate(side, **a),
        "close": side.close,
    }
    if not type(side).__module__.endswith(".peer"):
        from benchmarks.store import ours

        assert isinstance(side, ours.Ours)
        mine = side
        copies: list[ours.Copies] = []

        def copy(size: int, threads: int) -> dict[str, float]:
            if not copies:
                copies.append(ours.Copies(mine))
            return copies[0].rate(size, threads)

        found["copy"] = copy
        found["view"] = lambda **a: ours.view_times(mine, **a)
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not print into the answers
    try:
        table = commands(make(sys.argv[1], json.loads(sys.argv[2])))
    except BaseException:
        print(json.dumps({"error": traceback.format_exc(limit=3)}), file=answers, flush=True)
        raise
    print(json.dumps({"ok": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": table[command.pop("do")](**command)}
        except Exception:  # noqa: BLE001  # process edge: the other side says what failed
            answer = {"error": traceback.format_exc(limit=3)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
