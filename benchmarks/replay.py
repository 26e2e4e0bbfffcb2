"""A recorded conversation, scaled down, through the live conductor: 2 prefill and 2 decode instances of the built-in engine, each a
process of its own, over one pool of two nodes. Every policy gets a pool, instances and a conductor of its own, and the same requests
at the same times.

    python -m benchmarks.replay --trace FOLDER/conversation_trace.jsonl

A block of 512 tokens of the trace becomes one of 32 random tokens (two pages), an answer a sixteenth of its length.

ttft_mean_<policy>_s   client's clock, from the request to the first piece of its answer
hit_<policy>           share of the prompts' tokens that the prefill instances did not compute
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import figures
from moonpool import paths
from moonpool.conductor.config import ConductorConfig, ModelOptions
from moonpool.conductor.perf import PerfModel, PrefillSample
from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.server.run import ConductorThread
from moonpool.testing.cluster import LocalCluster

MODEL = "moon-large"
SCALE, BLOCK, MOST, VOCABULARY = 16, 32, 1900, 2000
POLICIES = {"kvcache": "kvcache", "random": "random", "least": "least_requests"}
NAMES = ("p0", "p1", "d0", "d1")
SAMPLE = Path("tests/conductor/data/sample_trace.jsonl")


@dataclass(frozen=True)
class Ask:
    at: float
    tokens: list[int]
    answer: int


@dataclass(frozen=True)
class Seen:
    ttft: float
    tokens: int
    prefill: str


def requests(trace: Path, count: int, load: float) -> list[Ask]:
    """The first `count` requests that fit the model, `load` of them a second on average."""
    lines = (json.loads(line) for line in trace.read_text().splitlines())
    fit = (r for r in lines if r["input_length"] / SCALE <= MOST)
    chosen = list(itertools.islice(fit, count))
    span = (chosen[-1]["timestamp"] - chosen[0]["timestamp"]) / 1000 or 1.0
    stretch, rng = count / load / span, random.Random(0)
    found = []
    for r in chosen:
        late = rng.random() * 3 if r["timestamp"] else 0.0  # the trace has buckets of three seconds
        tokens = [t for h in r["hash_ids"] for t in _block(h)][: max(BLOCK, r["input_length"] // SCALE)]
        answer = max(2, min(24, r["output_length"] // SCALE))
        found.append(Ask((r["timestamp"] / 1000 + late) * stretch, tokens, answer))
    return sorted(found, key=lambda a: a.at)


def _block(hash_id: int) -> list[int]:
    rng = random.Random(hash_id)
    return [rng.randrange(300, VOCABULARY) for _ in range(BLOCK)]


@contextmanager
def fleet() -> Iterator[dict[str, str]]:
    """Name → URL of instances on a fresh pool."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(messengers=2, capacity=192 << 20))
        ports = _ports(len(NAMES))
        command = [
            sys.executable,
            "-m",
            "moonpool",
            "serve",
            paths.find_model(MODEL),
            "--master",
            cluster.master.socket,
        ]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        for port in ports:
            process = subprocess.Popen([*command, "--port", str(port)], env=quiet, stdout=subprocess.DEVNULL)
            stack.callback(_stop, process)
        urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(NAMES, ports, strict=True)}
        for url in urls.values():
            _wait(url)
        yield urls


def run(policy: str, asks: list[Ask], perf: PerfModel) -> dict[str, float]:
    with fleet() as urls:
        entries = [
            InstanceEntry(url=u, model=MODEL, id=n, kind="moonpool", roles=("prefill",) if n[0] == "p" else ("decode",))
            for n, u in urls.items()
        ]
        config = ConductorConfig(
            instances=entries,
            models={MODEL: ModelOptions(tokenizer=paths.find_model(MODEL), block_size=16, executor="store", perf=perf)},
            policy=policy,
            seed=1,
        )
        with ConductorThread(config) as conductor:
            _wait(conductor.url, "/ready")
            asyncio.run(_replay(conductor.url, asks[:4], quick=True))  # warms every process
            before = {n: _stats(urls[n]) for n in ("p0", "p1")}
            seen = asyncio.run(_replay(conductor.url, asks))
            after = {n: _stats(urls[n]) for n in ("p0", "p1")}
            saved = conductor.conductor.saved_prefill_s
    computed = sum(after[n]["computed"] - before[n]["computed"] for n in after)
    cached = sum(after[n]["cached"] - before[n]["cached"] for n in after)
    times = sorted(s.ttft for s in seen)
    return {
        "requests": len(seen),
        "ttft_mean": statistics.mean(times),
        "ttft_p50": times[len(times) // 2],
        "ttft_p90": times[int(0.9 * len(times))],
        "hit": cached / (cached + computed),
        "saved_s": saved,
        "on_p0": sum(s.prefill == "p0" for s in seen) / len(seen),
    }


async def _replay(url: str, asks: list[Ask], quick: bool = False) -> list[Seen]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        began = time.perf_counter()

        async def one(ask: Ask) -> Seen:
            await asyncio.sleep(0 if quick else max(0.0, ask.at - (time.perf_counter() - began)))
            body = {"model": MODEL, "prompt": ask.tokens, "max_tokens": ask.answer, "temperature": 0, "stream": True}
            start = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
                first = None
                async for line in answer.content:
                    if first is None and line.startswith(b"data: {"):
                        first = time.perf_counter() - start
                assert first is not None
                return Seen(first, len(ask.tokens), answer.headers["x-conductor-prefill"])

        return await asyncio.gather(*map(one, asks))


def calibrated() -> PerfModel:
    """The prefill formula, from a few prompts on one idle instance."""
    with fleet() as urls:
        samples = []
        for n, tokens in enumerate((200, 400, 800, 1200, 1600, 1900)):
            prompt = [random.Random(1000 * n + i).randrange(300, VOCABULARY) for i in range(tokens)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            began = time.perf_counter()
            _post(f"{urls['p0']}/v1/completions", body)
            samples.append(PrefillSample(tokens, 0, time.perf_counter() - began))
    return PerfModel(decode=(0.02, 2e-3, 0.0), kv_bytes_per_token=8192, bandwidth=5e8).fitted(samples[1:])


def _stats(url: str) -> dict[str, float]:
    """Prompt tokens that an instance computed, and those it found."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()  # our own loopback server
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        values[name.split("{")[0]] = values.get(name.split("{")[0], 0.0) + float(value) if name[:1] != "#" else 0.0
    return {
        "computed": values["moonpool_engine_tokens_computed_total"],
        "cached": values["moonpool_engine_tokens_native_total"],
    }


def _post(url: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(url, raw, {"content-type": "application/json"}), timeout=60).read()


def _wait(url: str, path: str = "/health") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if urllib.request.urlopen(f"{url}{path}", timeout=2).status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not come up")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, default=SAMPLE, help="a trace; the repository's small sample if not given"
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--load", type=float, default=2.0, help="requests a second")
    options = parser.parse_args()
    asks = requests(options.trace, options.requests, options.load)
    perf = calibrated()
    print(
        f"prefill: {perf.prefill[0]:.4f} + {perf.prefill[1]:.2e} n + {perf.prefill[2]:.2e} n² s; {len(asks)} requests"
    )
    found = {name: run(policy, asks, perf) for name, policy in POLICIES.items()}
    heads = ("policy", "TTFT mean s", "median", "p90", "hit rate", "prefill s saved", "share of p0")
    rows = [
        (n, *(f"{f[k]:.3f}" for k in ("ttft_mean", "ttft_p50", "ttft_p90", "hit", "saved_s", "on_p0")))
        for n, f in found.items()
    ]
    figures.show(f"{len(asks)} requests at {options.load:g}/s, 2 prefill + 2 decode instances of {MODEL}", rows, heads)
    flat = {f"ttft_mean_{n}_s": f["ttft_mean"] for n, f in found.items()} | {
        f"hit_{n}": f["hit"] for n, f in found.items()
    }
    flat |= {f"ttft_p90_{n}_s": f["ttft_p90"] for n, f in found.items()}
    flat |= {f"prefill_saved_{n}_s": f["saved_s"] for n, f in found.items()}
    print(figures.write("replay", flat))


if __name__ == "__main__":
    main()
