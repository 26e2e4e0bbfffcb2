"""`python -m benchmarks.store.worker KIND JSON`: one client process. Reads a JSON command a line, answers a JSON line.

KIND says which side, JSON its arguments. Runs in the environment of either side, so each adapter is imported when it is wanted.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.store import failure_work, index_work, workload
from benchmarks.store.workload import Side


def make(kind: str, arguments: dict[str, Any]) -> tuple[Side, dict[str, Callable[..., Any]]]:
    """The side, and the commands that only it has."""
    if kind.startswith("peer"):
        from benchmarks.store.peer import Peer

        return (Peer.setup if kind == "peer" else Peer.dummy)(**arguments), {}
    from benchmarks.store.ours import Copies, Ours, view_times

    ways: dict[str, Callable[..., Ours]] = {
        "ours": Ours.client,
        "ours-embedded": Ours.embedded,
        "ours-remote": Ours.remote,
    }
    side = ways[kind](**arguments)
    copies = functools.cache(lambda: Copies(side))
    return side, {"copy": lambda **a: copies().rate(**a), "view": functools.partial(view_times, side)}


def commands(side: Side) -> dict[str, Callable[..., Any]]:
    """What every side can do: functions of `workload`, `index` and `failing`."""
    shared: dict[str, Callable[..., Any]] = {
        "batch": workload.batch_rate,
        "single": workload.single_times,
        "exist": workload.exist_rate,
        "fill": index_work.fill,
        "calls": index_work.calls,
        "appears": index_work.appears,
        "store": failure_work.store,
        "readable": failure_work.readable,
        "hammer": failure_work.hammer,
        "first_put": failure_work.first_put,
        "gone": failure_work.gone,
    }
    return {name: functools.partial(work, side) for name, work in shared.items()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not print into the answers
    try:
        side, own = make(sys.argv[1], json.loads(sys.argv[2]))
        table = commands(side) | own
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
    os._exit(0)  # whoever closed our input ends everything: the other side's threads are not to be waited for


if __name__ == "__main__":
    main()
