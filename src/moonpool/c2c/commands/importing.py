"""`moonpool c2c import`: a published C2C checkpoint becomes a bundle for rules of mode `fuse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool.c2c.commands.common import Folder, one_line, open_console


@one_line
def import_checkpoint(
    folder: Annotated[Path, typer.Argument(help="published folder: projector_{i}.json/.pt, projector_config.json")],
    source: Folder,
    target: Folder,
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
) -> None:
    """Convert a published C2C checkpoint once to safetensors, as a bundle of kind `fuse`."""
    from moonpool import paths
    from moonpool.c2c.bundle import write_bundle
    from moonpool.c2c.official import read_checkpoint
    from moonpool.c2c.signature import load_spec

    console = open_console()
    pair = load_spec(paths.find_model(source)), load_spec(paths.find_model(target))
    found = read_checkpoint(folder, *pair)
    bundle = write_bundle(
        out, found.fuser, *pair, dtype=found.dtype, created_by=f"moonpool c2c import of {folder.resolve().name}"
    )
    if pair[0].tokenizer != pair[1].tokenizer:
        found.notes.append(
            "the models' tokenizers differ, so their pages cover different tokens: rules will refuse this bundle"
        )
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    gates = len(found.fuser.steps())
    console.print(
        f"{out}: bundle {bundle.digest}, {gates} of {2 * found.fuser.shape.target_layers} gates open, "
        f"{found.fuser.flops_per_token() / 1e9:.3f} GFLOP per token",
        highlight=False,
        soft_wrap=True,
    )
