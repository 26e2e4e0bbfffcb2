"""`moonpool c2c prove-alias`: the check that an alias rule needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool.c2c.commands.common import Folder, one_line


@one_line
def prove_alias(
    source: Folder,
    target: Folder,
    out: Annotated[Path, typer.Option(help="proof file to write")],
    tokens: Annotated[int, typer.Option(min=1, help="sample tokens that both models are run over")] = 192,
    seed: Annotated[int, typer.Option(help="of the sample tokens")] = 0,
) -> None:
    """Prove that two models give the same KV, and write the proof that an alias rule names."""
    import msgspec

    from moonpool import paths
    from moonpool.c2c.prove import prove

    found = prove(Path(paths.find_model(source)), Path(paths.find_model(target)), tokens=tokens, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    limits = "; ".join(f"up to tokens {', '.join(map(str, u))}" for u in found.until)
    typer.echo(
        f"{out}: {found.tensors} weights equal, KV of {found.tokens} tokens equal bit for bit{f' ({limits})' if limits else ''}"
    )
