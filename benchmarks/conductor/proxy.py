"""Requests per second through one process: the conductor's, and the released routers that install here.

The engine and the client are lean (`lean.py`) and share the second core; each router gets the same two engines, round robin or its
own cache-aware policy, and is warmed for a second. In turns, so that a slow minute hits all alike; the median of the turns counts.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import figures
from benchmarks.conductor import lean

ROUTERS = Path("build/routers")
"""A venv of their own: they pull in what Moonpool does not need."""
TURNS, SECONDS, CONNECTIONS = 3, 5.0, 64


def measure() -> dict[str, float]:
    found: dict[str, dict[str, list[float]]] = {}
    missing = _install()
    with ExitStack() as stack:
        engines = [
            stack.enter_context(_process([sys.executable, "-m", "benchmarks.conductor.lean", "serve", str(p)], p))
            for p in _ports(2)
        ]
        urls = [f"http://127.0.0.1:{p}" for p in engines]
        routers = {name: stack.enter_context(_process(command, port)) for name, command, port in _commands(urls)}
        routers["no router"] = engines[0]
        for _ in range(TURNS):
            for name, port in routers.items():
                for kind in ("json", "sse"):
                    got = asyncio.run(lean.load(port, stream=kind == "sse", connections=CONNECTIONS, seconds=SECONDS))
                    for figure, value in got.items():
                        found.setdefault(name, {}).setdefault(f"{kind}_{figure}", []).append(value)
    medians = {name: {f: statistics.median(v) for f, v in by.items()} for name, by in found.items()}
    heads = ("router", "JSON/s", "p50 ms", "SSE/s", "p50 ms")
    rows = [
        (n, *(f"{m[k]:,.1f}" for k in ("json_rps", "json_p50_ms", "sse_rps", "sse_p50_ms"))) for n, m in medians.items()
    ]
    figures.show(f"{CONNECTIONS} connections, {lean.PIECES} events an answer, {os.cpu_count()} cores", rows, heads)
    for name, why in missing.items():
        print(f"{name}: not measured, {why}")
    ours = medians["moonpool"]
    result = {"proxy_json_rps": ours["json_rps"], "proxy_sse_rps": ours["sse_rps"]}
    others = {n: m for n, m in medians.items() if n not in ("moonpool", "no router")}
    for name, m in others.items():
        key = name.replace("-", "_")
        result |= {f"{key}_json_rps": m["json_rps"], f"{key}_sse_rps": m["sse_rps"]}
    if others:
        result["router_json_rps"] = max(m["json_rps"] for m in others.values())
    return result


def _commands(urls: list[str]) -> Iterator[tuple[str, list[str], int]]:
    ports = _ports(3)
    instances = [f"--instance=m={u}" for u in urls]
    yield "moonpool", [sys.executable, "-m", "moonpool", "conductor", f"--port={ports[0]}", *instances], ports[0]
    python = ROUTERS / "bin" / "python"
    common = ["--worker-urls", *urls, "--host", "127.0.0.1", "--policy", "cache_aware", "--log-level", "error"]
    for name, module, port in (("sglang-router", "sglang_router", ports[1]), ("vllm-router", "vllm_router", ports[2])):
        if _there(module):
            metrics = ["--prometheus-port", str(_ports(1)[0])]
            yield name, [str(python), "-m", f"{module}.launch_router", *common, "--port", str(port), *metrics], port


def _there(module: str) -> bool:
    return (
        subprocess.run([str(ROUTERS / "bin" / "python"), "-c", f"import {module}"], capture_output=True).returncode == 0
        if (ROUTERS / "bin" / "python").exists()
        else False
    )


def _install() -> dict[str, str]:
    """Into a venv of their own, once → what could not be had, and why."""
    if not (ROUTERS / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(ROUTERS)], check=True)
    missing = {}
    for name, module in (("sglang-router", "sglang_router"), ("vllm-router", "vllm_router")):
        if _there(module):
            continue
        done = subprocess.run(
            [str(ROUTERS / "bin" / "pip"), "install", "-q", "--only-binary=:all:", name, "setproctitle", "requests"],
            capture_output=True,
            text=True,
        )
        if done.returncode or not _there(module):
            missing[name] = (done.stderr.strip().splitlines() or ["it does not import"])[-1]
    return missing


def _ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@contextmanager
def _process(command: list[str], port: int) -> Iterator[int]:
    """A server that is up: it answers a chat request."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                said = process.stderr.read().decode("utf-8", "replace")[-600:] if process.stderr else ""
                raise RuntimeError(f"{command[:4]} did not come up: {said}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()


def _answers(port: int) -> bool:
    raw = lean.request("x", stream=False).split(b"\r\n\r\n", 1)[1]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", raw, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
