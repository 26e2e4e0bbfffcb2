"""The bundled pair: complete folders, one tokenizer, different shapes, and answers that come from the context."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moonpool.c2c.fitting.facts_words import NAMES, VALUES

MODELS = Path(__file__).resolve().parents[2] / "models"
PAIR = ("moon-large", "moon-small")
FILLER = (
    "The committee met on a cold morning and nobody spoke for a while.",
    "Returns a new list; the original sequence is left unchanged.",
    "A lamp stood in the window, and the road beyond it was empty.",
    "If the file does not exist, an exception is raised and the call fails.",
    "Later that year the bridge was painted again, this time by two people.",
)


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODELS / "moon-large")


@functools.cache
def model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


def document(rng: random.Random, facts: dict[str, str], filler: int) -> str:
    lines = [f"{name}: {value}" for name, value in facts.items()]
    for _ in range(filler):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(FILLER))
    return "\n".join(["Registry", *lines])


def draw(rng: random.Random) -> dict[str, str]:
    return {name: rng.choice(VALUES) for name in rng.sample(NAMES, rng.randint(8, 20))}


@torch.inference_mode()
def answers(name: str, prompts: list[str]) -> list[str]:
    """The likeliest next token after each prompt; all have one length, for they differ in the asked name only."""
    ids = torch.tensor([tokenizer().encode(prompt, add_special_tokens=False) for prompt in prompts])
    return [tokenizer().decode([int(i)]) for i in model(name)(ids, logits_to_keep=1).logits[:, -1].argmax(-1)]


def share(name: str, *, wrong: bool) -> float:
    """Share of right answers over held-out documents; `wrong` asks a document that gives the names other values."""
    rng = random.Random(20)
    right = asked = 0
    for _ in range(12):
        facts = draw(rng)
        told = {key: rng.choice(VALUES) for key in facts} if wrong else facts
        text = document(rng, told, rng.randint(0, 14))
        names = rng.sample(list(facts), 6)
        got = answers(name, [f"{text}\n{key}:" for key in names])
        right += sum(answer == f" {facts[key]}" for answer, key in zip(got, names, strict=True))
        asked += len(names)
    return right / asked


def test_sizes() -> None:
    sizes = [(MODELS / name / "model.safetensors").stat().st_size for name in PAIR]
    assert sum(sizes) <= 24_000_000


def test_folders_are_complete() -> None:
    for name in PAIR:
        for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (MODELS / name / file).is_file(), f"{name}/{file}"


def test_one_tokenizer() -> None:
    first, second = ((MODELS / name / "tokenizer.json").read_bytes() for name in PAIR)
    assert first == second


@pytest.mark.parametrize(
    "text",
    [
        "plain text, twice  spaced\t\n\n  end ",
        "🌙🚀 moon\r\nlanding",
        "日本語と中文",
        "Ada: green\nMcAda: greenhouse",
        "\x00é\u200d\U0001f468",
    ],
)
def test_tokenizer_is_lossless(text: str) -> None:
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert tokenizer().decode(ids, clean_up_tokenization_spaces=False) == text
    assert max(ids) < 2048


def test_facts_are_two_tokens() -> None:
    assert not {name.lower() for name in NAMES} & set(VALUES)
    for name, value in zip(NAMES, VALUES, strict=False):
        assert len(tokenizer().encode(f"{name}: {value}", add_special_tokens=False)) == 2
    for value in VALUES:
        assert len(tokenizer().encode(f" {value}", add_special_tokens=False)) == 1


def test_shapes_differ() -> None:
    large, small = (model(name).config for name in PAIR)
    assert large.model_type == small.model_type == "qwen3"
    assert large.vocab_size == small.vocab_size
    for key in ("num_hidden_layers", "hidden_size", "head_dim"):
        assert getattr(large, key) > getattr(small, key)
    assert large.rope_parameters["rope_theta"] == 1e6
    assert small.rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize("name", PAIR)
def test_recall_comes_from_the_document(name: str) -> None:
    assert share(name, wrong=False) >= 0.95
    assert share(name, wrong=True) <= 0.10


@pytest.mark.parametrize("name", PAIR)
def test_chat_answers_from_the_document(name: str) -> None:
    rng = random.Random(21)
    facts = draw(rng)
    asked = rng.choice(list(facts))
    message = {"role": "user", "content": f"{document(rng, facts, 4)}\n{asked}:"}
    prompt = tokenizer().apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith(f"\n{asked}:<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer()(prompt, return_tensors="pt", add_special_tokens=False)
    out = model(name).generate(**ids, max_new_tokens=8, do_sample=False)
    answer = tokenizer().decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.strip() == f"{asked}: {facts[asked]}"
