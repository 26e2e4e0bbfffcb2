"""Text files → token documents for fitting and judging, split by file and never by token.

Two pieces of one file share names and phrasing, so a projector that saw one of them is not tested by the other.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.errors import ConfigError

_MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """A file's content; `label` names it in manifests and reports: file name and the start of its sha256."""

    label: str
    content: str


@dataclass(frozen=True, slots=True)
class Split:
    """Documents (`[length]` int64 each) for fitting, for choosing hyper-parameters, and for the report."""

    train: list[Tensor]
    choose: list[Tensor]
    report: list[Tensor]
    fitted: list[str]
    """Labels of the texts that train or choose."""
    judged: list[str]
    """Labels of the texts of the report."""


def read_texts(files: Sequence[Path]) -> list[Text]:
    """Contents as text. Raises ConfigError for a file that cannot be read or is no UTF-8 text."""
    texts = []
    for path in files:
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError("text file too large", key=str(path), need=f"<= {_MAX_FILE_BYTES} B")
            raw = path.read_bytes()
            texts.append(Text(f"{path.name} {hashlib.sha256(raw).hexdigest()[:12]}", raw.decode("utf-8")))
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read the text: {e}", key=str(path)) from e
    return texts


def windows(text: str, tokenizer: Any, length: int, rng: random.Random, most: int = 64) -> list[Tensor]:
    """Up to `most` windows of `length` tokens at random places that do not overlap, in order; none in a short text."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    places = len(ids) // length
    if places == 0:
        return []
    offset = rng.randint(0, len(ids) - places * length)
    chosen = sorted(rng.sample(range(places), min(most, places)))
    return [ids[offset + p * length : offset + (p + 1) * length] for p in chosen]


def split(
    texts: Sequence[Text], tokenizer: Any, *, length: int, train_tokens: int, choose: int, report: int, seed: int
) -> Split:
    """Shuffled files: one window each of the first for the report, of the next for choosing, the rest for training.

    Training takes a second window of a file only when every file has given one. The report's documents depend on texts, seed
    and length alone. Raises ConfigError if the texts do not suffice.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)
    rng = random.Random(seed)
    usable = [(t.label, w) for t in order if (w := windows(t.content, tokenizer, length, rng))]
    held = choose + report
    if len(usable) <= held:
        raise ConfigError(
            "too little text",
            need=f"{held + 1} files of at least {length} tokens",
            have=str(len(usable)),
            fix="Give more --text files, or fewer held-out documents.",
        )
    rest = usable[held:]
    turns = [(label, w[i]) for i in range(max(len(w) for _, w in rest)) for label, w in rest if i < len(w)]
    train = turns[: max(1, train_tokens // length)]
    return Split(
        train=[w for _, w in train],
        choose=[w[0] for _, w in usable[report:held]],
        report=[w[0] for _, w in usable[:report]],
        fitted=sorted({label for label, _ in [*train, *usable[report:held]]}),
        judged=[label for label, _ in usable[:report]],
    )
