"""Mooncake's conductor API: registered engines' events, asked by tokens and by hashes, in JSON and msgpack."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.server.run import ConductorThread
from moonpool.testing.kv_publisher import KVPublisher
from moonpool.testing.leaks import eventually, no_leaks

TOKENS = list(range(40))


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with (
        no_leaks(),
        ConductorThread(ConductorConfig()) as thread,
        httpx.Client(base_url=thread.url, timeout=10) as found,
    ):
        yield found


def service(engine: KVPublisher, **more: Any) -> dict[str, Any]:
    fields = {
        "endpoint": engine.events,
        "replay_endpoint": engine.replay,
        "type": "vLLM",
        "modelname": "m",
        "block_size": 4,
    }
    return {**fields, "instance_id": "i", **more}


def stored(first: int, count: int, medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first + 1, first + count + 1)),
        "parent_block_hash": first or None,
        "token_ids": TOKENS[4 * first : 4 * (first + count)],
        "block_size": 4,
        "medium": medium,
    }


def test_engines_are_registered_asked_and_removed(client: httpx.Client) -> None:
    with KVPublisher() as engine:
        assert client.post("/register", json={**service(engine), "later": 1}).json() == {"status": "ok"}
        engine.lose([stored(0, 5), stored(5, 2, "CPU"), stored(7, 1, "DISK")])
        asked = {"model": "m", "token_ids": [*TOKENS[:34]], "block_size": 4}

        def found() -> dict[str, Any]:
            engine.publish([])
            answer: dict[str, Any] = client.post("/query", json=asked).json()
            return answer["default"].get("i", {})

        want = {"longest_matched": 32, "GPU": 20, "DP": {"0": 20}, "CPU": 28, "DISK": 32}
        eventually(lambda: found() == want)
        by_hash = client.post("/query_by_hash", json={"model": "m", "block_hash": [1, 2, 3, 99, 4]}).json()
        assert by_hash["default"]["i"]["longest_matched"] == 12
        packed = {"model": "m", "token_ids": array("i", TOKENS[:34]).tobytes()}
        answer = client.post(
            "/query", content=msgspec.msgpack.encode(packed), headers={"content-type": "application/msgpack"}
        )
        assert msgspec.msgpack.decode(answer.content) == {"default": {"i": want}}
        assert client.post("/query", json={**asked, "tenant_id": "other"}).json() == {"other": {}}
        (listed,) = client.get("/services").json()["services"]
        assert (listed["instance_id"], listed["state"], listed["blocks"]) == ("i", "exact", 8)
        assert client.get("/global_view").json()["instances"] == 1
        gone = client.post("/unregister", json={"instance_id": "i"}).json()
        assert gone["removed_instances"] == ["i|default|0"]
        assert client.post("/query", json=asked).json() == {"default": {}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "m", "token_ids": "x"}, "token_ids"),
        ({"token_ids": []}, ""),
        ({"model": "m", "token_ids": [1, "x"]}, "token_ids[1]"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = client.post("/query", json=body)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error", "reason", "field", "index"}
    assert answer.json()["field"].startswith(field)


def test_msgpack_is_strict(client: httpx.Client) -> None:
    raw = msgspec.msgpack.encode({"model": "m", "token_ids": [], "surprise": 1})
    answer = client.post("/query", content=raw, headers={"content-type": "application/msgpack"})
    assert msgspec.msgpack.decode(answer.content)["field"] == "surprise"
    for wrong in (
        {"endpoint": "x", "modelname": "m", "instance_id": "i", "block_size": 4},
        {"endpoint": "tcp://127.0.0.1:1", "modelname": "m", "instance_id": "i", "block_size": 0},
    ):
        assert client.post("/register", json=wrong).status_code == 400
    assert client.post("/query", content=b"[1]").status_code == 400
