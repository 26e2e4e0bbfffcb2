"""The caching APIs over HTTP, before a backend without a fleet."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.caching import openai, proxy
from moonpool.conductor.caching.pin import PinLimits
from moonpool.errors import NotFound, RequestError
from tests.conductor.caching_site import HELLO, MODEL, SYSTEM, Site

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def site() -> Site:
    return Site()


def ask(site: Site, body: dict[str, Any], owner: str = "", cached: int | None = None, **headers: str) -> dict[str, str]:
    """As the front does it → the reply's headers."""
    names = {k.replace("_", "-"): v for k, v in headers.items()}
    use = proxy.apply(site.backend, owner, body, names)
    request = site.backend.request(use.body, owner)
    return proxy.settle(site.backend, use, request, request.tokens if cached is None else cached)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), **more}


# -- Moonshot


def test_a_cache_is_made_warmed_and_told(site: Site) -> None:
    made = site.make(name="book", description="d", metadata={"k": "v"}, ttl=60, tools=[TOOL], tags=["a", "b"])
    assert made["id"].startswith("cache-")
    assert (made["object"], made["status"]) == ("context_cache_object", "pending")
    assert made["expired_at"] - made["created_at"] == 60
    assert made["tokens"] > 1000
    assert (made["messages"], made["tools"], made["tags"]) == ([SYSTEM], [TOOL], ["a", "b"])
    (warmed,) = site.backend.asked
    assert (warmed["max_tokens"], warmed["messages"], warmed["tools"]) == (1, [SYSTEM], [TOOL])
    found = site.client.get(f"/v1/caching/{made['id']}").json()
    assert found == {**made, "status": "ready"}
    site.backend.held.clear()
    assert site.client.get(f"/v1/caching/{made['id']}").json()["status"] == "pending"


def test_one_that_cannot_be_warmed_says_why(site: Site) -> None:
    site.backend.broken = True
    made = site.make()
    found = site.client.get(f"/v1/caching/{made['id']}").json()
    assert (found["status"], found["error"]) == ("error", {"type": "cache_error", "message": "nobody answers"})
    site.backend.broken = False
    assert site.client.put(f"/v1/caching/{made['id']}", json={"ttl": 5}).json()["status"] == "pending"
    assert site.client.get(f"/v1/caching/{made['id']}").json()["status"] == "ready"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": None}, "model"),
        ({"model": "other"}, "other"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"role": "cache", "content": "cache_id=x"}]}, "messages"),
        ({"messages": [HELLO]}, "too short"),
        ({"tools": {}}, "tools"),
        ({"name": "x" * 257}, "name"),
        ({"description": "x" * 513}, "description"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"ttl": 3601}, "ttl"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": "60"}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": 60, "expired_at": 1_700_000_060}, "not both"),
        ({"expired_at": 1_600_000_000}, "expired_at"),
        ({"expired_at": 1_700_003_601}, "expired_at"),
        ({"tags": ["1"]}, "tag"),
    ],
)
def test_limits_of_a_cache(site: Site, fields: dict[str, Any], named: str) -> None:
    answer = site.client.post("/v1/caching", json={"model": MODEL, "messages": [SYSTEM], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]
    assert len(site.backend.pins) == 0
    assert site.backend.asked == []


def test_bodies_that_are_none(site: Site) -> None:
    for raw in (b"{", b"[]", b"\xff"):
        for path in ("/v1/caching", "/v1beta/cachedContents"):
            assert site.client.post(path, content=raw).status_code == 400


def test_lists_page_and_filter(site: Site) -> None:
    ids = []
    for i in range(4):
        site.backend.time += 1
        ids.append(site.make(metadata={"n": str(i % 2)})["id"])

    def listed(**query: str) -> list[int]:
        found = site.client.get("/v1/caching", params=query).json()
        assert found["object"] == "list"
        return [ids.index(c["id"]) for c in found["data"]]

    assert listed() == [3, 2, 1, 0]
    assert listed(limit="2", order="asc") == [0, 1]
    assert listed(limit="2", order="asc", after=ids[1]) == [2, 3]
    assert listed(before=ids[1]) == [3, 2]
    assert listed(**{"metadata[n]": "1"}) == [3, 1]
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}):
        assert site.client.get("/v1/caching", params=query).status_code == 400
    assert site.client.get("/v1/caching", params={"after": "cache-x"}).status_code == 404


def test_what_is_absent_or_anothers_is_404(site: Site) -> None:
    made = site.make()
    other = {"x-moonpool-tenant": "other"}
    for id_, headers in (("cache-no", {}), (made["id"], other)):
        for method in ("GET", "PUT", "DELETE"):
            answer = site.client.request(method, f"/v1/caching/{id_}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "resource_not_found_error")
    gone = site.client.delete(f"/v1/caching/{made['id']}")
    assert gone.json() == {"deleted": True, "id": made["id"], "object": "context_cache_object.deleted"}
    assert site.client.get(f"/v1/caching/{made['id']}").status_code == 404


def test_a_cache_expires_and_comes_back(site: Site) -> None:
    made = site.make(ttl=60)
    site.backend.time += 60
    assert site.client.get(f"/v1/caching/{made['id']}").json()["status"] == "inactive"
    assert ask(site, chat(SYSTEM, HELLO), x_msh_context_cache=made["id"]) == {}
    again = site.client.put(f"/v1/caching/{made['id']}", json={"ttl": 100, "metadata": {"x": "y"}}).json()
    assert (again["status"], again["metadata"]) == ("ready", {"x": "y"}), "its blocks are still there"
    assert again["expired_at"] == site.backend.time + 100
    assert ask(site, chat(SYSTEM, HELLO), x_msh_context_cache=made["id"]) != {}
    site.backend.time += 100 + site.backend.pins.limits.keep_s
    assert site.client.get(f"/v1/caching/{made['id']}").status_code == 404


def test_quota() -> None:
    site = Site(PinLimits(owner_pins=2, pins=3))
    for _ in range(2):
        site.make()
    full = site.client.post("/v1/caching", json={"model": MODEL, "messages": [SYSTEM]})
    assert (full.status_code, full.json()["error"]["type"]) == (429, "exceeded_current_quota_error")
    for status in (200, 503):
        body = {"model": f"models/{MODEL}", "contents": [{"role": "user", "parts": [{"text": SYSTEM["content"]}]}]}
        answer = site.client.post("/v1beta/cachedContents", json=body, headers={"x-moonpool-tenant": "b"})
        assert answer.status_code == status
    assert answer.json()["error"]["status"] == "UNAVAILABLE"


def test_tags(site: Site) -> None:
    made = site.make()
    set_ = site.client.post("/v1/caching/refs/tags", json={"tag": "my-tag", "cache_id": made["id"]})
    now = int(site.backend.time)
    shape = {"cache_id": made["id"], "created_at": now, "object": "cache_object.tag", "owned_by": "", "tag": "my-tag"}
    assert set_.json() == shape
    assert site.client.get("/v1/caching/refs/tags/my-tag").json() == shape
    assert site.client.get("/v1/caching/refs/tags/my-tag/content").json()["id"] == made["id"]
    site.backend.time += 1
    other = site.make()
    site.client.post("/v1/caching/refs/tags", json={"tag": "second", "cache_id": other["id"]})
    site.client.post("/v1/caching/refs/tags", json={"tag": "third", "cache_id": other["id"]})

    def listed(**query: str) -> list[str]:
        return [t["tag"] for t in site.client.get("/v1/caching/refs/tags", params=query).json()["data"]]

    assert listed() == ["third", "second", "my-tag"]
    assert listed(order="asc", limit="1", after="my-tag") == ["second"]
    full = site.client.post("/v1/caching/refs/tags", json={"tag": "fourth", "cache_id": made["id"]})
    assert full.status_code == 429
    for body, status in (({"tag": "x" * 129, "cache_id": made["id"]}, 400), ({"tag": "x", "cache_id": "cache-x"}, 404)):
        assert site.client.post("/v1/caching/refs/tags", json=body).status_code == status
    for _ in range(2):  # also where there is none any more
        deleted = site.client.delete("/v1/caching/refs/tags/my-tag")
        shape = {"deleted": True, "object": "cache_object.tag.deleted", "owned_by": "", "tag": "my-tag"}
        assert (deleted.status_code, deleted.json()) == (200, shape)
    assert site.client.get("/v1/caching/refs/tags/my-tag").status_code == 404
    site.client.delete(f"/v1/caching/{other['id']}")
    assert listed() == []


def test_tokens_are_counted(site: Site) -> None:
    body = {"model": MODEL, "messages": [HELLO]}
    found = site.client.post("/v1/tokenizers/estimate-token-count", json=body)
    assert found.json() == {"data": {"total_tokens": site.backend.request(chat(HELLO)).tokens}}


# -- its use


def test_a_header_names_it(site: Site) -> None:
    made = site.make(ttl=60)
    saves = next(iter(site.backend.pins)).saves
    headers = ask(site, chat(SYSTEM, HELLO), x_msh_context_cache=made["id"])
    assert headers == {
        "msh-context-cache-id": made["id"],
        "msh-context-cache-token-saved": str(saves),
        "msh-context-cache-token-exp": str(made["expired_at"]),
    }
    assert saves > 0.9 * made["tokens"]
    site.backend.time += 30
    reset = ask(site, chat(SYSTEM, HELLO), x_msh_context_cache=made["id"], x_msh_context_cache_reset_ttl="100")
    assert int(reset["msh-context-cache-token-exp"]) == site.backend.time + 100
    found = site.client.get(f"/v1/caching/{made['id']}").json()
    assert (found["uses"], found["tokens_saved"]) == (2, 2 * saves)


def test_misses_are_served_without_the_headers(site: Site) -> None:
    made = site.make(tools=[TOOL])
    whole = chat(SYSTEM, HELLO, tools=[TOOL])
    assert ask(site, whole, x_msh_context_cache=made["id"]) != {}
    for body in (chat(SYSTEM, HELLO), chat(HELLO, SYSTEM, tools=[TOOL]), {**whole, "model": "other"}):
        assert ask(site, body, x_msh_context_cache=made["id"], x_msh_context_cache_reset_ttl="3600") == {}
    assert ask(site, whole, x_msh_context_cache="cache-nobody") == {}
    assert ask(site, whole, owner="other", x_msh_context_cache=made["id"]) == {}
    assert ask(site, whole, cached=0, x_msh_context_cache=made["id"]) == {}, "sent where it is not"
    for bad in ({"reset_ttl": "x"}, {"reset_ttl": "3601"}, {"dryrun": "2"}):
        more: dict[str, Any] = {f"x_msh_context_cache_{k}": v for k, v in bad.items()}
        with pytest.raises(RequestError):
            ask(site, whole, x_msh_context_cache=made["id"], **more)


def test_a_cache_message_stands_for_the_cached_ones(site: Site) -> None:
    made = site.make(tools=[TOOL], tags=["book"])
    for said in (f"cache_id={made['id']}", "tag=book;reset_ttl=50"):
        body = chat({"role": "cache", "content": said}, HELLO, temperature=0)
        use = proxy.apply(site.backend, "", body, {})
        assert use.changed
        assert use.body == {"model": MODEL, "temperature": 0, "messages": [SYSTEM, HELLO], "tools": [TOOL]}
        request = site.backend.request(use.body)
        assert proxy.holders(site.backend, use, request) == {"i0"}
        headers = proxy.settle(site.backend, use, request, request.tokens)
        assert headers["msh-context-cache-id"] == made["id"]
    assert int(headers["msh-context-cache-token-exp"]) == site.backend.time + 50
    site.backend.time += 50
    expired = proxy.apply(site.backend, "", chat({"role": "cache", "content": "tag=book"}, HELLO), {})
    assert (expired.body["messages"], expired.pin) == ([SYSTEM, HELLO], None), "served, and no hit"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (chat({"role": "cache", "content": "cache_id=cache-no"}, HELLO), NotFound),
        (chat({"role": "cache", "content": "tag=no"}, HELLO), NotFound),
        (chat({"role": "cache", "content": "cache_id=x;tag=y"}), RequestError),
        (chat({"role": "cache", "content": "reset_ttl=5"}), RequestError),
        (chat({"role": "cache", "content": "cache_id=x;"}), RequestError),
        (chat({"role": "cache", "content": "cache_id=x;cache_id=y"}), RequestError),
        (chat({"role": "cache", "content": "cache_id=x;dry_run=yes"}), RequestError),
        (chat({"role": "cache", "content": ["cache_id=x"]}), RequestError),
        (chat({"role": "cache", "content": "cache_id=x"}, tools=[]), RequestError),
        (chat(HELLO, {"role": "cache", "content": "cache_id=x"}), RequestError),
    ],
)
def test_cache_messages_that_cannot_be_served(site: Site, body: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        proxy.apply(site.backend, "", body, {})


def test_a_dry_run_asks_nobody(site: Site) -> None:
    made = site.make(ttl=60)
    said = {"role": "cache", "content": f"cache_id={made['id']};reset_ttl=3600;dry_run=1"}
    use = proxy.apply(site.backend, "", chat(said, HELLO), {})
    assert use.answer is not None
    assert (use.answer["choices"], use.answer["usage"]["total_tokens"]) == ([], 0)
    assert int(use.headers["msh-context-cache-token-saved"]) > 1000
    assert int(use.headers["msh-context-cache-token-exp"]) == made["expired_at"], "nothing is changed"
    dry = {"x-msh-context-cache": made["id"], "x-msh-context-cache-dryrun": "1"}
    site.backend.held.clear()
    miss = proxy.apply(site.backend, "", chat(SYSTEM, HELLO), dry)
    assert miss.answer is not None
    assert miss.headers == {}
    assert next(iter(site.backend.pins)).uses == 0


def test_most_bodies_are_not_looked_into() -> None:
    assert not proxy.mentions(b'{"messages": [{"role": "user", "content": "a cache"}]}', {"accept": "*/*"})
    assert proxy.mentions(b'{"messages": [{"role": "cache"}]}', {})
    assert proxy.mentions(b"{}", {"x-msh-context-cache": "cache-x"})


# -- OpenAI


def test_a_wished_retention_keeps_the_prompt_and_grows(site: Site) -> None:
    kept = {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    for turns in range(1, 4):
        messages = [SYSTEM, *([HELLO, {"role": "assistant", "content": "x" * 2000}] * turns), HELLO]
        assert ask(site, chat(*messages, **kept), cached=2048) == {}, "Moonshot's headers are Moonshot's"
        (pin,) = site.backend.pins
        assert (pin.source, pin.name, pin.ttl(site.backend.time)) == ("openai", "k", 86400)
        assert pin.blocks == len(site.backend.request(chat(*messages)).chain)
    assert pin.uses == 2
    site.backend.time += 86400
    site.backend.pins.expire(site.backend.time)
    assert not pin.ttl(site.backend.time)


def test_what_leaves_no_pin(site: Site) -> None:
    ask(site, chat(SYSTEM, HELLO, prompt_cache_key="k"))
    ask(site, chat(SYSTEM, HELLO, prompt_cache_retention="in_memory"))
    ask(site, chat(HELLO, prompt_cache_retention="24h"))
    assert len(site.backend.pins) == 0
    full = Site(PinLimits(owner_tokens=10))
    ask(full, chat(SYSTEM, HELLO, prompt_cache_retention="24h"))
    assert len(full.backend.pins) == 0, "over quota is no reason to fail"
    for bad in ({"prompt_cache_key": "k" * 65}, {"prompt_cache_key": 5}, {"prompt_cache_retention": "1h"}):
        with pytest.raises(RequestError):
            proxy.apply(site.backend, "", chat(HELLO, **bad), {})


def test_cached_tokens_in_steps() -> None:
    assert [openai.cached_tokens(n) for n in (0, 1023, 1024, 1151, 1152)] == [0, 0, 1024, 1024, 1152]
    bare = {"usage": {"prompt_tokens": 2000}}
    assert openai.with_cached(bare, 1300)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1280}
    told = {"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}
    assert openai.with_cached(told, 1300) == told
    assert openai.with_cached({}, 1300) == {}
