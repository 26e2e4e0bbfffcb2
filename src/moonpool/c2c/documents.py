"""Text files → token documents for fitting and judging, split by file and never by token.

Two pieces of one file share names and phrasing, so a projector that saw one of them is not tested by the other.
"""

from __future__ import annotations

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
class Split:
    """Documents (`[length]` int64 each) for fitting, for choosing hyper-parameters, and for the report."""

    train: list[Tensor]
    choose: list[Tensor]
    report: list[Tensor]


def read_texts(files: Sequence[Path]) -> list[str]:
    """Contents as text. Raises ConfigError for a file that cannot be read or is no UTF-8 text."""
    texts = []
    for path in files:
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise ConfigError("text file too large", key=str(path), need=f"<= {_MAX_FILE_BYTES} B")
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read the text: {e}", key=str(path)) from e
    return texts


def windows(texts: Sequence[str], tokenizer: Any, length: int, seed: int, per_text: int = 1) -> list[list[Tensor]]:
    """For each text that is long enough, up to `per_text` windows of `length` tokens at seeded places that do not overlap."""
    rng = random.Random(seed)
    found = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
        places = len(ids) // length
        if places == 0:
            continue
        slack = len(ids) - places * length
        offset = rng.randint(0, slack)
        chosen = sorted(rng.sample(range(places), min(per_text, places)))
        found.append([ids[offset + p * length : offset + (p + 1) * length] for p in chosen])
    return found


def split(
    texts: Sequence[str], tokenizer: Any, *, length: int, train_tokens: int, choose: int, report: int, seed: int
) -> Split:
    """Shuffled files, first the report's documents (one a file), then the choosing ones, the rest for training.

    Training takes several windows of a file only if there are too few files. Raises ConfigError if the texts do not suffice.
    """
    rng = random.Random(seed)
    order = list(texts)
    rng.shuffle(order)
    per_file = windows(order, tokenizer, length, seed, per_text=64)
    need = max(1, train_tokens // length)
    held = choose + report
    rest = per_file[held:]
    if sum(map(len, rest)) < min(need, 1) or len(per_file) <= held:
        raise ConfigError(
            "too little text",
            need=f"{held + 1} files of at least {length} tokens",
            have=str(len(per_file)),
            fix="Give more --text files, or fewer held-out documents.",
        )
    rounds = [w for i in range(64) for f in rest if i < len(f) for w in (f[i],)]
    return Split(rounds[:need], [f[0] for f in per_file[report:held]], [f[0] for f in per_file[:report]])
