"""Conversion against the machine's limits: `make bench-c2c`.

    gemm_fraction       arithmetic rate of whole conversions (pages in, pages out) ÷ rate of the bare fp32 products of the same shapes
    convert_vs_prefill  tokens/s converted ÷ tokens/s that the target prefills itself
    put_overhead        time of a put with its rule on ÷ with no rule, between real processes
    kl_linear, kl_issue1520_mlp   KL against native of the shipped projector and of issue #1520's recipe, from the evaluator

All in one run. The second pair needs its models in MOONPOOL_MODELS and its fits (README); what is missing is said and skipped.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks import figures
from models import fit_bundles
from moonpool import paths
from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import load_c2c
from moonpool.c2c.convert import Conversion
from moonpool.c2c.judging.report import Report, read_report
from moonpool.c2c.pages import pack
from moonpool.c2c.projectors.linear import LinearProjector
from moonpool.c2c.signature import ModelSpec, load_spec
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest
from moonpool.store.client import PoolClient
from moonpool.testing.cluster import LocalCluster

PAGE = 16
TOKENS = 2048
PROMPT = 512
PUT_ROUNDS = 40


@dataclass(frozen=True)
class Pair:
    """A pair to measure: model folders, the bundle, the baseline bundle."""

    name: str
    source: str
    target: str
    bundle: Path
    baseline: Path
    judge: Callable[[Pair], Report]
    """Runs the evaluator on both bundles."""
    fitted_by: str
    """The command that makes both bundles."""


def main() -> None:
    found: dict[str, object] = {}
    for pair in (bundled(), qwen()):
        missing = _missing(pair)
        if missing:
            print(f"{pair.name}: skipped, {missing}")
            continue
        measured = measure(pair)
        found.update({f"{pair.name}_{k}": v for k, v in measured.items()})
        rows = [(figure, f"{value:.3f}") for figure, value in measured.items()]
        figures.show(f"{pair.source} → {pair.target}", rows, ("figure", "value"))
    print(figures.write("bench-c2c", found))


def measure(pair: Pair) -> dict[str, float]:
    bundle = open_bundle(pair.bundle)
    source, target = load_spec(paths.find_model(pair.source)), load_spec(paths.find_model(pair.target))
    projector = bundle.projector()
    assert isinstance(projector, LinearProjector)
    conversion = Conversion(projector, source, target, PAGE)
    seconds, bare = conversion_seconds(conversion), product_seconds(projector)
    prefill = prefill_rate(pair, target)
    overhead, saturated = put_overhead(source, pair)
    report = pair.judge(pair)
    return {
        "convert_tokens_per_s": TOKENS / seconds,
        "convert_gflops": TOKENS * projector.flops_per_token() / seconds / 1e9,
        "sgemm_gflops": TOKENS * projector.flops_per_token() / bare / 1e9,
        "gemm_fraction": bare / seconds,
        "prefill_tokens_per_s": prefill,
        "convert_vs_prefill": TOKENS / seconds / prefill,
        "put_overhead": overhead,
        "put_overhead_saturated": saturated,
        "kl_linear": report.arm("mapped").kl_mean,
        "kl_issue1520_mlp": report.arm("compare").kl_mean,
    }


def conversion_seconds(conversion: Conversion) -> float:
    """Time to convert TOKENS tokens, pages in and pages out."""
    shape = conversion.source_shape
    count = TOKENS // PAGE
    half = PAGE, shape.layers, shape.heads, shape.dim
    pages = [bytes(pack(torch.randn(half), torch.randn(half))) for _ in range(count)]
    outs = [memoryview(bytearray(conversion.target_bytes)) for _ in range(count)]

    def run() -> None:
        assert conversion.run(pages, range(count), outs) == [None] * count

    return figures.seconds(run, repeats=7)


def product_seconds(projector: LinearProjector) -> float:
    """Time of the bare products on contiguous operands: the machine's own fp32 rate on these shapes.

    The halves of a target layer that read the same layers may go apart or as one wider product; the faster way counts.
    """
    apart = projector.shapes()
    sources = projector.parameters()["sources"]
    halves = list(zip(apart[::2], apart[1::2], strict=True))
    joined = [
        shape
        for (k, v), (reads_k, reads_v) in zip(halves, sources, strict=True)
        for shape in ([(k[0], k[1] + v[1])] if reads_k == reads_v else [k, v])
    ]
    return min(_products_seconds(apart), _products_seconds(joined))


def _products_seconds(shapes: list[tuple[int, int]]) -> float:
    x = {rows: torch.randn(TOKENS, rows) for rows, _ in shapes}
    weights = [torch.randn(rows, columns) for rows, columns in shapes]
    outs = [torch.empty(TOKENS, columns) for _, columns in shapes]

    def run() -> None:
        for w, out in zip(weights, outs, strict=True):
            torch.mm(x[w.shape[0]], w, out=out)

    return figures.seconds(run, repeats=7)


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
        "rules": [{"source": "s", "target": "t", "bundle": str(pair.bundle.resolve())}],
        "page_size": PAGE,
    }
    path.write_bytes(msgspec.yaml.encode(file))
    return path


def bundled() -> Pair:
    name = "moon-large-to-moon-small"
    return Pair(
        "bundled",
        "moon-large",
        "moon-small",
        Path("bundles") / name,
        paths.cache_dir() / "fits" / f"{name}-issue1520",
        lambda pair: fit_bundles.judge_folders(pair.bundle, pair.baseline),
        "make bundles",
    )


def qwen() -> Pair:
    source, target = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
    fits = paths.cache_dir() / "fits"
    name = f"{source}-to-{target}"
    return Pair("qwen", source, target, fits / name, fits / f"{name}-issue1520", judge_on_stdlib, "make fit-qwen")


def library_texts() -> list[str]:
    """`--text` for each module of Python's library that is neither tiny nor huge."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [word for f in files if 6000 < f.stat().st_size < 200000 for word in ("--text", str(f))]


def judge_on_stdlib(pair: Pair) -> Report:
    """`moonpool c2c eval` on files of Python's library that the fit held out."""
    out = Path("build") / "reports" / pair.name
    command = ["-m", "moonpool", "c2c", "eval", "--bundle", str(pair.bundle), "--compare", str(pair.baseline)]
    command += ["--source", pair.source, "--target", pair.target, "--out", str(out)]
    subprocess.run([sys.executable, *command, *library_texts()], check=True)
    return read_report(out / "report.json")


def _missing(pair: Pair) -> str:
    for model in (pair.source, pair.target):
        if not Path(paths.find_model(model)).is_dir():
            return f"no model `{model}` in MOONPOOL_MODELS"
    for bundle in (pair.bundle, pair.baseline):
        if not bundle.is_dir():
            return f"no bundle {bundle}: run `{pair.fitted_by}` first"
    return ""


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
