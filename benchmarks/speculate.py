"""Speculative decoding, the small model drafting for the large one: `python -m benchmarks.speculate [--bundle FOLDER]`.

    draft_acceptance_native, _converted   guesses that were right ÷ guesses, the draft's prompt computed by itself or converted
    draft_time_plain, _native, _converted   mean seconds of decoding an answer, the draft's cache of the prompt included
    draft_time_prefill, _convert          of these: until the draft had the prompt's cache, computed or converted
    draft_replayed_native, _converted     tokens computed once more for rounding's sake ÷ tokens of the answers

In each pair the *large* model is the source of the bundle and answers; the *small* one is its target and drafts. All answers
of the three runs are compared, greedy and seeded: one that differs ends the run with an error. Every run has its own salt, so that
each finds the pool without its prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures
from moonpool import paths
from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import C2CConfig, C2CFile, ModelEntry, RuleEntry, resolve
from moonpool.c2c.signature import load_spec
from moonpool.engine.draft import DraftKV, DraftModel
from moonpool.engine.instance import Instance
from moonpool.engine.request import GenerateRequest, GenerateResult
from moonpool.engine.sampling import SamplingParams
from moonpool.errors import MoonpoolError
from moonpool.store.embedded import EmbeddedPool

PAGE = 16
PROMPT, ANSWER, DRAFTED = 256, 32, 4
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.95, seed=17))
QWEN = ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct")


class NotEqual(MoonpoolError):
    """Speculation changed an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="bundle of the Qwen pair, large to small")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt, at most")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer")
    parser.add_argument("--only", choices=["bundled", "qwen"])
    chosen = parser.parse_args()
    found: dict[str, float] = {}
    for name, source, target, bundle in _pairs(chosen.bundle):
        if chosen.only not in (None, name):
            continue
        measured = measure(
            source, target, bundle, documents=chosen.documents, prompt=chosen.prompt, answer=chosen.answer
        )
        prefix = "" if name == "bundled" else f"{name}_"
        found |= {f"{prefix}{k}": v for k, v in measured.items()}
        figures.show(
            f"{Path(target).name} drafts for {Path(source).name}",
            [(k, f"{v:.3f}") for k, v in measured.items()],
            ("figure", "value"),
        )
    print(figures.write("bench-speculate", found))


def _pairs(bundle: Path | None) -> list[tuple[str, str, str, str]]:
    """(name, source, target, bundle) of those that are here."""
    models, bundles = paths.repo_dir("models"), paths.repo_dir("bundles")
    assert models is not None
    assert bundles is not None
    large, small = "moon-large", "moon-small"
    pairs = [("bundled", str(models / large), str(models / small), str(bundles / f"{large}-to-{small}"))]
    folder, shipped = os.environ.get("MOONPOOL_MODELS"), bundle or bundles / "-to-".join(QWEN)
    if folder and shipped.is_dir() and all((Path(folder) / n).is_dir() for n in QWEN):
        source, target = (str(Path(folder) / n) for n in QWEN)
        pairs.append(("qwen", source, target, str(shipped)))
    else:
        print("qwen: skipped, needs both models in MOONPOOL_MODELS and a bundle")
    return pairs


def measure(
    source: str, target: str, bundle: str | Path, *, documents: int = 4, prompt: int = PROMPT, answer: int = ANSWER
) -> dict[str, float]:
    """`source` answers, `target` drafts; names or folders of models, folder of the bundle. Raises NotEqual if an answer is not
    plain decoding's, MoonpoolError for a bundle that cannot be used."""
    source, target = paths.find_model(source), paths.find_model(target)
    file = C2CFile(
        models={"large": ModelEntry(source), "small": ModelEntry(target)},
        rules=[RuleEntry(source="large", target="small", bundle=str(bundle), mode="on_load", force=True)],
        page_size=PAGE,
    )
    c2c = resolve(file, [])
    open_bundle(Path(bundle))  # the engine would draft natively without a word, and the figures would be wrong
    measured: dict[str, float] = {}
    plain: list[GenerateResult] = []
    for how, step in (("native", "prefill"), ("converted", "convert")):
        with EmbeddedPool(256 << 20) as pool, _instance(source, target, pool, c2c, how) as instance:
            requests = _requests(instance, documents, prompt, answer)
            instance.generate(dataclasses.replace(requests[0], salt="not counted"))
            if not plain:
                plain = _answers(instance, requests, salt="plain", speculate=False)
                measured["draft_time_plain"] = statistics.fmean(r.timing.decode for r in plain)
            fast = _answers(instance, requests, salt=how, speculate=True)
        _compare(plain, fast, how)
        drafted = sum(r.usage.drafted for r in fast)
        measured[f"draft_acceptance_{how}"] = sum(r.usage.accepted for r in fast) / max(1, drafted)
        measured[f"draft_time_{how}"] = statistics.fmean(r.timing.decode for r in fast)
        measured[f"draft_time_{step}"] = statistics.fmean(r.timing.draft for r in fast)
        measured[f"draft_replayed_{how}"] = sum(r.usage.replayed for r in fast) / sum(len(r.tokens) for r in fast)
    return measured


def _instance(source: str, target: str, pool: EmbeddedPool, c2c: C2CConfig, how: str) -> Instance:
    kv: DraftKV = "native" if how == "native" else "converted"
    draft = DraftModel(ref=target, spec=load_spec(target), tokens=DRAFTED, kv=kv)
    return Instance(source, load_spec(source), pool, page_size=PAGE, c2c=c2c, draft=draft, compute="float32")


def _requests(instance: Instance, documents: int, prompt: int, answer: int) -> list[GenerateRequest]:
    """The heads of this program's own sources as prompts: no model here was trained on them."""
    folder = Path(__file__).resolve().parents[1] / "src/moonpool"
    texts = [p.read_text() for p in sorted(folder.glob("engine/*.py")) if p.stat().st_size > 4000]
    prompts = [instance.encode(t)[:prompt] for t in texts[:documents]]
    return [
        GenerateRequest(prompt=p, max_tokens=answer, sampling=s, ignore_eos=True) for p in prompts for s in SAMPLINGS
    ]


def _answers(
    instance: Instance, requests: Sequence[GenerateRequest], *, salt: str, speculate: bool
) -> list[GenerateResult]:
    return [
        # A prompt's second request, with the other sampling, gets a salt of its own too.
        instance.generate(dataclasses.replace(r, salt=f"{salt} {i}", speculate=speculate))
        for i, r in enumerate(requests)
    ]


def _compare(plain: Sequence[GenerateResult], fast: Sequence[GenerateResult], how: str) -> None:
    for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
        if a.tokens != b.tokens:
            raise NotEqual(f"answer {i} with a {how} draft is another", need=str(a.tokens), have=str(b.tokens))


if __name__ == "__main__":
    main()
