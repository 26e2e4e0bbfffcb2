"""Conversion against the machine's limits.

gemm_fraction       arithmetic rate of whole conversions (pages in, pages out) ÷ rate of the bare fp32 products of the same shapes
convert_vs_prefill  tokens/s converted ÷ tokens/s that the target prefills itself
put_overhead        time of a put with its rule on ÷ with no rule, between real processes
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from benchmarks import figures
from benchmarks.c2c.pairs import Pair
from moonpool import paths
from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import load_c2c
from moonpool.c2c.convert import Conversion
from moonpool.c2c.pages import pack
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import ModelSpec, load_spec
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest
from moonpool.store.client import PoolClient
from moonpool.testing.cluster import LocalCluster

PAGE = 16
TOKENS = 2048
PROMPT = 512
PUT_ROUNDS = 40
TURNS = 9


def measure(pair: Pair) -> dict[str, float]:
    bundle = open_bundle(pair.bundle)
    source, target = load_spec(paths.find_model(pair.source)), load_spec(paths.find_model(pair.target))
    projector = bundle.projector()
    seconds, bare = alternating(Conversion(projector, source, target, PAGE), projector)
    prefill = prefill_rate(pair, target)
    overhead, saturated = put_overhead(source, pair)
    return {
        "convert_tokens_per_s": TOKENS / seconds,
        "convert_gflops": TOKENS * projector.flops_per_token() / seconds / 1e9,
        "sgemm_gflops": TOKENS * projector.flops_per_token() / bare / 1e9,
        "gemm_fraction": bare / seconds,
        "prefill_tokens_per_s": prefill,
        "convert_vs_prefill": TOKENS / seconds / prefill,
        "put_overhead": overhead,
        "put_overhead_saturated": saturated,
    }


def alternating(conversion: Conversion, projector: Projector) -> tuple[float, float]:
    """Seconds of a conversion of TOKENS tokens, and of its bare products, in turns, so that a slow minute hits both alike."""
    convert, multiply = _conversion(conversion), _products(projector.shapes())
    both = [(figures.seconds(convert, repeats=1), figures.seconds(multiply, repeats=1)) for _ in range(TURNS)]
    ratio = statistics.median(c / m for c, m in both)
    seconds = statistics.median(c for c, _ in both)
    return seconds, seconds / ratio


def _conversion(conversion: Conversion) -> Callable[[], None]:
    """Converts TOKENS tokens, pages in and pages out."""
    shape = conversion.source_shape
    count = TOKENS // PAGE
    half = PAGE, shape.layers, shape.heads, shape.dim
    pages = [bytes(pack(torch.randn(half), torch.randn(half))) for _ in range(count)]
    outs = [memoryview(bytearray(conversion.target_bytes)) for _ in range(count)]

    def run() -> None:
        assert conversion.run(pages, range(count), outs) == [None] * count

    return run


def _products(shapes: list[tuple[int, int]]) -> Callable[[], None]:
    """The bare products on contiguous operands: the machine's own fp32 rate on these shapes."""
    x = {rows: torch.randn(TOKENS, rows) for rows, _ in shapes}
    weights = [torch.randn(rows, columns) for rows, columns in shapes]
    outs = [torch.empty(TOKENS, columns) for _, columns in shapes]

    def run() -> None:
        for w, out in zip(weights, outs, strict=True):
            torch.mm(x[w.shape[0]], w, out=out)

    return run


def prefill_rate(pair: Pair, target: ModelSpec) -> float:
    """Tokens/s of the target's own prefill in the built-in engine, without a pool."""
    instance = Instance(paths.find_model(pair.target), target, None, page_size=PAGE, compute="float32")
    try:
        prompt = torch.randint(10, min(1000, target.vocab_size), (PROMPT,)).tolist()
        return PROMPT / figures.seconds(
            lambda: instance.generate(GenerateRequest(prompt=prompt, max_tokens=0)), repeats=3
        )
    finally:
        instance.close()


def put_overhead(source: ModelSpec, pair: Pair) -> tuple[float, float]:
    """(paced, saturated): median time of putting one prompt's pages with the rule on ÷ with no rule.

    Master, messenger and converter are processes of their own. Puts with and without the rule alternate. Paced: as an engine
    puts, the next prompt comes when the last one's conversion is over. Saturated: back to back, so that the converter competes for
    the cores and memory all the time.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(_c2c_file(Path(folder), pair)) as on,
        cluster(None) as off,
    ):
        return _ratio(on, off, source, 0.25), _ratio(on, off, source, 0.0)


@contextmanager
def cluster(c2c: Path | None) -> Iterator[PoolClient]:
    """A client on a master, a messenger and, with a C2C file, a converter: all processes of their own."""
    config = load_c2c(c2c).encode() if c2c else b""
    with LocalCluster(capacity=2 << 30, c2c_config=config) as running:
        command = [sys.executable, "-m", "moonpool", "converter", "--master", running.master.socket]
        converter = subprocess.Popen(command) if c2c else None
        try:
            pool = running.client()
            if c2c:
                time.sleep(10)  # until it has loaded its bundle
            yield pool
        finally:
            if converter:
                converter.terminate()
                converter.wait()


def _ratio(on: PoolClient, off: PoolClient, source: ModelSpec, pause: float) -> float:
    identity, shape = source.identity(PAGE), source.page_shape(PAGE)
    page = torch.randn(shape.nbytes // 2).bfloat16().view(torch.uint8).numpy()
    times: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(PUT_ROUNDS):
        keys = [k.text for k in identity.page_keys([turn, int(pause * 100), *range(PROMPT - 2)])]
        both = [("on", on), ("off", off)]
        for which, pool in both if turn % 2 else reversed(both):
            start = time.perf_counter()
            pool.batch_put(keys, [page] * len(keys))
            times[which].append(time.perf_counter() - start)
            time.sleep(pause)
    warm = PUT_ROUNDS // 4
    return statistics.median(times["on"][warm:]) / statistics.median(times["off"][warm:])


def _c2c_file(folder: Path, pair: Pair) -> Path:
    path = folder / "c2c.yaml"
    file = {
        "models": {"s": {"ref": paths.find_model(pair.source)}, "t": {"ref": paths.find_model(pair.target)}},
        "rules": [{"source": "s", "target": "t", "bundle": str(pair.bundle.resolve()), "force": True}],
        "page_size": PAGE,
    }
    path.write_bytes(msgspec.yaml.encode(file))
    return path
