"""What users see when a process dies: the master, a holder, and a master that is not there at all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import figures
from benchmarks.store.plan import Plan
from benchmarks.store.sides import Sides, Worker, free_port
from moonpool.errors import MoonpoolError
from moonpool.store.client import PoolClient

_KEYS = 50
_BUFFER = 64 << 20
_SEGMENT = 512 << 20
_WAIT_S = 15.0
"""How long what was there before is waited for."""


def recovery(plan: Plan) -> dict[str, object]:
    size = (64 << 10) if plan.quick else (1 << 20)
    rows = {"ours": _ours(size, 1.0 if plan.quick else 5.0)}
    if plan.peer and not plan.quick:  # its time-outs alone take a minute
        rows["peer"] = _peer(plan.peer, size, 5.0, slow=plan.slow)
    names = list(dict.fromkeys(n for row in rows.values() for n in row))
    figures.show(
        f"{_KEYS} keys of {size >> 10} KiB; s unless it says otherwise",
        [(n.replace("_", " "), *(_text(row.get(n, "–")) for row in rows.values())) for n in names],
        ("when the master is killed and started again; when a holder is killed; without a master", *rows),
    )
    return {f"recovery_{n}_{side}": row[n] for side, row in rows.items() for n in row}


def _ours(size: int, away_s: float) -> dict[str, object]:
    with Sides(None) as sides:
        nodes = sides.nodes(2, capacity=_SEGMENT)
        holder, other = (sides.ours_client(nodes, home, _BUFFER) for home in (0, 1))
        found = _master(holder, other, size, away_s, nodes.master.kill, nodes.master.start)
    with Sides(None) as sides:
        nodes = sides.nodes(2, capacity=_SEGMENT)
        holder, other = (sides.ours_client(nodes, home, _BUFFER) for home in (0, 1))
        found |= _holder(holder, other, size, nodes.messengers[0].kill)
    return found | _no_master()


def _peer(python: Path, size: int, away_s: float, *, slow: bool) -> dict[str, object]:
    with Sides(python) as sides:
        master = sides.peer_master()
        sides.peer_client(master, _SEGMENT, 0)
        both, other = sides.peer_client(master, _SEGMENT, _BUFFER), sides.peer_client(master, 0, _BUFFER)

        def kill() -> None:
            master.process.kill()
            master.process.wait()

        found = _master(both, other, size, away_s, kill, lambda: sides.restart(master))
    with Sides(python) as sides:
        master = sides.peer_master()
        holder = sides.peer_client(master, _SEGMENT, _BUFFER)
        other = sides.peer_client(master, 0, _BUFFER)
        found |= _holder(holder, other, size, holder.kill)
    return found | (_peer_without_master(python) if slow else {})


def _master(
    holder: Worker, other: Worker, size: int, away_s: float, kill: Callable[[], None], start: Callable[[], None]
) -> dict[str, object]:
    """`holder` writes next to its segment, `other` reads from elsewhere. After the restart time counts from when the new master
    answers."""
    holder.do("store", label="old", count=_KEYS, size=size)
    before = _all_readable(other, size)
    assert before["readable"] == _KEYS, f"{before['readable']} of {_KEYS} before anything happened"
    kill()
    away = holder.do("hammer", label="old", count=_KEYS, size=size, seconds=away_s)
    away_other = other.do("hammer", label="old", count=_KEYS, size=size, seconds=away_s)
    start()
    first_put = holder.do("first_put", label="after", size=size, timeout=_WAIT_S)
    after = _all_readable(other, size)
    return {
        "local_gets_ok_while_master_away": f"{away['get_ok']} of {away['rounds']}",
        "local_puts_ok_while_master_away": f"{away['put_ok']} of {away['rounds']}",
        **{f"longest_{c}_while_master_away": away[f"{c}_longest_s"] for c in ("put", "get", "exist")},
        "longest_remote_call_while_master_away": max(away_other[f"{c}_longest_s"] for c in ("put", "get", "exist")),
        "first_put_after_master_restart": first_put,
        "readable_after_master_restart": after["readable"],
        "all_readable_after": after["seconds"] if after["readable"] == _KEYS else None,
    }


def _all_readable(worker: Worker, size: int) -> dict[str, float]:
    """How many of the old keys the worker can read, waiting for all of them a while."""
    begun = time.monotonic()
    readable = 0
    while readable < _KEYS and time.monotonic() - begun < _WAIT_S:
        readable = worker.do("readable", label="old", count=_KEYS, size=size)
    return {"readable": readable, "seconds": time.monotonic() - begun}


def _holder(holder: Worker, other: Worker, size: int, kill: Callable[[], None]) -> dict[str, object]:
    """How long keys whose only holder was killed are still said to exist."""
    holder.do("store", label="old", count=_KEYS, size=size)
    assert _all_readable(other, size)["readable"] == _KEYS
    kill()
    return {"killed_holders_keys_gone_after": other.do("gone", label="old", count=_KEYS, timeout=30.0)}


def _no_master() -> dict[str, object]:
    """How long it takes to be told that there is no master, or that it does not answer, and in what words."""
    found = _refusal("no_master", f"127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        return found | _refusal("silent_master", f"127.0.0.1:{silent.getsockname()[1]}")


def _refusal(what: str, address: str) -> dict[str, object]:
    begun = time.monotonic()
    try:
        PoolClient.connect(address).close()
    except MoonpoolError as e:
        return {f"{what}_fails_after": time.monotonic() - begun, f"{what}_says": str(e)}
    raise AssertionError("connected to nobody")


def _peer_without_master(python: Path) -> dict[str, object]:
    begun = time.monotonic()
    try:
        with Sides(python) as sides:
            sides.peer_client(sides.nobody(), _SEGMENT, 0)
            raise AssertionError("set up with nobody")
    except RuntimeError as e:
        words = str(e).strip().splitlines()[-1]
        return {"no_master_fails_after": time.monotonic() - begun, "no_master_says": words}


def _text(value: object) -> str:
    if value is None:
        return "never"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
