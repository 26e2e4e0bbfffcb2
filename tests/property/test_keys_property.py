"""Distinct identities are distinct keys, the same identity is the same key in every process, and texts parse back."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.keys import KVIdentity, PageKey, block_hashes, digest

words = st.text(max_size=6)
identities = st.builds(
    KVIdentity,
    model=words,
    revision=words,
    tokenizer=words,
    kv_dtype=words,
    page_size=st.integers(1, 64),
    layer_start=st.integers(0, 3),
    layer_end=st.integers(4, 9),
    tp_rank=st.integers(0, 3),
    tp_size=st.integers(1, 4),
    pp_rank=st.integers(0, 3),
    pp_size=st.integers(1, 4),
    adapter=words,
    adapter_digest=words,
    salt=words,
    tenant=words,
)
hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
keys = st.builds(PageKey, hexes, st.integers(0, 10**9 - 1), hexes, st.one_of(st.just(""), hexes))


@given(identities, identities, st.lists(st.integers(0, 2**31), min_size=64, max_size=64))
def test_distinct_identities_have_distinct_keys(a: KVIdentity, b: KVIdentity, tokens: list[int]) -> None:
    same = a == b
    assert (a.page_keys(tokens)[0].text == b.page_keys(tokens)[0].text) is same


@given(identities, st.sampled_from(KVIdentity.__struct_fields__))
def test_every_field_takes_part(identity: KVIdentity, field: str) -> None:
    value = getattr(identity, field)
    other = msgspec.structs.replace(identity, **{field: value + 1 if isinstance(value, int) else value + "x"})
    tokens = list(range(128))
    assert identity.page_keys(tokens)[0] != other.page_keys(tokens)[0]


@given(st.lists(st.tuples(words, words), max_size=4), st.lists(st.tuples(words, words), max_size=4))
def test_no_two_field_lists_collide_by_concatenation(a: list[tuple[str, str]], b: list[tuple[str, str]]) -> None:
    assert (digest("t", a) == digest("t", b)) is (a == b)


@given(keys)
def test_texts_parse_back(key: PageKey) -> None:
    assert PageKey.parse(key.text) == key
    assert PageKey.parse(key.native.text) == key.native


@given(st.text(max_size=40))
def test_other_texts_are_no_pages(text: str) -> None:
    found = PageKey.parse(text)
    assert found is None or found.text == text


@given(keys, st.sampled_from([" ", "\n", "x", "~"]))
def test_nothing_may_follow_a_key(key: PageKey, more: str) -> None:
    assert PageKey.parse(key.text + more) is None


@given(st.lists(st.integers(0, 2**40), max_size=60), st.integers(1, 8))
def test_block_hashes_cover_the_whole_prefix(tokens: list[int], page: int) -> None:
    hashes = block_hashes(tokens, page, "seed")
    assert len(hashes) == len(tokens) // page
    assert hashes[:-1] == block_hashes(tokens[: (len(hashes) - 1) * page], page, "seed")
    if hashes:
        changed = [tokens[0] + 1, *tokens[1:]]
        assert not set(hashes) & set(block_hashes(changed, page, "seed"))


@settings(max_examples=1, deadline=None)
@given(st.just(KVIdentity(model="m", revision="r", tokenizer="t", layer_end=4, salt="é", tenant="z")))
def test_same_key_in_another_process(identity: KVIdentity) -> None:
    code = (
        "import sys, msgspec; from moonpool.keys import KVIdentity\n"
        "i = msgspec.json.decode(sys.argv[1], type=KVIdentity)\n"
        "print([k.text for k in i.page_keys(list(range(40)))])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, msgspec.json.encode(identity).decode()],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout
    assert out.strip() == str([k.text for k in identity.page_keys(list(range(40)))])
