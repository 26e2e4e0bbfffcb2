"""What the `moonpool c2c` commands share: options, the pair of models, documents from text files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool import paths
from moonpool.errors import MoonpoolError

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import Tensor

    from moonpool.c2c.fitting.capture import CaptureStore
    from moonpool.c2c.fitting.documents import Split
    from moonpool.c2c.fitting.facts import FactDocument

    Pair = tuple[CaptureStore, CaptureStore]

Folder = Annotated[str, typer.Option(help="model folder, or its name under MOONPOOL_MODELS")]
Texts = Annotated[
    list[Path], typer.Option("--text", help="text file; repeat, or give a folder of .txt, .md and .py files")
]
Work = Annotated[Path | None, typer.Option(help="folder that keeps KV captures [default: <cache>/captures]")]
Tokens = Annotated[int, typer.Option(min=1024, help="tokens to fit on")]
Held = Annotated[int, typer.Option(min=2, help="held-out documents")]
Prefix = Annotated[int, typer.Option(min=32, help="tokens of prefix in a held-out document")]
Seed = Annotated[int, typer.Option(help="decides which files are held out; give fit's seed to eval")]


class Storage(Enum):
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


Stored = Annotated[
    Storage,
    typer.Option("--storage", help="how the bundle holds weights; int8 halves its size and loses about 1 % of them"),
]
CONTINUATION = 63
_CHOOSE = 6
OTHER_FACTS = 1 << 20
"""Added to the seed: fit's fact documents are never eval's."""
_SUFFIXES = (".txt", ".md", ".py", ".rst")


def one_line(command: Callable[..., None]) -> Callable[..., None]:
    """A MoonpoolError becomes one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MoonpoolError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(2) from e

    return run


def open_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def text_files(text: list[Path]) -> list[Path]:
    """Files as given; a folder stands for the text files in it."""
    return [f for p in text for f in (sorted(c for c in p.iterdir() if c.suffix in _SUFFIXES) if p.is_dir() else [p])]


def open_stores(
    source: str, target: str, work: Path | None, device: str = "cpu", dtype: torch.dtype | None = None
) -> Pair:
    """Captures of both models, which run on `device` and in `dtype` (fp32 if not given) where a document is missing. Raises
    ConversionRefused if they do not share a tokenizer."""
    from torch import float32

    from moonpool.c2c.fitting.capture import CaptureStore
    from moonpool.c2c.signature import check_pair

    folder = work or paths.cache_dir() / "captures"
    folders = paths.find_model(source), paths.find_model(target)
    one, two = (CaptureStore(folder, f, dtype or float32, device) for f in folders)
    check_pair(one.spec, two.spec)
    return one, two


def split_texts(pair: Pair, text: list[Path], tokens: int, seed: int, prefix: int, held: int) -> Split:
    from moonpool.c2c.fitting.capture import load_tokenizer
    from moonpool.c2c.fitting.documents import read_texts, split

    length = prefix + CONTINUATION + 1
    texts = read_texts(text_files(text))
    tokenizer = load_tokenizer(pair[1].folder)
    return split(texts, tokenizer, length=length, train_tokens=tokens, choose=_CHOOSE, report=held, seed=seed)


def long_documents(pair: Pair, text: list[Path], judged: set[str], length: int, count: int, seed: int) -> list[Tensor]:
    """One window of `length` tokens each of up to `count` held-out texts that are long enough."""
    import random

    from moonpool.c2c.fitting.capture import load_tokenizer
    from moonpool.c2c.fitting.documents import read_texts, windows

    tokenizer, rng = load_tokenizer(pair[1].folder), random.Random(seed)
    found: list[Tensor] = []
    for one in read_texts(text_files(text)):
        if one.label in judged and len(found) < count:
            found += windows(one.content, tokenizer, length, rng, most=1)
    return found


def fact_documents(
    pair: Pair, prefix: int, count: int, seed: int, page_size: int = 16, form: str = "lines"
) -> list[FactDocument]:
    """Fact documents of `prefix` tokens, the first page and the end free of facts."""
    from moonpool.c2c.fitting.capture import load_tokenizer
    from moonpool.c2c.fitting.facts import FactWriter
    from moonpool.c2c.fitting.facts_forms import FORMS

    writer = FactWriter(load_tokenizer(pair[1].folder), seed=seed, form=FORMS[form])
    lines = max(2, min(12, prefix // 32))
    return [writer.document(prefix, facts=lines, margin=max(16, page_size)) for _ in range(count)]
