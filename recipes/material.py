"""Documents for fitting and judging a projector, out of what a fresh virtual environment holds: no download, no corpus.

    code    windows of Python files (standard library, sympy, networkx, numpy: torch and transformers bring them)
    prose   docstrings of one file after another, and the chapters of Python's language reference
    chat    conversations in the target's own chat template: what does this do, show me the code
    facts   lists of `Name: value` between sentences, then questions with their answers

A file gives documents either to training or to the report, never to both: the choice is a hash of its name, so that adding files
moves none. Everything else follows from the seed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import sysconfig
import textwrap
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.c2c.fitting.facts import FactDocument, FactWriter

PACKAGES = ("sympy", "networkx", "numpy")
LENGTH, PREFIX = 512, 448
KINDS = ("code", "prose", "chat", "facts")
_SKIP = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "turtledemo"})
_BYTES = range(4000, 300_000)
_HELD_ONE_IN = 12
_CHARACTERS = 12 * LENGTH
"""Enough for LENGTH tokens of any text; tokenising whole files would take minutes."""
_SYSTEM = ("You are a helpful assistant.", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")


class Material:
    """Draws documents with one tokenizer. `held` chooses the side: training, or what training has never seen."""

    def __init__(self, tokenizer: Any, *, held: bool, seed: int) -> None:
        self._tokenizer, self._held, self._seed = tokenizer, held, seed

    def draw(self, kind: str, count: int) -> list[Tensor]:
        """`count` documents; a file gives its second only when each has given one."""
        makers: dict[str, Callable[[int], list[Tensor]]] = {
            "code": self._code,
            "prose": self._prose,
            "chat": self._chat,
            "facts": lambda n: [f.told()[:LENGTH] for f in self.facts(n)],
        }
        return makers[kind](count)

    def facts(self, count: int, *, facts: int = 12, questions: int = 8) -> list[FactDocument]:
        """Fact documents of PREFIX tokens among sentences of this side's prose."""
        lines = [s.strip() for text in self._prose_texts for s in text.split("\n") if 24 < len(s.strip()) < 90]
        sentences = self._rng("sentences").sample(lines, min(600, len(lines)))
        writer = FactWriter(self._tokenizer, sentences=sentences, seed=self._seed + (7919 if self._held else 0))
        return [writer.document(PREFIX, facts=facts, questions=questions) for _ in range(count)]

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self._seed} {what} {self._held}")

    @cached_property
    def _files(self) -> list[Path]:
        found = [f for f in _sources() if _is_held(f.name) == self._held and f.stat().st_size in _BYTES]
        self._rng("files").shuffle(found)
        return found

    @cached_property
    def _prose_texts(self) -> list[str]:
        from pydoc_data.topics import topics  # heavy, and only needed here

        chapters = [str(text) for name, text in sorted(topics.items()) if _is_held(name) == self._held]
        documented = ["\n\n".join(doc for _, doc, _ in _functions(f)) for f in self._files]
        found = [t for t in [*chapters, *documented] if len(t) > 1500]
        self._rng("prose").shuffle(found)
        return found

    def _code(self, count: int) -> list[Tensor]:
        return self._windows(
            lambda i: self._files[i].read_text(encoding="utf-8", errors="ignore"), len(self._files), count
        )

    def _prose(self, count: int) -> list[Tensor]:
        return self._windows(self._prose_texts.__getitem__, len(self._prose_texts), count)

    def long(self, count: int, length: int) -> list[Tensor]:
        """Windows of `length` tokens of Python files."""
        return self._windows(
            lambda i: self._files[i].read_text(encoding="utf-8", errors="ignore"), len(self._files), count, length
        )

    def _windows(self, text: Callable[[int], str], texts: int, count: int, length: int = LENGTH) -> list[Tensor]:
        """One window at a random place of each text in turn."""
        rng, found, turn = self._rng("windows"), list[Tensor](), 0
        characters = _CHARACTERS * length // LENGTH
        while len(found) < count and turn < 20 * max(texts, count):
            whole = text(turn % texts)
            start = rng.randint(0, max(0, len(whole) - characters))
            ids = self._encode(whole[start : start + characters])
            if len(ids) >= length:
                found.append(ids[:length])
            turn += 1
        return found

    def _chat(self, count: int) -> list[Tensor]:
        rng, found = self._rng("chat"), list[Tensor]()
        turn = 0
        while len(found) < count and turn < 20 * max(count, len(self._files)):
            functions = _functions(self._files[turn % len(self._files)])
            turn += 1
            rng.shuffle(functions)
            messages = [{"role": "system", "content": rng.choice(_SYSTEM)}]
            for name, doc, source in functions:
                messages += _turn(rng, name, doc, source)
                ids = self._encode(self._tokenizer.apply_chat_template(messages, tokenize=False))
                if len(ids) >= LENGTH:
                    found.append(ids[:LENGTH])
                    break
        return found

    def _encode(self, text: str) -> Tensor:
        return torch.tensor(self._tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


def _turn(rng: random.Random, name: str, doc: str, source: str) -> list[dict[str, str]]:
    """One question and its answer, both taken from a function."""
    summary = " ".join(doc.split("\n\n")[0].split())
    if rng.random() < 0.5 or len(source) > 1500:
        asked = rng.choice((f"What does `{name}` do?", f"Explain {name} to me.", f"When would I use {name}?"))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": doc[:900]}]
    asked = rng.choice(
        (f"Write a function `{name}`. {summary}", f"Show me the code of {name}.", f"Implement this: {summary}")
    )
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": f"```python\n{source}\n```"}]


def _sources() -> list[Path]:
    """All Python files that documents may come from, in a fixed order."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            roots.append(Path(spec.origin).parent)
    return [f for root in roots for f in sorted(root.rglob("*.py")) if not _SKIP & set(f.relative_to(root).parts)]


def _is_held(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_ONE_IN == 0


def _functions(path: Path) -> list[tuple[str, str, str]]:
    """(name, docstring, source) of every documented class and function of a file."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found, lines = [], text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 60:
                source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found.append((node.name, doc, textwrap.dedent(source)))
    return found
