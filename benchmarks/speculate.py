"""Speculative decoding, the small model drafting for the large one: `python -m benchmarks.speculate [--bundle FOLDER]`.

    draft_acceptance_native, _converted   guesses that were right ÷ guesses, the draft's prompt computed by itself or converted
    draft_seconds_plain, _native, _converted   decoding time per answer (the draft's share of the prompt included), mean
    draft_replayed_native, _converted   tokens computed once more for rounding's sake ÷ tokens of the answers

In each pair the *large* model is the source of the bundle and answers; the *small* one is its target and drafts. All answers
of the three runs are compared, greedy and seeded: one that differs ends the run with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures
from moonpool import paths
from moonpool.c2c.bundle import open_bundle
from moonpool.c2c.config import C2CConfig, C2CFile, ModelEntry, RuleEntry, resolve
from moonpool.c2c.signature import load_spec
from moonpool.engine.draft import DraftModel
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
    chosen = parser.parse_args()
    found: dict[str, float] = {}
    for name, source, target, bundle in _pairs(chosen.bundle):
        measured = measure(source, target, bundle, documents=chosen.documents)
        prefix = "" if name == "bundled" else f"{name}_"
        found |= {f"{prefix}{k}": v for k, v in measured.items()}
        figures.show(
            f"{target} drafts for {source}", [(k, f"{v:.3f}") for k, v in measured.items()], ("figure", "value")
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


def measure(source: str, target: str, bundle: str, *, documents: int = 4) -> dict[str, float]:
    """`source` answers, `target` drafts; model and bundle folders. Raises NotEqual if an answer is not plain decoding's."""
    file = C2CFile(
        models={"large": ModelEntry(source), "small": ModelEntry(target)},
        rules=[RuleEntry(source="large", target="small", bundle=bundle, mode="on_load", force=True)],
        page_size=PAGE,
    )
    c2c = resolve(file, [])
    open_bundle(Path(bundle))  # the engine would draft natively without a word, and the figures would be wrong
    measured: dict[str, float] = {}
    plain: list[GenerateResult] = []
    for how, rules in (("native", None), ("converted", c2c)):
        with EmbeddedPool(256 << 20) as pool, _instance(source, target, pool, rules) as instance:
            requests = _requests(instance, documents)
            for request in requests[:1]:
                instance.generate(request)  # not counted
            if not plain:
                plain = _answers(instance, [dataclasses.replace(r, speculate=False) for r in requests])
                measured["draft_seconds_plain"] = _seconds(plain)
            fast = _answers(instance, requests)
        _compare(plain, fast, how)
        drafted = sum(r.usage.drafted for r in fast)
        measured[f"draft_acceptance_{how}"] = sum(r.usage.accepted for r in fast) / max(1, drafted)
        measured[f"draft_seconds_{how}"] = _seconds(fast)
        measured[f"draft_replayed_{how}"] = sum(r.usage.replayed for r in fast) / sum(len(r.tokens) for r in fast)
    return measured


def _instance(source: str, target: str, pool: EmbeddedPool, c2c: C2CConfig | None) -> Instance:
    draft = DraftModel(ref=target, spec=load_spec(target), tokens=DRAFTED)
    return Instance(source, load_spec(source), pool, page_size=PAGE, c2c=c2c, draft=draft, compute="float32")


def _requests(instance: Instance, documents: int) -> list[GenerateRequest]:
    """The heads of this program's own sources as prompts: no model here was trained on them."""
    folder = Path(__file__).resolve().parents[1] / "src/moonpool"
    texts = [p.read_text() for p in sorted(folder.glob("engine/*.py")) if p.stat().st_size > 4000]
    prompts = [instance.encode(t)[:PROMPT] for t in texts[:documents]]
    return [
        GenerateRequest(prompt=p, max_tokens=ANSWER, sampling=s, ignore_eos=True) for p in prompts for s in SAMPLINGS
    ]


def _answers(instance: Instance, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
    return [instance.generate(r) for r in requests]


def _seconds(results: Sequence[GenerateResult]) -> float:
    return sum(r.timing.decode for r in results) / len(results)


def _compare(plain: Sequence[GenerateResult], fast: Sequence[GenerateResult], how: str) -> None:
    for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
        if a.tokens != b.tokens:
            raise NotEqual(f"answer {i} with a {how} draft is another", need=str(a.tokens), have=str(b.tokens))


if __name__ == "__main__":
    main()
