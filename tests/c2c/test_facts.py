"""Fact documents: answers stand in the context alone, the twin says otherwise, and exact match is greedy decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.c2c.commands.evaluate import FactForm
from moonpool.c2c.fitting.capture import load_tokenizer
from moonpool.c2c.fitting.facts import FactWriter, Question, is_exact
from moonpool.c2c.fitting.facts_forms import FORMS, Form
from moonpool.c2c.fitting.facts_words import NAMES, VALUES
from moonpool.errors import ConfigError
from tests.c2c.tiny import tokenizer


def test_document_and_twin_differ_in_values_only() -> None:
    t = tokenizer()
    found = FactWriter(t, seed=3).document(300, facts=6, questions=10, margin=32)
    mine, twin = (t.decode(x) for x in (found.tokens, found.twin))
    assert len(found.tokens) == len(found.twin) == 300
    for q in found.questions:
        name, right, wrong = (t.decode(x).strip(" \n") for x in (q.prompt, q.answer, q.wrong))
        assert f"{name} {right}\n" in mine
        assert f"{name} {wrong}\n" in twin
        assert right != wrong
    assert found.facts == 6


@pytest.fixture(scope="module", params=["tiny", "bundled"])
def some_tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer() if request.param == "tiny" else load_tokenizer(Path(__file__).parents[2] / "models/moon-small")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_tells_values_in_the_document_alone(form: Form, some_tokenizer: Any) -> None:
    t = some_tokenizer
    found = FactWriter(t, seed=4, form=form).document(400, facts=5, questions=8, margin=32)
    mine, twin = (t.decode(x) for x in (found.tokens, found.twin))
    assert len(found.tokens) == len(found.twin) == 400
    for q in found.questions:
        right, wrong = (t.decode(x).strip() for x in (q.answer, q.wrong))
        name = next(n for n in NAMES if form.ask(n) == t.decode(q.prompt))
        assert form.tell(name, right) in mine
        assert form.tell(name, wrong) in twin
        assert right not in t.decode(q.prompt)
    told = t.decode(found.told())
    assert told.startswith(mine)
    asked = found.questions[0]
    assert told[len(mine) :].startswith(t.decode(torch.cat([asked.prompt, asked.answer])) + form.end + "\n")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_has_the_tokens_that_its_value_has_in_the_document(form: Form, some_tokenizer: Any) -> None:
    """Else a model that copies would answer otherwise than the question wants."""

    def encode(text: str) -> list[int]:
        return list(some_tokenizer.encode(text, add_special_tokens=False))

    for name, value in zip(NAMES, VALUES, strict=False):
        answer, told = encode(form.say(value)), encode("\n" + form.tell(name, value))
        assert any(told[i : i + len(answer)] == answer for i in range(len(told)))
        assert encode(form.ask(name) + form.say(value)) == encode(form.ask(name)) + answer


def test_the_command_offers_every_form() -> None:
    assert [f.value for f in FactForm] == list(FORMS)


def test_the_first_page_holds_no_fact() -> None:
    t = tokenizer()
    writer = FactWriter(t, seed=1)
    for _ in range(5):
        start = t.decode(writer.document(300, facts=6, margin=32).tokens[:32])
        assert not any(f"{name}:" in start for name in NAMES)


def test_documents_follow_from_the_seed() -> None:
    a, b, c = (FactWriter(tokenizer(), seed=s).document(200, facts=4) for s in (1, 1, 2))
    assert torch.equal(a.tokens, b.tokens)
    assert not torch.equal(a.tokens, c.tokens)


def test_questions_are_drawn_with_replacement() -> None:
    found = FactWriter(tokenizer()).document(200, facts=3, questions=20)
    assert len(found.questions) == 20


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        FactWriter(tokenizer()).document(60, facts=20)


def test_words_are_words() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(VALUES)) == len(VALUES)


@pytest.mark.parametrize(("says", "exact"), [([5, 6, 9], True), ([5, 6, 7], False), ([5, 8, 9], False)])
def test_exact_match_wants_every_token_and_a_word_that_ends(says: list[int], exact: bool) -> None:
    question = Question(torch.tensor([1, 2]), torch.tensor([5, 6]), torch.tensor([8]))
    logits = torch.nn.functional.one_hot(torch.tensor([0, *says]), 10).float()
    assert is_exact(logits, question, {7: "ade", 8: " x", 9: "\n"}.__getitem__) is exact
