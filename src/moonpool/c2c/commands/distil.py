"""`moonpool c2c distil`: a bundle's projector trained on through the target model, from text files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool import paths
from moonpool.c2c.commands.common import (
    OTHER_FACTS,
    Folder,
    Held,
    Prefix,
    Seed,
    Storage,
    Stored,
    Texts,
    Tokens,
    Work,
    fact_documents,
    one_line,
    open_console,
    open_stores,
    split_texts,
)
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from moonpool.c2c.commands.common import Pair
    from moonpool.c2c.fitting.distil import Distilled, Lessons
    from moonpool.c2c.fitting.documents import Split

_HELD_FACTS = 4


class Parametrisation(Enum):
    FULL = "full"
    LOWRANK = "lowrank"


class Compute(Enum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@one_line
def distil(
    bundle: Annotated[Path, typer.Option(help="bundle folder to start from")],
    source: Folder,
    target: Folder,
    text: Texts,
    out: Annotated[Path, typer.Option(help="bundle folder to write")],
    chat_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="how much of the texts is taught as conversations, in the target's template"),
    ] = 0.0,
    facts: Annotated[int, typer.Option(min=0, help="fact documents to train on besides the texts")] = 0,
    tokens: Tokens = 24576,
    steps: Annotated[int, typer.Option(min=1)] = 400,
    batch: Annotated[int, typer.Option(min=1, help="lessons of a step, in each process")] = 4,
    at_once: Annotated[int, typer.Option(min=0, help="lessons that go through the target together; 0 = the batch")] = 0,
    continuation: Annotated[int, typer.Option(min=1, max=64, help="tokens that the target is asked about")] = 48,
    learning_rate: Annotated[float, typer.Option(help="in RMS of each tensor, per step")] = 2.5e-4,
    parametrisation: Annotated[
        Parametrisation, typer.Option(help="full: the weights; lowrank: a correction of --rank, merged at the end")
    ] = Parametrisation.FULL,
    rank: Annotated[int, typer.Option(min=1, help="of the correction, for --parametrisation lowrank")] = 32,
    position_weight: Annotated[
        float, typer.Option(min=0, help="the i-th token behind the prefix counts exp(-weight × i); 0 = all alike")
    ] = 0.0,
    native_tokens: Annotated[int, typer.Option(min=1, help="tokens at the start that stay native")] = 16,
    tail: Annotated[int, typer.Option(min=0, help="last tokens of the prefix that the target computes itself")] = 0,
    every: Annotated[int, typer.Option(min=1, help="steps between two looks at the held-out KL")] = 50,
    patience: Annotated[int, typer.Option(min=1, help="looks in a row without a better one that end the training")] = 6,
    compute: Annotated[
        Compute, typer.Option(help="auto: bf16 on a GPU and on a CPU with bf16 matrix units, else fp32")
    ] = Compute.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda")] = "cpu",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="compute activations twice instead of keeping them")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="keeps state and metrics, in a folder for each training [default: <cache>/distil]"),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="steps between two saves besides those at each look; 0 = none")
    ] = 0,
    resume: Annotated[bool, typer.Option(help="go on where the same training was saved last")] = True,
    plot: Annotated[bool, typer.Option("--plot", help="draw metrics.png (needs moonpool[plots])")] = False,
    prefix: Prefix = 448,
    seed: Seed = 0,
    held: Held = 12,
    work: Work = None,
    storage: Stored = Storage.BFLOAT16,
) -> None:
    """Train a bundle's projector on through the frozen target, so that what the target says over the mapped cache is what it
    says over its own.

    Give the --text, --seed, --prefix and --held that fit had. Several GPUs: `torchrun --nproc-per-node 4 --no-python moonpool
    c2c distil …`.
    """
    import torch

    from moonpool.c2c.bundle import open_bundle, write_bundle
    from moonpool.c2c.fitting import distil as training
    from moonpool.c2c.fitting.rounding import for_storage

    console, pair, start = open_console(), open_stores(source, target, work, device), open_bundle(bundle)
    start.check(pair[0].spec, pair[1].spec, (start.manifest.page_sizes or [1])[0])
    parts = split_texts(pair, text, tokens, seed, prefix, held)
    if seen := set(start.manifest.training_data) & set(parts.judged):
        raise ConfigError(
            "the bundle was fitted on texts that are held out here",
            key=str(bundle),
            have=", ".join(sorted(seen)[:3]),
            fix="Give distil the same --text, --seed, --prefix and --held as fit, or other texts.",
        )
    options = training.DistilOptions(
        steps=steps,
        batch=batch,
        at_once=at_once,
        prefix_range=(min(96, prefix // 16 * 16), prefix),
        continuation=continuation,
        tail=tail,
        native_tokens=native_tokens,
        parametrisation=parametrisation.value,
        rank=rank,
        learning_rate=learning_rate,
        position_weight=position_weight,
        every=every,
        checkpoint_every=checkpoint_every,
        resume=resume,
        patience=patience,
        seed=seed,
        device=device,
        compute=compute.value,
        checkpointing=gradient_checkpointing,
        plot=plot,
    )
    lessons = _lessons(pair, parts, prefix, facts, chat_share, seed)
    kept = folder or paths.cache_dir() / "distil"
    found = training.distil(start.projector(), *pair, lessons, options, console, kept)
    if not found.writes:
        return
    data = list(
        dict.fromkeys([*start.manifest.training_data, *parts.fitted, *([f"{facts} fact documents"] if facts else [])])
    )
    made = (
        f"moonpool c2c distil --bundle {start.digest} --seed {seed} --tokens {tokens} --steps {steps} --batch {batch}"
    )
    made += f" --facts {facts} --chat-share {chat_share} --learning-rate {learning_rate:g} --parametrisation {parametrisation.value}"
    dtype = getattr(torch, storage.value)
    written = write_bundle(
        out,
        for_storage(found.projector, pair[0], parts.train, dtype),
        pair[0].spec,
        pair[1].spec,
        dtype=dtype,
        training_data=data,
        created_by=made,
        page_sizes=start.manifest.page_sizes,
    )
    console.print(_summary(found))
    console.print(f"{out}: bundle {written.digest}; state and metrics in {found.folder}")


def _lessons(pair: Pair, parts: Split, prefix: int, facts: int, chat_share: float, seed: int) -> Lessons:
    """By kind: text is cut anywhere in training, and at `prefix` where it judges; facts are always asked where they end."""
    from moonpool.c2c.fitting.distil import Lesson, Lessons

    train, held = dict[str, list[Lesson]](), dict[str, list[Lesson]]()
    taught, judged = (_kinds(pair, d, chat_share) for d in (parts.train, parts.choose))
    for kind in taught:
        train[kind] = [Lesson(d) for d in taught[kind]]
        held[kind] = [Lesson(d, prefix) for d in judged[kind]]
    if facts:
        train["facts"], held["facts"] = (
            [Lesson(f.told(), prefix) for f in fact_documents(pair, prefix, count, seed + i * OTHER_FACTS)]
            for i, count in ((1, facts), (2, _HELD_FACTS))
        )
    return Lessons(train, held)


def _kinds(pair: Pair, documents: list[Tensor], chat_share: float) -> dict[str, list[Tensor]]:
    """The documents as text and as chat; a kind that has a share has at least one."""
    from moonpool.c2c.fitting.capture import load_tokenizer
    from moonpool.c2c.fitting.distil_chats import chats

    if not chat_share:
        return {"text": documents}
    count = max(1, round(chat_share * len(documents)))
    talked = {"chat": chats(documents[:count], load_tokenizer(pair[1].folder))}
    return talked if chat_share == 1 else {"text": documents[count:] or documents[-1:], **talked}


def _summary(found: Distilled) -> str:
    kinds = ", ".join(f"{k} {v:.4f}" for k, v in found.held.items())
    ended = f"; ended early: {found.ended}" if found.ended else ""
    return f"distilled: held-out KL {found.kl_before:.4f} → {found.kl_after:.4f} ({kinds}) at step {found.steps}{ended}"
