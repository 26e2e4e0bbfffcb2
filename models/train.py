"""Train and check the bundled pair: `python models/train.py` makes both models, `--check` measures them.

One seed fixes tokenizer, data and initialisation. Moon-large is trained first; moon-small sees the same batches in
the same order and, past the first stage, also learns from moon-large's next-token distribution (KL, T = 1).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Threads that spin at barriers cost a factor of ten as soon as anything else runs; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models import corpus, measure, shape, tasks

HERE = Path(__file__).resolve().parent
LEARNING_RATE = 2e-3
WARMUP = 40
DISTILL = 0.5
EVERY = 50


@dataclass(frozen=True)
class Data:
    tokenizer: Tokenizer
    words: corpus.Words
    train: corpus.IntArray
    held: corpus.IntArray


@dataclass
class Run:
    """One model's training: what it learns with and how far it is."""

    name: str
    model: Any
    core: Any
    teacher: Any
    optimisers: list[torch.optim.Optimizer]
    minutes: float
    started: float

    def fraction(self, step: int, total: int) -> float:
        """Progress by steps, or by time when the limit is nearer: the learning rate always comes down."""
        return max(step / total, (time.monotonic() - self.started) / (60 * self.minutes))


def prepare(seed: int, tokenizer_file: Path | None = None) -> Data:
    """The data; the tokenizer is trained on it unless a file holds one."""
    train, held = corpus.texts(seed)
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file else corpus.build_tokenizer(train)
    words = corpus.Words.of(tokenizer)
    assert words.size <= shape.VOCABULARY
    return Data(tokenizer, words, corpus.encode_all(tokenizer, train), corpus.encode_all(tokenizer, held))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=corpus.IM_END,
        pad_token=corpus.END,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = corpus.CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    entries = json.loads(settings.read_text())
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(entries, indent=2) + "\n")


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """A complete folder: weights in bf16, configuration, tokenizer."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config.eos_token_id = [shape.IM_END_ID, shape.END_ID]
    half.generation_config.pad_token_id = shape.END_ID
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder)


def optimisers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def set_rate(run: Run, step: int, fraction: float) -> None:
    rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * max(0.02, min(1.0, 1.6 * (1.0 - fraction)))
    for optimiser in run.optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate


def logits(model: Any, core: Any, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = core(input_ids=ids, use_cache=False).last_hidden_state
        return (hidden @ model.model.embed_tokens.weight.T).float()


def losses(run: Run, ids: Tensor, weights: Tensor, *, distil: bool) -> tuple[Tensor, Tensor]:
    """(what is minimised, per-token cross entropy)."""
    scores = logits(run.model, run.core, ids[:, :-1]).flatten(0, 1)
    share = weights[:, 1:].flatten()
    entropy = cross_entropy(scores, ids[:, 1:].flatten(), reduction="none")
    loss = (entropy * share).sum() / share.sum()
    if distil:
        with torch.no_grad():
            wanted = logits(run.teacher, run.teacher.model, ids[:, :-1]).flatten(0, 1).log_softmax(-1)
        gap = kl_div(scores.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1)
        loss = (1 - DISTILL) * loss + DISTILL * (gap * share).sum() / share.sum()
    return loss, entropy.detach()


def learn(run: Run, ids: Tensor, weights: Tensor, *, distil: bool) -> str:
    """One step; returns the two losses that matter, for the log."""
    loss, entropy = losses(run, ids, weights, distil=distil)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    share = weights[:, 1:].flatten()
    answers, text = share == 1.0, (share > 0.1) & (share < 0.9)
    return f"answers {entropy[answers].mean():.3f} text {entropy[text].mean():.3f}"


def stage_at(position: float) -> tuple[int, tasks.Stage]:
    """The curriculum's stage at a (possibly time-bound) step position."""
    for number, stage in enumerate(tasks.CURRICULUM):
        if position < stage.steps:
            return number, stage
        position -= stage.steps
    return len(tasks.CURRICULUM) - 1, tasks.CURRICULUM[-1]


def start(name: str, seed: int, minutes: float, teacher: Any, *, compiled: bool) -> Run:
    model = shape.build(name, seed).train()
    core = torch.compile(model.model, dynamic=False) if compiled else model.model
    return Run(name, model, core, teacher, optimisers(model), minutes, time.monotonic())


def report(run: Run, data: Data, step: int, line: str) -> None:
    seconds = time.monotonic() - run.started
    extra = ""
    if step % (4 * EVERY) == 0:
        run.model.eval()
        found = measure.recall(run.model, tasks.Generator(data.words, data.held), 256, 8, seed=1)
        text = measure.text_loss(run.model, data.held, rows=8)
        extra = f" | recall {found.right:.3f} later {found.later:.3f} chat {found.chat:.3f} held-out text {text:.3f}"
        run.model.train()
    print(f"{run.name} step {step} {seconds:.0f}s {line}{extra}", flush=True)


def train(run: Run, data: Data, seed: int, folder: Path) -> None:
    generator = tasks.Generator(data.words, data.train)
    total = sum(stage.steps for stage in tasks.CURRICULUM)
    step = 0
    while (fraction := run.fraction(step, total)) < 1.0:
        number, stage = stage_at(fraction * total)
        ids, weights = tasks.batch(generator, seed, step, stage)
        set_rate(run, step, fraction)
        line = learn(
            run, torch.from_numpy(ids), torch.from_numpy(weights), distil=run.teacher is not None and number > 0
        )
        step += 1
        if step % EVERY == 0:
            report(run, data, step, f"length {stage.length} {line}")
        if step % (4 * EVERY) == 0:
            save(run.model, data.tokenizer, folder)
    save(run.model, data.tokenizer, folder)
    print(f"{run.name} done: {step} steps in {(time.monotonic() - run.started) / 60:.1f} minutes", flush=True)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check(out: Path, seed: int, documents: int) -> None:
    """Print what the pair can do, and fail if it cannot do it."""
    data = prepare(seed, out / "moon-large" / "tokenizer.json")
    generator = tasks.Generator(data.words, data.held)
    bad = []
    for name in shape.NAMES:
        folder = out / f"moon-{name}"
        model = load(folder)
        size = (folder / "model.safetensors").stat().st_size / 1e6
        print(f"moon-{name}: {model.num_parameters()} parameters, {size:.1f} MB")
        print(f"  text loss {measure.text_loss(model, data.held):.3f} nats per token (held-out documentation)")
        print("  document tokens | questions | right document | wrong document | no document | after 8 answers | chat")
        for length in measure.LENGTHS:
            r = measure.recall(model, generator, length, documents, seed=2)
            print(
                f"  {length:15d} | {r.asked:9d} | {r.right:14.3f} | {r.wrong:14.3f} | {r.none:11.3f} "
                f"| {r.later:15.3f} | {r.chat:.3f}",
                flush=True,
            )
            if r.right < measure.MIN_RECALL or max(r.wrong, r.none) > measure.MAX_CHANCE:
                bad.append(f"moon-{name} at {length} tokens")
    assert not bad, f"recall outside its bounds: {', '.join(bad)}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=shape.NAMES, help="train one model; small needs large in --out as teacher")
    parser.add_argument("--out", type=Path, default=HERE, help="folder that gets moon-large and moon-small")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=32, help="documents per length in --check")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile (no C++ compiler)")
    parser.add_argument("--check", action="store_true", help="measure instead of training")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.check:
        check(options.out, options.seed, options.documents)
        return
    large = options.out / "moon-large"
    known = large / "tokenizer.json" if options.only == "small" else None
    data = prepare(options.seed, known)
    print(f"{len(data.train)} training tokens, {len(data.held)} held out, vocabulary {data.words.size}", flush=True)
    for name in shape.NAMES:
        if options.only in (None, name):
            teacher = load(large) if name == "small" else None
            run = start(name, options.seed, options.minutes, teacher, compiled=not options.no_compile)
            train(run, data, options.seed, options.out / f"moon-{name}")


if __name__ == "__main__":
    main()
