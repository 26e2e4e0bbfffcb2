"""`moonpool c2c advise`: what conversion costs and saves for a pair, from both models' `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.c2c.commands.common import one_line
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from moonpool.c2c.bundle import Bundle
    from moonpool.c2c.cost_table import Advice, Place
    from moonpool.c2c.signature import ModelSpec

Model = Annotated[str, typer.Option(help="model folder, its name under MOONPOOL_MODELS, a config.json, or a hub name")]
THIS = "this"
_WIDTH = 96
"""Of the table of times; a narrower terminal folds its lines rather than lose figures."""


@one_line
def advise(
    source: Model,
    target: Model,
    hardware: Annotated[
        list[str] | None,
        typer.Option(help="big-gpu, small-gpu, cpu-amx, cpu, or this (calibrated); repeat [default: the first four]"),
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="100gbe, pcie4, 400g; repeat [default: 100gbe and 400g]")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="time this bundle's own map")] = None,
    context: Annotated[int, typer.Option(min=1, help="tokens of prompt that the times are for")] = 4096,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print what computing, converting and fetching cost for a pair, and whether conversion pays. No weights are needed."""
    import msgspec
    from rich.console import Console

    from moonpool import paths
    from moonpool.c2c.bundle import open_bundle
    from moonpool.c2c.cost_table import advise as table
    from moonpool.c2c.signature import load_shape, load_spec

    wanted = hardware or []
    read = load_spec if THIS in wanted else load_shape
    pair = read(paths.find_model(source)), read(paths.find_model(target))
    opened = open_bundle(bundle) if bundle else None
    places = _places(wanted, network or [], pair, opened.digest if opened else "")
    flops = _flops(opened, pair) if opened else None
    found = table(*pair, places, context=context, bundle_flops=flops)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _show(found, Console(width=max(_WIDTH, Console().width)))


def _places(hardware: list[str], network: list[str], pair: tuple[ModelSpec, ModelSpec], digest: str) -> list[Place]:
    from moonpool.c2c.cost import HARDWARE, NETWORKS, profile

    hardware, network = hardware or list(HARDWARE), network or ["100gbe", "400g"]
    for given, known in ((hardware, (*HARDWARE, THIS)), (network, tuple(NETWORKS))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"unknown `{unknown[0]}`", have=", ".join(known))
    found: list[Place] = [(h, n, profile(h, n), {}) for h in hardware if h != THIS for n in network]
    return [*found, *([_this(pair, digest)] if THIS in hardware else [])]


def _flops(bundle: Bundle, pair: tuple[ModelSpec, ModelSpec]) -> float:
    """Raises ConfigError for a bundle of other shapes; whether it is of these very weights does not matter to its cost."""
    projector = bundle.projector()
    for role, need, spec in zip(
        ("source", "target"), (projector.source_shape, projector.target_shape), pair, strict=True
    ):
        shape = spec.page_shape(1)
        if need != (shape.layers, shape.width):
            have = f"{shape.layers} layers of {shape.width}"
            raise ConfigError(
                f"the bundle is for another {role}", key=spec.name, need=f"{need[0]} layers of {need[1]}", have=have
            )
    return projector.flops_per_token()


def _this(pair: tuple[ModelSpec, ModelSpec], digest: str) -> Place:
    from moonpool.c2c.calibration import find_calibration
    from moonpool.c2c.cost_table import BUNDLE

    found = find_calibration(*pair)
    if found is None:
        fix = "Run `moonpool c2c calibrate` with this source and target first."
        raise ConfigError("this machine is not calibrated for the pair", key=" → ".join(s.name for s in pair), fix=fix)
    measured = {BUNDLE: found.convert_s[digest]} if digest in found.convert_s else {}
    return THIS, found.tier, found.machine(), measured


def _show(found: Advice, console: Console) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    console.print(f"{found.source} → {found.target}", style="bold", highlight=False)
    console.print(
        f"KV per token {found.source_kv_bytes} B → {found.target_kv_bytes} B; "
        f"the target computes with {found.target_parameters / 1e6:.1f} M parameters",
        highlight=False,
    )
    unit, scale = ("G", 1e9) if found.prefill_flops[0] >= 1e8 else ("M", 1e6)
    at = [f"at {c >> 10} K" for c in found.contexts]
    work = Table(title=f"{unit}FLOP per token, and share of the target's own prefill", box=SIMPLE)
    for name in ("map", f"{unit}FLOP", "bf16 MiB", *at):
        work.add_column(name, justify="left" if name == "map" else "right")
    work.add_row("prefill", "", "", *(_sized(f / scale) for f in found.prefill_flops))
    for row in found.work:
        shares = [share(s) for s in row.shares]
        work.add_row(row.variant, f"{row.flops / scale:.3f}", _sized(row.flops / (1 << 20)), *shares)
    console.print(work)
    title = f"µs per token at {found.context} tokens; (b) prefill/target, (a) prefill/(source+convert)"
    times = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("where", "map", "prefill", "convert", "source", "target", "(b)", "(a)", "L_min", "pays"):
        times.add_column(name, justify="left" if name in ("where", "map", "pays") else "right", no_wrap=True)
    for t in found.times:
        micro = [_sized(v) for v in (t.prefill_us, t.convert_us, t.fetch_source_us, t.fetch_target_us)]
        speed = [_sized(v) for v in (t.speedup_ahead, t.speedup_on_load)]
        least = "-" if t.least_tokens is None else str(t.least_tokens)
        times.add_row(f"{t.hardware} {t.network}", t.variant, *micro, *speed, least, t.verdict)
    console.print(times)
    for note in found.notes:
        console.print(note, highlight=False)


def share(value: float) -> str:
    """0.059 → 5.9%, 0.47 → 47%."""
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def _sized(value: float) -> str:
    """Two or three figures, never an exponent."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
