"""Gemini's cached contents over HTTP, Anthropic's break points, and where a beginning ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from moonpool.conductor.caching import anthropic, proxy
from moonpool.conductor.caching.anthropic import Cached, break_points
from moonpool.conductor.caching.backend import beginning
from moonpool.conductor.caching.pin import PinLimits
from moonpool.conductor.prompts import PromptBody, TextReader
from moonpool.errors import NotFound, RequestError
from tests.conductor.caching_site import HELLO, MODEL, SYSTEM, FakeBackend, Site

CACHES = "/v1beta/cachedContents"
BOOK = {"parts": [{"text": SYSTEM["content"]}]}
QUESTION = {"role": "user", "parts": [{"text": HELLO["content"]}]}
DECLARED = [{"functionDeclarations": [{"name": "look", "parameters": {"type": "object"}}]}]


@pytest.fixture
def site() -> Site:
    return Site()


def cache(site: Site, **fields: Any) -> dict[str, Any]:
    body = {"model": f"models/{MODEL}", "systemInstruction": BOOK, **fields}
    answer = site.client.post(CACHES, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# -- Gemini


def test_cached_content_is_made_and_told(site: Site) -> None:
    made = cache(site, displayName="book", ttl="60s", tools=DECLARED)
    tokens = made["usageMetadata"]["totalTokenCount"]
    assert tokens > 1000
    assert made == {
        "name": made["name"],
        "model": f"models/{MODEL}",
        "displayName": "book",
        "createTime": "2023-11-14T22:13:20.000000Z",
        "updateTime": "2023-11-14T22:13:20.000000Z",
        "expireTime": "2023-11-14T22:14:20.000000Z",
        "usageMetadata": {"totalTokenCount": tokens},
    }
    (warmed,) = site.backend.asked
    assert warmed["messages"] == [SYSTEM]
    assert warmed["tools"] == [{"type": "function", "function": DECLARED[0]["functionDeclarations"][0]}]
    url = f"/v1beta/{made['name']}"
    assert site.client.get(url).json()["name"] == made["name"]
    patched = site.client.patch(url, params={"updateMask": "ttl"}, json={"ttl": "90.5s"}).json()
    assert patched["expireTime"] == "2023-11-14T22:14:50.500000Z"
    patched = site.client.patch(url, json={"expireTime": "2023-11-15T00:14:00+02:00"}).json()
    assert patched["expireTime"] == "2023-11-14T22:14:00.000000Z"
    site.backend.time += 40
    assert site.client.get(url).json()["error"]["status"] == "NOT_FOUND"
    assert site.client.get(CACHES).json() == {}
    assert site.client.patch(url, json={"ttl": "90s"}).status_code == 404, "what expired is gone"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": MODEL}, "model"),
        ({"systemInstruction": None}, "contents"),
        ({"systemInstruction": {"parts": []}}, "parts"),
        ({"systemInstruction": {"parts": [{"text": "short"}]}}, "too short"),
        ({"displayName": "x" * 129}, "displayName"),
        ({"ttl": "60s", "expireTime": "2030-01-01T00:00:00Z"}, "not both"),
        ({"ttl": 60}, "ttl"),
        ({"ttl": "-5s"}, "ttl"),
        ({"ttl": "0s"}, "ttl"),
        ({"expireTime": "2030-01-01T00:00:00"}, "zone"),
        ({"expireTime": "2020-01-01T00:00:00Z"}, "ahead"),
        ({"expireTime": "soon"}, "expireTime"),
        ({"contents": [{"role": "x", "parts": [{"text": "t"}]}]}, "role"),
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, "inlineData"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0]"),
        ({"toolConfig": {}}, "toolConfig"),
        ({"kmsKeyName": "x"}, "kmsKeyName"),
    ],
)
def test_limits_of_cached_content(site: Site, fields: dict[str, Any], named: str) -> None:
    answer = site.client.post(CACHES, json={"model": f"models/{MODEL}", "systemInstruction": BOOK, **fields})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
    assert answer.json()["error"]["status"] == "INVALID_ARGUMENT"
    assert named in answer.json()["error"]["message"]
    assert len(site.backend.pins) == 0


def test_cached_contents_page(site: Site) -> None:
    names = []
    for _ in range(5):
        site.backend.time += 1
        names.append(cache(site)["name"])
    found: list[str] = []
    query: dict[str, str] = {"pageSize": "2"}
    while True:
        page = site.client.get(CACHES, params=query).json()
        found += [c["name"] for c in page["cachedContents"]]
        if "nextPageToken" not in page:
            break
        query["pageToken"] = page["nextPageToken"]
    assert found == names
    for bad in ({"pageToken": "x"}, {"pageSize": "x"}):
        assert site.client.get(CACHES, params=bad).status_code == 400
    assert site.client.patch(f"/v1beta/{names[0]}", params={"updateMask": "displayName"}, json={}).status_code == 400
    assert site.client.patch(f"/v1beta/{names[0]}", json={}).status_code == 400
    assert site.client.delete(f"/v1beta/{names[0]}").json() == {}
    assert site.client.delete(f"/v1beta/{names[0]}").status_code == 404


def test_generate_content_begins_with_it(site: Site) -> None:
    made = cache(site, tools=DECLARED)
    body = {"contents": [QUESTION], "cachedContent": made["name"], "generationConfig": {"maxOutputTokens": 5}}
    url = f"/v1beta/models/{MODEL}:generateContent"
    answer = site.client.post(url, json=body).json()
    assert answer["candidates"][0]["content"] == {"role": "model", "parts": [{"text": "The butler."}]}
    pin = next(iter(site.backend.pins))
    assert answer["usageMetadata"]["cachedContentTokenCount"] == pin.saves > 1000
    asked = site.backend.asked[-1]
    assert (asked["messages"], asked["max_tokens"]) == ([SYSTEM, HELLO], 5)
    assert len(asked["tools"]) == 1
    plain = site.client.post(url, json={"contents": [QUESTION]}).json()
    assert "cachedContentTokenCount" not in plain["usageMetadata"]
    clash: list[dict[str, Any]] = [
        {"systemInstruction": BOOK},
        {"tools": DECLARED},
        {"safetySettings": []},
        {"contents": []},
    ]
    for more in clash:
        assert site.client.post(url, json={**body, **more}).status_code == 400
    assert site.client.post("/v1beta/models/other:generateContent", json=body).status_code == 400
    assert site.client.post(url, json={**body, "cachedContent": "cachedContents/x"}).status_code == 404
    site.backend.broken = True
    assert site.client.post(url, json=body).status_code == 502


def test_a_chat_completion_may_begin_with_it(site: Site) -> None:
    made = cache(site)
    extra = {"google": {"cached_content": made["name"]}}
    use = proxy.apply(site.backend, "", {"model": MODEL, "messages": [HELLO], "extra_body": extra}, {})
    assert (use.changed, use.body) == (True, {"model": MODEL, "messages": [SYSTEM, HELLO]})
    assert proxy.holders(site.backend, use, site.backend.request(use.body)) == {"i0"}
    clash: list[dict[str, Any]] = [{"model": "other"}, {"tools": [{}]}, {"messages": [SYSTEM, HELLO]}]
    for more in clash:
        with pytest.raises(RequestError):
            proxy.apply(site.backend, "", {"model": MODEL, "messages": [HELLO], "extra_body": extra, **more}, {})
    with pytest.raises(NotFound):
        proxy.apply(site.backend, "other", {"model": MODEL, "messages": [HELLO], "extra_body": extra}, {})


def test_turns_and_calls_of_gemini(site: Site) -> None:
    contents = [
        {"role": "user", "parts": [BOOK["parts"][0], {"text": "Look."}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"page": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"text": "x"}}}]},
    ]
    cache(site, systemInstruction=None, contents=contents)
    (asked,) = site.backend.asked
    assert [m["role"] for m in asked["messages"]] == ["user", "assistant", "tool"]
    assert asked["messages"][0]["content"] == SYSTEM["content"] + "Look."
    assert asked["messages"][1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"page":1}'}
    assert asked["messages"][2] == {"role": "tool", "tool_call_id": "look", "content": '{"text":"x"}'}


# -- Anthropic

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def text(said: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": said} | ({} if control is None else {"cache_control": control})


def body(*turns: Any, system: Any = (), tools: Any = (), **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    return {"model": MODEL, "system": system or [], "tools": list(tools), "messages": messages, **more}


def test_break_points_are_in_the_order_of_the_prompt() -> None:
    tool = {"name": "look", "cache_control": HOUR}
    found = break_points(
        body(
            [text("a", MARK), text("b")],
            "c",
            "d",
            system=[text("s"), text("t", HOUR)],
            tools=[tool],
            cache_control=MARK,
        )
    )
    assert [(p.position, p.ttl_s) for p in found] == [(1, 3600), (3, 3600), (4, 300), (7, 300)]
    assert (found[0].messages, found[0].tools) == ([], [{"name": "look"}])
    assert found[1].messages == [{"role": "system", "content": "st"}]
    assert found[2].messages[1:] == [{"role": "user", "content": "a"}]
    assert found[3].messages[1:] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]


@pytest.mark.parametrize(
    "bad",
    [
        body([text(str(i), MARK) for i in range(5)]),
        body([text("a", MARK), text("b", HOUR)]),
        body([text("", MARK)]),
        body("a", [{"type": "thinking", "thinking": "x", "cache_control": MARK}]),
        body([text("a", {"type": "persistent"})]),
        body([text("a", {"type": "ephemeral", "ttl": "2h"})]),
        body([text("a", {"type": "ephemeral", "ttl": 300})]),
        body([text("a", "x")]),
        body("a", system=5),
        {"model": MODEL},
    ],
)
def test_break_points_that_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        break_points(bad)


def lookup(backend: FakeBackend, asked: dict[str, Any], **more: Any) -> Cached:
    return asyncio.run(anthropic.cached(backend, "", asked, **more))


def test_what_is_written_is_read_while_it_lasts() -> None:
    backend = FakeBackend()
    book, first = text(SYSTEM["content"], HOUR), [text("x" * 8000), text("y" * 4000, MARK)]
    asked = body(first, system=[book])
    wrote = lookup(backend, asked)
    assert (wrote.read, wrote.pin) == (0, None)
    assert wrote.created["1h"] > 1000
    assert wrote.created["5m"] > 2900
    total = sum(wrote.created.values()) + 50
    assert wrote.usage(total, 7) == {
        "input_tokens": 50,
        "cache_creation_input_tokens": total - 50,
        "cache_read_input_tokens": 0,
        "cache_creation": {
            "ephemeral_5m_input_tokens": wrote.created["5m"],
            "ephemeral_1h_input_tokens": wrote.created["1h"],
        },
        "output_tokens": 7,
    }
    again = lookup(backend, asked)
    assert again.read == total - 50
    assert sum(again.created.values()) == 0
    backend.time += 299
    lookup(backend, asked)  # use renews it
    backend.time += 299
    assert lookup(backend, asked).read == total - 50
    backend.time += 300
    assert lookup(backend, asked).read == wrote.created["1h"]
    backend.time += 3600
    assert lookup(backend, asked).read == 0


def test_it_looks_back_twenty_blocks() -> None:
    backend, start = FakeBackend(), [text("x" * 8000, MARK)]
    wrote = lookup(backend, body(start))
    for further, read in ((19, sum(wrote.created.values())), (20, 0)):
        longer = [text("x" * 8000), *[text(f"{further} {i}") for i in range(further - 1)], text("end", MARK)]
        assert lookup(backend, body(longer)).read == read, further


def test_the_longest_is_read_and_the_rest_is_written() -> None:
    backend = FakeBackend()
    one, two = [text("x" * 8000, MARK)], [text("x" * 8000, MARK), text("y" * 8000, MARK)]
    wrote = sum(lookup(backend, body(one)).created.values())
    found = lookup(backend, body(two))
    assert found.read == wrote
    assert 1900 < sum(found.created.values()) < 2100
    assert lookup(backend, body(two)).read > 3900


def test_the_short_is_not_kept_and_the_quota_is_no_error() -> None:
    backend = FakeBackend()
    assert lookup(backend, body([text("x" * 3000, MARK)])) == Cached(None, 0, {})
    assert lookup(backend, body([text("x" * 3000, MARK)]), min_tokens=512).created != {}
    full = FakeBackend(PinLimits(owner_pins=0))
    lookup(full, body([text("x" * 8000, MARK)]))
    assert len(full.pins) == 0
    assert lookup(backend, body("x" * 8000)) == Cached(None, 0, {})


# -- where a beginning ends


def test_every_prompt_that_begins_so_has_its_blocks() -> None:
    reader, rng = TextReader(MODEL), random.Random(4)
    for length in range(900, 1200):
        messages = [{"role": "system", "content": "".join(rng.choices("ab ", k=length))}]
        found = beginning(reader, "", MODEL, messages, [])
        assert len(found.chain) >= length // 256 - 1
        for role, said in (("user", "Z" * 300), ("assistant", "Z" * 300), ("tool", "?" * 300)):
            follower = {"role": role, "content": said}
            whole = reader.read(PromptBody(model=MODEL, messages=[*messages, follower]), "")
            assert list(whole.chain.keys()[: len(found.chain)]) == list(found.chain.keys())


class InTurn(TextReader):
    """A template that wants user and assistant in turn."""

    def read(self, body: PromptBody, tenant: str) -> Any:
        roles = [m["role"] for m in body.messages or []]
        if any(a == b for a, b in itertools.pairwise(roles)):
            raise RequestError("the roles must take turns")
        return super().read(body, tenant)


def test_templates_that_want_the_roles_in_turn() -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    assert len(beginning(InTurn(MODEL), "", MODEL, messages, []).chain) == 3
    with pytest.raises(RequestError, match="turns"):
        beginning(InTurn(MODEL), "", MODEL, [*messages, *messages], [])
