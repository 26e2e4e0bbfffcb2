"""Measures what a `Calibration` holds, on this machine, in seconds: prefill, products, a bundle's conversion, reading pages.

Each figure is the best of a few rounds: what the machine can do, not what it did while something else ran.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moonpool.c2c.bundle import Bundle
from moonpool.c2c.convert import Conversion
from moonpool.c2c.cost import span_flops
from moonpool.c2c.pages import pack, unpack
from moonpool.c2c.signature import ModelSpec
from moonpool.errors import ModelError
from moonpool.store.base import KVPool

PREFILL_TOKENS = 512
_CONVERT_TOKENS = 1024
_LAYERS_READ = 4
_WEIGHTS_AT_ONCE = 8
"""Distinct weights that the products go through: more than a cache holds, less than memory."""
_BUDGET_S = 1.0
_DISK_BYTES = 32 << 20
_POOL_BYTES = 32 << 20


def _best(step: Callable[[], None], rounds: int = 5) -> float:
    """Seconds of the fastest round; fewer rounds where one takes long. The first, which warms up, does not count."""
    step()
    seconds: list[float] = []
    while len(seconds) < rounds and sum(seconds) < _BUDGET_S:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@torch.inference_mode()
def measure_prefill(folder: str, spec: ModelSpec, device: torch.device) -> float:
    """FLOP/s of the target's prefill, in the type that the engine computes in: fp32 on a CPU, else bf16. Raises ModelError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).base_model
    except (OSError, ValueError, RuntimeError) as e:
        raise ModelError(f"cannot load the model: {e}", key=folder) from e
    model.to(device).eval()
    length = min(PREFILL_TOKENS, spec.max_positions)
    tokens = torch.randint(0, spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

    def prefill() -> None:
        model(input_ids=tokens, use_cache=True)
        _wait_for(device)

    return span_flops(spec, 0, length) / _best(prefill)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure_gemm(source: ModelSpec, target: ModelSpec) -> float:
    """FLOP/s on the CPU, where conversion runs, of fp32 products of the default variant's shapes:
    tokens × (4 source layers) by (4 source layers) × target."""
    rows, width = _LAYERS_READ * source.page_shape(1).width, target.page_shape(1).width
    x, y = torch.randn(_CONVERT_TOKENS, rows), torch.empty(_CONVERT_TOKENS, width)
    weights = [torch.randn(rows, width) for _ in range(_WEIGHTS_AT_ONCE)]

    def multiply() -> None:
        for w in weights:
            torch.mm(x, w, out=y)

    return 2 * _CONVERT_TOKENS * rows * width * len(weights) / _best(multiply)


def measure_convert(bundle: Bundle, source: ModelSpec, target: ModelSpec, page_size: int) -> float:
    """Seconds per token of whole conversions, pages in and pages out. Raises ConversionRefused for another pair's bundle."""
    bundle.check(source, target, page_size)
    conversion = Conversion(bundle.projector(), source, target, page_size)
    count = max(1, _CONVERT_TOKENS // page_size)
    pages, indices = [memoryview(_page(source, page_size))] * count, list(range(1, count + 1))
    outs = [memoryview(bytearray(conversion.target_bytes)) for _ in range(count)]

    def convert() -> None:
        conversion.run(pages, indices, outs)

    return _best(convert) / (count * page_size)


def measure_memory(pool: KVPool, target: ModelSpec, page_size: int, device: torch.device) -> tuple[float, float]:
    """(bytes/s from the pool's memory into a cache on `device`, seconds that a request's first page costs beyond its bytes)."""
    page = bytes(_page(target, page_size))
    count = max(1, min(128, _POOL_BYTES // len(page) // 2))
    keys = target.identity(page_size, salt="calibration").page_keys(range(count * page_size))
    pool.batch_put([k.text for k in keys], [page] * count)
    shape = target.page_shape(page_size)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cache = torch.zeros(2, shape.layers, shape.heads, count * page_size, shape.dim, dtype=dtype, device=device)

    def read(pages: int) -> None:
        with pool.open_read([m.key for m in pool.lookup(keys[:pages]) if m]) as lease:
            for i, view in enumerate(lease.views):
                if view is not None:
                    k, v = unpack(view, shape)
                    at = slice(i * page_size, (i + 1) * page_size)
                    cache[0, :, :, at] = k.permute(1, 2, 0, 3)
                    cache[1, :, :, at] = v.permute(1, 2, 0, 3)
                    del k, v  # no tensor may outlive the lease
            _wait_for(device)

    many, one = _best(lambda: read(count)), _best(lambda: read(1), rounds=20)
    pool.batch_remove([k.text for k in keys])
    rate = count * len(page) / many
    return rate, max(0.0, one - len(page) / rate)


def measure_disk(folder: Path) -> float:
    """Bytes/s of reading a file that the page cache does not hold."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            at = 0
            while part := os.pread(file.fileno(), 1 << 20, at):
                at += len(part)

        return _DISK_BYTES / _best(read, rounds=3)


def _page(spec: ModelSpec, page_size: int) -> bytearray:
    shape = spec.page_shape(page_size)
    half = torch.randn(shape.tokens, shape.layers, shape.heads, shape.dim, generator=torch.Generator().manual_seed(1))
    return pack(half, half)
