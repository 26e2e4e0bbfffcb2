"""`moonpool c2c`: make a projector bundle, judge it, see what it does. Heavy imports stay inside the functions: the CLI
starts fast."""

from __future__ import annotations

import typer

from moonpool.c2c.commands.advise import advise
from moonpool.c2c.commands.calibrate import calibrate
from moonpool.c2c.commands.distil import distil
from moonpool.c2c.commands.evaluate import evaluate
from moonpool.c2c.commands.fit import fit
from moonpool.c2c.commands.importing import import_checkpoint
from moonpool.c2c.commands.proving import prove_alias

app = typer.Typer(help="Cross-model KV: fit a projector bundle, and judge one.", no_args_is_help=True)
app.command()(fit)
app.command()(distil)
app.command("eval")(evaluate)
app.command()(advise)
app.command()(calibrate)
app.command("import")(import_checkpoint)
app.command()(prove_alias)
