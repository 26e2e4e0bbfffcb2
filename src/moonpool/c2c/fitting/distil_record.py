"""What a training leaves in its folder.

state.safetensors    parameters now and at their best, the optimiser's moments; the rest of the state as JSON in its header
metrics.csv          a line for each step
metrics.png          the same as curves (with moonpool[plots])
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moonpool.errors import ConversionError
from moonpool.plotting import plotting

STATE, METRICS, CURVES = "state.safetensors", "metrics.csv", "metrics.png"
_BEST = "best."


class Progress(msgspec.Struct, kw_only=True):
    """Where a training stands."""

    step: int = 0
    before: float
    """Held-out KL of the projector that came in."""
    best: float
    best_step: int = 0
    held: dict[str, float] = {}
    """Held-out KL of each kind at the best step."""
    seconds: float = 0.0
    ended: str = ""
    """Why it ended before its last step; empty while it goes on."""


class Record:
    """The folder of one training. Nothing is written by a process that is not the first."""

    def __init__(self, folder: Path, kinds: list[str], *, writes: bool) -> None:
        self.folder, self._kinds, self._writes = folder, kinds, writes
        if writes:
            folder.mkdir(parents=True, exist_ok=True)

    def save(self, progress: Progress, best: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Whole or not at all. `best`: parameters; `now`: parameters and moments."""
        if not self._writes:
            return
        tensors = {n: t.detach().cpu().contiguous() for n, t in now.items()}
        tensors |= {_BEST + n: t.cpu().contiguous() for n, t in best.items()}
        temporary = self.folder / f"{STATE}.tmp"
        save_file(tensors, temporary, {"progress": msgspec.json.encode(progress).decode()})
        temporary.replace(self.folder / STATE)

    def load(self) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor]] | None:
        """(progress, best, now) as saved last; None where nothing is. Raises ConversionError for a file that is no state."""
        path = self.folder / STATE
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as f:
                tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118  # not a dict
                progress = msgspec.json.decode(f.metadata()["progress"], type=Progress)
        except (SafetensorError, KeyError, TypeError, msgspec.DecodeError) as e:
            raise ConversionError(
                f"unreadable state: {e}", key=str(path), fix="Delete the folder and begin anew."
            ) from e
        best = {n.removeprefix(_BEST): t for n, t in tensors.items() if n.startswith(_BEST)}
        return progress, best, {n: t for n, t in tensors.items() if not n.startswith(_BEST)}

    @property
    def columns(self) -> list[str]:
        return ["step", "learning_rate", "train_kl", "held_kl", *(f"held_{k}" for k in self._kinds), "seconds"]

    def rewind(self, step: int) -> None:
        """Lines of later steps, which a resumed training makes again, are dropped."""
        if not self._writes:
            return
        kept = [r for r in self.rows() if int(r["step"]) <= step] if step else []
        with (self.folder / METRICS).open("w", newline="") as f:
            writer = csv.DictWriter(f, self.columns)
            writer.writeheader()
            writer.writerows(kept)

    def line(self, values: Mapping[str, Any]) -> None:
        """One step; what was not measured stays empty."""
        if self._writes:
            with (self.folder / METRICS).open("a", newline="") as f:
                csv.DictWriter(f, self.columns).writerow(values)

    def rows(self) -> list[dict[str, str]]:
        path = self.folder / METRICS
        if not path.is_file():
            return []
        with path.open(newline="") as f:
            return list(csv.DictReader(f))

    def plot(self) -> None:
        """The curves of metrics.csv. Raises ConfigError where matplotlib is missing."""
        if not self._writes:
            return
        plt = plotting()
        rows = self.rows()
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        axes.plot(*_curve(rows, "train_kl"), color="0.75", linewidth=0.8, label="training")
        for kind in self._kinds:
            axes.plot(*_curve(rows, f"held_{kind}"), marker="o", markersize=3, linewidth=1, label=f"held out, {kind}")
        axes.plot(*_curve(rows, "held_kl"), color="black", linewidth=1.6, label="held out, mean")
        axes.set(xlabel="step", ylabel="KL(native ‖ mapped), nats per token", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(self.folder / CURVES, dpi=130)
        plt.close(figure)


def _curve(rows: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    found = [(int(r["step"]), float(r[column])) for r in rows if r[column]]
    return [s for s, _ in found], [v for _, v in found]


def optimiser_tensors(adam: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """Moments and step counts by parameter name (`adam.<name>.<what>`)."""
    state = adam.state_dict()["state"]
    return {f"adam.{names[i]}.{what}": t for i, held in state.items() for what, t in held.items()}


def restore_optimiser(adam: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `optimiser_tensors`; rates and the like stay the optimiser's own."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("adam."):
            name, what = key.removeprefix("adam.").rsplit(".", 1)
            state.setdefault(names.index(name), {})[what] = tensor
    adam.load_state_dict({"state": state, "param_groups": adam.state_dict()["param_groups"]})
