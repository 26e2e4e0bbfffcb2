"""Files → documents: split by file, seeded, long enough."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moonpool.c2c.fitting.documents import Text, read_texts, split, windows
from moonpool.errors import ConfigError
from tests.c2c.tiny import text, tokenizer


def test_no_file_is_on_both_sides() -> None:
    t = tokenizer()
    texts = [Text(f"{i}", text(i)) for i in range(8)]
    found = split(texts, t, length=64, train_tokens=640, choose=2, report=2, seed=5)
    assert (len(found.train), len(found.choose), len(found.report)) == (10, 2, 2)
    whole = [t.encode(x.content) for x in texts]

    def owner(document: torch.Tensor) -> int:
        return next(i for i, ids in enumerate(whole) if f",{document.tolist()}"[2:-1] in f"{ids}")

    sides = [{owner(d) for d in part} for part in (found.train, found.choose, found.report)]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]
    assert {int(label) for label in found.fitted} == sides[0] | sides[1]
    assert {int(label) for label in found.judged} == sides[2]


def test_the_report_documents_do_not_depend_on_the_training_size() -> None:
    texts = [Text(f"{i}", text(i)) for i in range(8)]
    a, b = (split(texts, tokenizer(), length=64, train_tokens=n, choose=2, report=2, seed=5) for n in (64, 640))
    assert all(torch.equal(x, y) for x, y in zip(a.report, b.report, strict=True))


def test_windows_do_not_overlap_and_short_texts_give_none() -> None:
    t = tokenizer()
    found = windows(text(0), t, 50, random.Random(0), most=3)
    assert [len(w) for w in found] == [50] * 3
    assert len({tuple(w.tolist()) for w in found}) == 3
    assert windows("short", t, 50, random.Random(0)) == []


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="too little text"):
        split([Text("0", text(0))], tokenizer(), length=64, train_tokens=64, choose=1, report=1, seed=0)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.bin"):
        read_texts([tmp_path / "x.bin"])
    with pytest.raises(ConfigError, match="missing"):
        read_texts([tmp_path / "missing"])
