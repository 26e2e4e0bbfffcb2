"""The main job, shown and measured: one model's prefill answers another model's requests.

    1  the target answers without the pool's help (cold), then again from its own pages (native)
    2  its pages are removed; the source prefills the same documents; the converter makes the target's pages from them
    3  the target answers from converted pages
    4  controls: pages of a twin document with other facts; no document at all

Every request goes through the same instances, pool and converter that `moonpool up` serves with.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from moonpool import paths
from moonpool.c2c.config import C2CFile, ModelEntry, RuleEntry, resolve
from moonpool.c2c.converter import ConverterStats
from moonpool.c2c.fitting.facts import FactDocument, FactWriter
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.errors import ConversionError
from moonpool.system import System

FIGURES = Path("build/figures/demo.json")
_QUESTIONS = 8
_FACTS = 12
_CONVERT_WAIT_S = 120.0
_TAIL = 24
"""Trailing prompt positions whose predictions are compared: computed, never loaded, so they read the cache under test."""


@dataclass(frozen=True)
class Figures:
    """One pair's run, flat, as `build/figures/demo.json` holds it. Times in seconds; recall and top1 in 0..1."""

    pair: str
    prompt_tokens: int
    native_tokens: int
    converted_tokens: int
    ttft_cold_s: float
    ttft_native_s: float
    ttft_converted_s: float
    kl: float
    top1: float
    recall_native: float
    recall_converted: float
    recall_wrong_document: float
    recall_no_document: float


class Arm(NamedTuple):
    """The target's answers under one condition."""

    first: GenerateResult
    """The first question of the first document: the one that is timed."""
    answers: list[str]
    recall: float
    logits: list[Tensor]
    """`[_TAIL, vocab]` per question."""


def run_demo(source: str, target: str, bundle: Path | None, *, tokens: int, documents: int) -> Figures:
    """Run the demo for one pair and print what it found. Raises ConfigError, ModelError, ConversionError."""
    console = Console(width=120)
    started = time.monotonic()
    refs = paths.find_model(source), paths.find_model(target)
    names = Path(refs[0]).name, Path(refs[1]).name
    file = C2CFile(
        models={names[0]: ModelEntry(refs[0]), names[1]: ModelEntry(refs[1])},
        rules=[RuleEntry(source=names[0], target=names[1], bundle=str(bundle or _find_bundle(*refs)), force=True)],
    )
    with System(resolve(file, [Path()]), capacity=1 << 30) as system:
        for status in system.pool.converter.wait_ready(60):
            if status.state != "ready":
                raise ConversionError(f"rule {status.name} is {status.state}: {status.reason}")
            if status.gate == "forced":
                console.print(
                    f"The bundle does not pass the gate and is served by force: {status.reason}", markup=False
                )
        figures, arms = Demo(system, *names).run(tokens, documents)
        _show(console, figures, arms)
        _show_conversion(console, system.pool.converter.stats(), arms["source"])
    _save(figures)
    console.print(f"The demo took {time.monotonic() - started:.0f} s. Figures: {FIGURES}")
    return figures


def _find_bundle(source: str, target: str) -> Path:
    """The pair's bundle of the checkout or the cache; else one is fitted on Python's own library and kept in the cache."""
    name = f"{Path(source).name}-to-{Path(target).name}"
    places = [paths.repo_dir("bundles"), paths.cache_dir() / "fits"]
    found = next((p / name for p in places if p and (p / name).is_dir()), None)
    if found:
        return found
    from moonpool.c2c.commands.fit import fit

    folder = paths.cache_dir() / "fits" / name
    text = Path(sysconfig.get_paths()["stdlib"])
    print(f"No bundle for this pair: fitting one on {text} into {folder}. Large models take a while.")
    fit(source=source, target=target, text=[text], out=folder)
    return folder


class Demo:
    """The arms, one after the other, on a running system."""

    def __init__(self, system: System, source: str, target: str) -> None:
        self._system, self._pool = system, system.pool
        self._source, self._target = system.instances[source], system.instances[target]
        self._names = source, target
        self._origins = system.c2c.origins(system.c2c.models[target].owner, True)

    def run(self, tokens: int, documents: int) -> tuple[Figures, dict[str, Arm]]:
        writer = FactWriter(_Tokenizer(self._target), seed=7)
        docs = [writer.document(tokens, facts=_FACTS, questions=_QUESTIONS) for _ in range(documents)]
        arms = {"cold": self._ask(docs[:1], allow=False, questions=1)}
        self._target.flush()
        arms["native"] = self._ask(docs, allow=False)
        self._target.flush()
        for doc in docs:
            self._forget(doc.tokens)
        prefills = [self._convert(tokens) for doc in docs for tokens in (doc.tokens, doc.twin)]
        arms["source"] = Arm(prefills[0], [], 0.0, [])
        arms["converted"] = self._ask(docs, allow=True)
        arms["wrong document"] = self._ask(docs, allow=True, twin=True)
        arms["no document"] = self._ask(docs, allow=False, document=False)
        return self._figures(arms), arms

    def _ask(
        self,
        docs: Sequence[FactDocument],
        *,
        allow: bool,
        twin: bool = False,
        document: bool = True,
        questions: int = _QUESTIONS,
    ) -> Arm:
        results, right = [], []
        for doc in docs:
            for question in doc.questions[:questions]:
                context = (doc.twin if twin else doc.tokens) if document else doc.tokens[:0]
                prompt = torch.cat([context, question.prompt])
                results.append(self._generate(prompt, allow=allow, answer=len(question.answer)))
                right.append(self._target.decode(question.answer.tolist()).strip())
        answers = [_first_word(r.text) for r in results]
        recall = sum(a == b for a, b in zip(answers, right, strict=True)) / len(right)
        return Arm(results[0], answers, recall, [_tail(r) for r in results])

    def _generate(self, prompt: Tensor, *, allow: bool, answer: int) -> GenerateResult:
        return self._target.generate(
            GenerateRequest(
                prompt=prompt.tolist(),
                max_tokens=answer + 1,
                prompt_logits=min(_TAIL, len(prompt)),
                allow_converted=allow,
                ignore_eos=True,
            )
        )

    def _forget(self, tokens: Tensor) -> None:
        """Remove the target's own pages of a document: from here on only conversion can help."""
        keys = self._target.spec.identity(self._target.page_size).page_keys(tokens.tolist())
        self._pool.batch_remove([k.text for k in keys])

    def _convert(self, tokens: Tensor) -> GenerateResult:
        """Let the source prefill a document and wait until its pages were converted."""
        prefill = self._source.generate(GenerateRequest(prompt=tokens.tolist(), max_tokens=0))
        self._source.flush()
        keys = self._target.spec.identity(self._target.page_size).page_keys(tokens.tolist())[1:]
        end = time.monotonic() + _CONVERT_WAIT_S
        while not all(self._pool.lookup(keys, self._origins)):
            if time.monotonic() > end:
                raise ConversionError("conversion did not finish in time", have=str(self._pool.converter.stats()))
            time.sleep(0.01)
        return prefill

    def _figures(self, arms: dict[str, Arm]) -> Figures:
        kl, top1 = _compare(arms["native"].logits, arms["converted"].logits)
        first = arms["converted"].first
        return Figures(
            pair="→".join(self._names),
            prompt_tokens=first.usage.prompt,
            native_tokens=arms["native"].first.usage.native,
            converted_tokens=first.usage.converted,
            ttft_cold_s=arms["cold"].first.timing.ttft,
            ttft_native_s=arms["native"].first.timing.ttft,
            ttft_converted_s=first.timing.ttft,
            kl=kl,
            top1=top1,
            recall_native=arms["native"].recall,
            recall_converted=arms["converted"].recall,
            recall_wrong_document=arms["wrong document"].recall,
            recall_no_document=arms["no document"].recall,
        )


class _Tokenizer:
    """An instance's tokenizer in the shape that `FactWriter` takes."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._instance.encode(text)


def _tail(result: GenerateResult) -> Tensor:
    assert result.prompt_logits is not None
    return result.prompt_logits


def _compare(native: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[float, float]:
    """Mean KL(native ‖ other) in nats and the share of equal top-1 predictions over all compared positions."""
    p, q = torch.cat(list(native)), torch.cat(list(other))
    kl = kl_div(log_softmax(q, -1), log_softmax(p, -1), log_target=True, reduction="none").sum(-1)
    return float(kl.mean()), float((p.argmax(-1) == q.argmax(-1)).float().mean())


def _first_word(text: str) -> str:
    words = text.split()
    return words[0] if words else ""


def _show(console: Console, f: Figures, arms: dict[str, Arm]) -> None:
    table = Table(title=f"{f.pair}: {f.prompt_tokens} prompt tokens", title_justify="left")
    for column in ("target answers from", "native", "converted", "computed", "TTFT s", "recall", "first answers"):
        table.add_column(column, justify="right" if column not in ("target answers from", "first answers") else "left")
    for name, arm in ((n, a) for n, a in arms.items() if n != "source"):
        u = arm.first.usage
        recall = "" if name == "cold" else f"{arm.recall:.2f}"
        ttft = f"{arm.first.timing.ttft:.3f}"
        table.add_row(name, str(u.native), str(u.converted), str(u.computed), ttft, recall, " ".join(arm.answers[:3]))
    console.print(table)
    console.print(
        f"Against native: KL {f.kl:.3f} nats, top-1 agreement {f.top1:.2f}; "
        f"chance of a guess among the document's values {1 / _FACTS:.2f}."
    )
    times = Table(title="Where the first request's time went (s)", title_justify="left")
    for column in ("", "lookup", "load", "prefill", "decode", "total"):
        times.add_column(column, justify="right")
    for name in ("cold", "native", "converted"):
        t = arms[name].first.timing
        times.add_row(name, *(f"{x:.4f}" for x in (t.lookup, t.load, t.prefill, t.decode, t.total)))
    console.print(times)


def _show_conversion(console: Console, stats: ConverterStats, source: Arm) -> None:
    rate = stats.converted_tokens / stats.seconds if stats.seconds else 0.0
    console.print(
        f"Behind the scenes: the source prefilled {source.first.usage.prompt} tokens in {source.first.timing.prefill:.3f} s; "
        f"the converter made {stats.converted_pages} pages in {stats.seconds:.3f} s ({rate:,.0f} tokens/s), off every request's "
        f"path."
    )


def _save(figures: Figures) -> None:
    """Keep one entry per pair: the demo is run for one pair at a time."""
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    runs = json.loads(FIGURES.read_text()) if FIGURES.is_file() else []
    kept = [r for r in runs if r["pair"] != figures.pair]
    FIGURES.write_text(json.dumps([*kept, asdict(figures)], indent=2, ensure_ascii=False) + "\n")
