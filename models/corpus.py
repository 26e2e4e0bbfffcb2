"""Text and tokenizer of the bundled pair: everything comes with Python or is generated here, nothing is downloaded."""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from moonpool.c2c.fitting.facts_words import NAMES, VALUES

IntArray = npt.NDArray[np.int64]

VOCABULARY = 2048
END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, IM_START, IM_END)
ROLES = ("system", "user", "assistant")

# A line-initial `Name:` is one pre-token, and a newline never merges with its neighbours: the tokens of a document
# are then the same whether or not a question follows it.
PRE_TOKEN = r"[A-Z][a-z]+:(?!\S)|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\r?\n|[^\S\n]+(?!\S)|[^\S\n]+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)

_SKIP = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo"})


def _stdlib_sources() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if not _SKIP & set(path.relative_to(root).parts)]


def _documented(path: Path) -> list[tuple[str, str]]:
    """(qualified name, docstring) of the module and of everything in it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 40:
                name = path.stem if isinstance(node, ast.Module) else f"{path.stem}.{node.name}"
                found.append((name, doc))
    return found


def _topics() -> list[str]:
    from pydoc_data.topics import topics  # heavy, and only needed here

    return [str(text) for text in topics.values()]


def _licence() -> list[str]:
    path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    return [path.read_text(encoding="utf-8")] if path.is_file() else []


def _question(name: str, doc: str) -> str:
    """A docstring's first paragraph as a chat turn."""
    summary = " ".join(doc.split("\n\n")[0].split())
    return (
        f"{IM_START}user\nWhat does {name} do?{IM_END}\n{IM_START}assistant\n{summary}{IM_END}\n"
        if len(summary) < 400
        else ""
    )


_SENTENCES = (
    "The {a} stood near the {b}.",
    "{n} carried the {a} across the {b} and came back before dark.",
    "Nobody had seen the {a} since {n} left for the {b}.",
    "In the morning {n} wrote to {m} about the {a}.",
    "A {a} is not a {b}, said {m}.",
    "{m} and {n} talked for an hour about the weather, the road and the {b}.",
    "It rained all day, and the old {a} was wet.",
    "There was a {a} on the wall and a {b} under it.",
    "When the meeting was over, {n} put the list away.",
    "The next page says nothing about the {a}.",
)


def sentences(rng: random.Random, count: int) -> str:
    """Ordinary sentences in which the facts' words occur without being facts."""
    out = []
    for _ in range(count):
        n, m = rng.sample(NAMES, 2)
        a, b = rng.sample(VALUES, 2)
        out.append(rng.choice(_SENTENCES).format(n=n, m=m, a=a, b=b))
    return " ".join(out)


def texts(seed: int) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts), shuffled; every twentieth documented text is held out."""
    rng = random.Random(seed)
    documented = [pair for path in _stdlib_sources() for pair in _documented(path)]
    plain = _topics() + _licence() + [doc for _, doc in documented]
    plain = list(dict.fromkeys(plain))
    rng.shuffle(plain)
    held = plain[::20]
    banned = set(held)
    made = [sentences(rng, rng.randint(2, 8)) for _ in range(1500)]
    asked = [_question(name, doc) for name, doc in documented if doc not in banned]
    train = [text for i, text in enumerate(plain) if i % 20] + made + [q for q in asked if q]
    rng.shuffle(train)
    return train, held


def build_tokenizer(corpus: list[str]) -> Tokenizer:
    """Byte-level BPE; the facts' words and the roles are whole tokens beside the learnt merges."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    whole = [f"{name}:" for name in NAMES] + [f"Ġ{value}" for value in VALUES] + list(ROLES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [re.sub(r"<\|\w+\|>", "", text) for text in corpus],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(whole),
            special_tokens=list(SPECIALS),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    return _with_whole_words(tokenizer, whole)


def _with_whole_words(tokenizer: Tokenizer, whole: list[str]) -> Tokenizer:
    """`ignore_merges` lets a pre-token that is itself in the vocabulary stand without a merge for it."""
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for word in whole:
        vocabulary.setdefault(word, len(vocabulary))
    state["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(state))


@dataclass(frozen=True)
class Words:
    """Token ids the generators write directly."""

    names: IntArray
    values: IntArray
    newline: int
    end: int
    im_start: int
    im_end: int
    roles: dict[str, int]
    size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        def one(text: str) -> int:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert len(ids) == 1, f"{text!r} is {len(ids)} tokens"
            return int(ids[0])

        return cls(
            names=np.array([one(f"{name}:") for name in NAMES]),
            values=np.array([one(f" {value}") for value in VALUES]),
            newline=one("\n"),
            end=one(END),
            im_start=one(IM_START),
            im_end=one(IM_END),
            roles={role: one(role) for role in ROLES},
            size=tokenizer.get_vocab_size(),
        )


def encode_all(tokenizer: Tokenizer, corpus: list[str]) -> IntArray:
    """All texts in one row of ids, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(corpus, add_special_tokens=False)
    return np.concatenate([np.array([*item.ids, end], dtype=np.int64) for item in encoded])
