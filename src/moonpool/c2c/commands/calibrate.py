"""`moonpool c2c calibrate`: measure this machine for a pair, so that rules can be decided by cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.c2c.commands.common import Folder, one_line
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.c2c.calibration import Calibration, Tier
    from moonpool.c2c.signature import ModelSpec

_POOL_BYTES = 64 << 20


@one_line
def calibrate(
    source: Folder,
    target: Folder,
    bundle: Annotated[list[Path] | None, typer.Option(help="bundle folder whose conversion is timed; repeat")] = None,
    page_size: Annotated[int, typer.Option(min=1)] = 16,
    device: Annotated[str, typer.Option(help="where the target runs: cpu, or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="torch threads [default: torch's own choice]")] = 0,
    tier: Annotated[str, typer.Option(help="where pages come from in practice: memory, disk, or network")] = "memory",
    network: Annotated[
        str, typer.Option(help="the pool's network: 100gbe, pcie4, 400g, or GB/s as a number")
    ] = "100gbe",
    min_tokens: Annotated[
        int | None, typer.Option(min=0, help="never take fewer tokens converted [default: 64, on a GPU 512]")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure prefill, conversion and reading for a pair on this machine (seconds), and keep it for engine and converter."""
    import msgspec

    from moonpool import paths
    from moonpool.c2c.calibration import save_calibration
    from moonpool.c2c.signature import check_pair, load_spec

    if tier not in ("memory", "disk", "network"):
        raise ConfigError("unknown tier", need="memory, disk or network", have=tier)
    rate = _network(network)
    pair = load_spec(paths.find_model(source)), load_spec(paths.find_model(target))
    check_pair(*pair)
    found = _measure(pair, paths.find_model(target), bundle or [], page_size, device, threads)
    fetch = {**found.fetch, "network": rate}
    found = msgspec.structs.replace(
        found, fetch=fetch, tier=tier, min_tokens=_floor(device) if min_tokens is None else min_tokens
    )
    path = save_calibration(found, *pair)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
        return
    _show(found)
    typer.echo(f"kept in {path}; see `moonpool c2c advise --source {source} --target {target} --hardware this`")


def _measure(
    pair: tuple[ModelSpec, ModelSpec], target: str, bundles: list[Path], page_size: int, device: str, threads: int
) -> Calibration:
    import torch

    from moonpool import paths
    from moonpool.c2c import calibrate as measured
    from moonpool.c2c.bundle import open_bundle
    from moonpool.c2c.calibration import Calibration
    from moonpool.store.embedded import EmbeddedPool

    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError("no such device here", need="cpu, or cuda where torch has it", have=device)
    place = torch.device(device)
    if threads:
        torch.set_num_threads(threads)
    opened = [open_bundle(b) for b in bundles]
    paths.cache_dir().mkdir(parents=True, exist_ok=True)
    with EmbeddedPool(_POOL_BYTES) as pool:
        memory, overhead = measured.measure_memory(pool, pair[1], page_size, place)
    fetch: dict[Tier, float] = {"memory": memory, "disk": measured.measure_disk(paths.cache_dir())}
    return Calibration(
        source=pair[0].name,
        target=pair[1].name,
        device=device,
        threads=torch.get_num_threads(),
        prefill=measured.measure_prefill(target, pair[1], place),
        gemm=measured.measure_gemm(*pair),
        fetch=fetch,
        overhead_s=overhead,
        convert_s={b.digest: measured.measure_convert(b, *pair, page_size) for b in opened},
    )


def _floor(device: str) -> int:
    return 64 if device == "cpu" else 512


def _network(given: str) -> float:
    """Bytes/s of a named network, or of a number in GB/s. Raises ConfigError."""
    from moonpool.c2c.cost import NETWORKS

    if given in NETWORKS:
        return NETWORKS[given]
    try:
        rate = float(given) * 1e9
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e15:
        raise ConfigError("no such network", need=f"{', '.join(NETWORKS)}, or GB/s", have=given)
    return rate


def _show(found: Calibration) -> None:
    typer.echo(f"{found.source} → {found.target} on {found.device}, {found.threads} threads")
    typer.echo(f"prefill {found.prefill / 1e9:.1f} GFLOP/s, products {found.gemm / 1e9:.1f} GFLOP/s")
    typer.echo("read " + ", ".join(f"{t} {r / 1e9:.2f} GB/s" for t, r in found.fetch.items()))
    typer.echo(f"overhead {found.overhead_s * 1e3:.2f} ms per request")
    for name, seconds in found.convert_s.items():
        typer.echo(f"bundle {name[:12]}: {seconds * 1e6:.1f} µs per token")
