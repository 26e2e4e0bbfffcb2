"""The evaluator's further arms and costly measures: native where the map is perfect, worse where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from moonpool.c2c.bundle import WEIGHTS, Bundle, write_bundle
from moonpool.c2c.fitting.capture import KV, CaptureStore, CausalModel
from moonpool.c2c.judging import checks
from moonpool.c2c.judging.arms import shuffled_keys
from moonpool.c2c.judging.evaluate import EvalOptions, Evaluator, evaluate
from moonpool.c2c.judging.page import page
from moonpool.c2c.judging.report import Report, bound, from_json, markdown, to_json
from moonpool.errors import BundleCorrupt
from tests.c2c.test_evaluate import LAYERS, identity, swapped_heads
from tests.c2c.tiny import documents, tiny_model

QUIET = Console(quiet=True)
OPTIONS = EvalOptions(prefix=128, continuation=15, page_size=8, checks=2, generate=6, kind="code")


class Watched(CausalModel):
    """Notes every cache that a pass begins with: the cache itself, so that no other can take its place in memory, and its length."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun: list[tuple[Any, int]] = []

    def _cache(self, prefix: KV | None, batch: int) -> Any:
        cache = super()._cache(prefix, batch)
        self.begun.append((cache, cache.get_seq_length()))
        return cache


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CaptureStore:
    root = tmp_path_factory.mktemp("checks")
    return CaptureStore(root / "kept", tiny_model(root / "model", layers=LAYERS, dim=16))


def judged(store: CaptureStore, evaluator: Evaluator) -> Report:
    return evaluate(evaluator, documents(3, OPTIONS.document_tokens), [], QUIET, documents(1, OPTIONS.long_tokens, 9))


@pytest.fixture(scope="module")
def sound(store: CaptureStore) -> Report:
    return judged(store, Evaluator(store, store, identity(), OPTIONS))


@pytest.fixture(scope="module")
def broken(store: CaptureStore) -> Report:
    return judged(store, Evaluator(store, store, swapped_heads(), OPTIONS, compare=identity()))


def test_a_perfect_map_is_native_at_every_length_turn_and_answer(sound: Report) -> None:
    assert [c.tokens for c in sound.by_length] == [16, 32, 64, 128]
    assert sound.long is not None
    assert (sound.long.tokens, sound.long.documents) == (512, 1)
    for check in [*sound.by_length, sound.long]:
        assert check.kl_mean == pytest.approx(0, abs=1e-5)
        assert check.top1 == 1
        assert check.recovery is None or check.recovery == pytest.approx(1, abs=1e-3)
    assert len(sound.turns) == checks.TURNS
    # Answers are kept in bf16 and read back, native ones never are: hence not quite nothing.
    assert max(sound.turns) < 0.01
    assert sound.generation_retention == sound.generation_same == 1


def test_a_broken_map_shows_in_all_of_them(broken: Report) -> None:
    assert broken.long is not None
    assert min(c.kl_mean for c in [*broken.by_length, broken.long]) > 0.01
    assert min(broken.turns) > 0.01
    assert broken.generation_retention is not None
    assert broken.generation_retention < 1
    assert broken.generation_same == 0


def test_spans_cover_the_continuation(broken: Report) -> None:
    spans = broken.by_position
    assert [s.start for s in spans] == [0, 1, 2, 4, 8]
    assert [s.end for s in spans] == [1, 2, 4, 8, 15]
    mean = sum(s.kl_mean * (s.end - s.start) for s in spans) / 15
    assert mean == pytest.approx(broken.arm("mapped").kl_mean)


def test_counts_costs_and_kind_are_recorded(broken: Report) -> None:
    p = broken.protocol
    assert (p.length_documents, p.turn_documents, p.generated_documents, p.long_documents) == (2, 2, 2, 1)
    assert (p.generated_tokens, p.compute, broken.kind) == (6, "float32", "code")
    assert broken.flops_per_token == swapped_heads().flops_per_token() > 0
    assert broken.prefill_flops_per_token > 0


def test_none_of_them_where_none_is_asked_for(store: CaptureStore) -> None:
    options = msgspec.structs.replace(OPTIONS, checks=0)
    found = judged(store, Evaluator(store, store, identity(), options))
    assert (found.by_length, found.long, found.turns, found.generation_retention) == ([], None, [], None)


def test_the_further_arms(sound: Report, broken: Report) -> None:
    for name in ("tail16", "source"):  # of a model with itself, and a perfect map
        assert sound.arm(name).kl_mean == pytest.approx(0, abs=1e-3)
        assert sound.arm(name).top1 > 0.9
    assert sound.arm("source").attention_cosine == []
    assert sound.arm("shuffled_keys").kl_mean > 0.01
    assert broken.arm("tail16").kl_mean > 0.01  # sixteen native tokens mend no hundred broken ones


def test_shuffled_keys_are_the_same_keys_elsewhere() -> None:
    kv = KV(torch.arange(40.0).reshape(10, 2, 1, 2), torch.randn(10, 2, 1, 2))
    found = shuffled_keys(kv, 4, seed=1)
    assert torch.equal(found.v, kv.v)
    assert torch.equal(found.k[:4], kv.k[:4])
    assert not torch.equal(found.k, kv.k)
    assert torch.equal(found.k.flatten(1).sort(0).values, kv.k.flatten(1).sort(0).values)


def test_every_pass_of_every_arm_begins_with_a_fresh_cache(store: CaptureStore, tmp_path: Path) -> None:
    fresh = CaptureStore(tmp_path, store.folder)
    model = Watched(store.folder)
    fresh.__dict__["model"] = model  # where `cached_property` keeps it
    evaluator = Evaluator(fresh, fresh, identity(), OPTIONS)
    one, two = documents(2, OPTIONS.document_tokens)
    for document in (one, two):
        fresh.get(document)
    model.begun.clear()
    evaluator.text(one, two)
    lengths = [length for _, length in model.begun]
    assert lengths == [128, 128, 112, 128, 128, 8, 128, 128, 128, 128, 0]
    assert len({id(cache) for cache, _ in model.begun}) == len(lengths)
    tensors = {layer.keys.data_ptr() for cache, _ in model.begun for layer in cache.layers}
    assert len(tensors) == len(lengths) * LAYERS
    first = evaluator.report().arm("mapped")
    evaluator.text(one, two)  # what ran in between has left no trace
    assert evaluator.report().arm("mapped").nll == first.nll


def test_extending_a_cache_is_computing_it_at_once(store: CaptureStore) -> None:
    (document,) = documents(1, 60)
    native = store.get(document)
    logits, kv = store.model.extend(native[:40], document[40:])
    torch.testing.assert_close(logits, store.model.logits(native[:40], document[40:]))
    assert len(kv) == 60
    torch.testing.assert_close(kv.k.float(), native.k.float(), rtol=0.02, atol=0.05)
    torch.testing.assert_close(kv.v.float(), native.v.float(), rtol=0.02, atol=0.05)


def test_greedy_takes_the_most_likely_token_each_time(store: CaptureStore) -> None:
    (document,) = documents(1, 41)
    prefix, said = store.get(document)[:40], document[40:]
    answer = store.model.greedy(prefix, said, 4)
    assert len(answer) == 4
    logits = store.model.logits(prefix, torch.cat([said, torch.tensor(answer)]))
    assert logits.argmax(-1)[:4].tolist() == answer


class Speaks:
    """Stands in for a model: an answer for each cache."""

    class tokenizer:
        eos_token_id = 9

    def __init__(self, *answers: list[int]) -> None:
        self._answers = list(answers)

    def greedy(self, prefix: KV, tokens: torch.Tensor, count: int) -> list[int]:
        return self._answers.pop(0)


@pytest.mark.parametrize(
    ("native", "mapped", "share"),
    [([1, 2, 3, 4], [1, 2, 3, 4], 1), ([1, 2, 3, 4], [1, 0, 3, 4], 0.25), ([1, 9, 3, 4], [1, 9, 8, 8], 1)],
)
def test_an_answer_counts_up_to_the_first_difference_or_its_end(
    native: list[int], mapped: list[int], share: float
) -> None:
    kv = KV(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2))
    model: Any = Speaks(native, mapped)
    assert checks.generated(model, checks.Caches(torch.zeros(3), kv, kv), 2, 4) == share


def test_lengths_are_whole_pages() -> None:
    assert checks.lengths(448, 16) == [48, 112, 224, 448]
    assert checks.lengths(32, 16) == [32]


def test_vocabularies_that_are_padded_differently_are_compared_where_both_speak() -> None:
    logits = torch.randn(3, 8)
    assert checks.kl(logits, torch.cat([logits, torch.zeros(3, 2)], 1)).abs().max() < 1e-6


def test_an_older_report_is_read(sound: Report) -> None:
    new = {"kind", "flops_per_token", "compare_flops_per_token", "prefill_flops_per_token", "by_position", "by_length"}
    new |= {"long", "turns", "generation_retention", "generation_same", "weights"}
    raw = msgspec.json.decode(to_json(sound))
    old = from_json(msgspec.json.encode({k: v for k, v in raw.items() if k not in new}))
    assert (old.long, old.turns, old.kind, old.weights) == (None, [], "text", "")
    assert old.arms == sound.arms
    markdown(old)


def test_a_report_is_a_page_of_plots(broken: Report) -> None:
    assert page(broken).startswith(b"\x89PNG")
    bare = msgspec.structs.replace(broken, by_length=[], long=None, by_position=[])  # an older one
    assert page(bare).startswith(b"\x89PNG")


def test_what_is_measured_is_told(broken: Report) -> None:
    told = markdown(broken)
    assert "\n| 0 | " in told
    assert "\n| 8–14 | " in told
    for words in ("tokens behind the prefix", "| 512 | 1 |", "by turn", "Greedy answers of 6 tokens", "MFLOP"):
        assert words in told


def test_a_report_is_bound_to_weights(sound: Report, store: CaptureStore, tmp_path: Path) -> None:
    bundle: Bundle = write_bundle(tmp_path / "b", swapped_heads(), store.spec, store.spec)
    bound(msgspec.structs.replace(sound, weights=bundle.sums[WEIGHTS]), bundle)
    for other in ("", "0" * 64):
        with pytest.raises(BundleCorrupt, match="other weights"):
            bound(msgspec.structs.replace(sound, weights=other), bundle)
