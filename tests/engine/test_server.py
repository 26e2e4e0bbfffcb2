"""The HTTP front: OpenAI's shapes, every bad input, streaming, disconnects, shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool.c2c.signature import load_spec
from moonpool.engine.app import MAX_BODY_BYTES
from moonpool.engine.instance import Instance
from moonpool.engine.scheduler import Limits
from moonpool.engine.server import ServerThread, serve
from moonpool.errors import ConfigError
from moonpool.store.embedded import EmbeddedPool
from moonpool.testing.leaks import eventually
from tests.engine.conftest import PAGE
from tests.engine.test_instance import BUNDLE, put_converted
from tests.engine.test_scheduler import Gate

LINE = "the quick brown fox jumps over the lazy dog and packs five dozen liquor jugs 0123456789; "


class Site:
    """A running server with two models, and a client of it."""

    def __init__(self, instances: dict[str, Instance], server: ServerThread, pool: EmbeddedPool) -> None:
        self.instances, self.server, self.pool = instances, server, pool
        self.tiny = instances["tiny"]
        self.client = httpx.Client(base_url=server.url, timeout=30)

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 4, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
        return self.client.post("/v1/chat/completions", json={**body, **fields})

    def settled(self) -> bool:
        """Whether the instance holds no request (waits a moment for it)."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if self.tiny.stats().running == self.tiny.stats().waiting == 0:
                return True
            time.sleep(0.01)
        return False


def run_site(model: Path) -> Iterator[Site]:
    """A site that must leave no thread behind."""
    before = set(threading.enumerate())
    spec = load_spec(model)
    with EmbeddedPool(capacity=32 << 20) as pool:
        limits = Limits(max_batch=4, max_queue=4)
        made = {
            "tiny": Instance(model, spec, pool, origins=[BUNDLE], limits=limits, compute="float32"),
            "other": Instance(model, spec, None, compute="float32"),
        }
        with ServerThread(made) as server:
            site = Site(made, server, pool)
            yield site
            site.client.close()
        for instance in made.values():
            instance.close()

    def left() -> list[str]:
        return [t.name for t in set(threading.enumerate()) - before if t.is_alive()]

    assert eventually(lambda: not left(), timeout_s=15), (
        f"threads left: {left()}"
    )  # AnyIO's workers end with their loop


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Site]:
    """For tests that leave nothing behind but stored pages."""
    yield from run_site(model)


@pytest.fixture
def site(model: Path) -> Iterator[Site]:
    """For tests that count, hold or close something."""
    yield from run_site(model)


def error_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return str(error["message"])


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# -- answers


def test_a_completion(shared: Site) -> None:
    body = shared.ask(seed=1).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] in ("length", "stop")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert shared.ask(prompt=shared.tiny.encode("fox")).json()["choices"] == body["choices"]
    assert shared.ask(prompt=["fox"]).json()["choices"] == body["choices"]
    assert shared.ask(model="other").json()["choices"] == body["choices"]


def test_a_chat_completion(shared: Site) -> None:
    body = shared.chat().json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert shared.chat(messages=[{"role": "user", "content": parts}]).json()["choices"] == body["choices"]
    limited = shared.chat(max_tokens=4, max_completion_tokens=2).json()
    assert limited["usage"]["completion_tokens"] <= 2


def test_usage_names_cached_and_converted_tokens(site: Site) -> None:
    prompt = LINE * 3
    tokens = site.tiny.encode(prompt)
    pages = len(tokens) // PAGE
    put_converted(site.pool, site.tiny, tokens, range(pages))
    refused = site.ask(prompt=prompt, cache_salt="x", moonpool={"allow_converted": False}).json()
    assert refused["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "converted_tokens": 0}
    taken = site.ask(prompt=prompt).json()["usage"]["prompt_tokens_details"]
    assert taken["converted_tokens"] == taken["cached_tokens"] == (pages - 2) * PAGE
    site.ask(prompt=prompt, moonpool={"allow_converted": False})
    assert site.tiny.flush()
    native = site.ask(prompt=prompt).json()
    cached = (len(tokens) - 1) // PAGE * PAGE
    assert native["usage"]["prompt_tokens_details"] == {"cached_tokens": cached, "converted_tokens": 0}
    assert native["moonpool"]["tokens"]["computed"] == len(tokens) - cached


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_what_the_whole_answer_says(shared: Site, chat: bool) -> None:
    ask = shared.chat if chat else shared.ask
    sampled = {"max_tokens": 40, "temperature": 2.0, "seed": 3}
    whole = ask(**sampled).json()
    streamed = ask(**sampled, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *pieces, end, last = events_of(streamed)
    choices = [p["choices"][0] for p in pieces]
    said = whole["choices"][0]
    text = "".join(c["delta"]["content"] if chat else c["text"] for c in choices)
    assert text == (said["message"]["content"] if chat else said["text"])
    assert end["choices"][0]["finish_reason"] == said["finish_reason"]
    assert last["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][c] for c in counts] == [whole["usage"][c] for c in counts]
    assert all(p["usage"] is None for p in pieces)
    if chat:
        assert choices[0]["delta"]["role"] == "assistant"


def test_a_stream_without_usage_has_none(shared: Site) -> None:
    assert all("usage" not in e for e in events_of(shared.ask(stream=True)))


def test_stop_strings_and_logprobs(shared: Site) -> None:
    whole = shared.ask(max_tokens=20).json()["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    cut = shared.ask(max_tokens=20, stop=[stop]).json()["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: whole.index(stop)]
    found = shared.ask(logprobs=2).json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"])
    entry = shared.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 2


def test_clients_at_once_get_their_own_answers(shared: Site) -> None:
    prompts = [LINE[i:] for i in range(8)]
    with ThreadPoolExecutor(4) as clients:
        got = [r.json()["choices"] for r in clients.map(lambda p: shared.ask(prompt=p), prompts)]
    assert got == [shared.ask(prompt=p).json()["choices"] for p in prompts]


def test_models_health_metrics(site: Site) -> None:
    site.ask()
    assert [m["id"] for m in site.client.get("/v1/models").json()["data"]] == ["tiny", "other"]
    assert site.client.get("/health").json()["status"] == "ok"
    text = site.client.get("/metrics").text
    assert 'moonpool_engine_finished_total{model="tiny"} 1.0' in text
    assert 'moonpool_ttft_seconds_count{model="tiny"} 1.0' in text
    assert 'moonpool_engine_running{model="other"} 0.0' in text


# -- bad input


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": ["a", "b"]}, 400, "one prompt"),
        ({"prompt": [1, -1]}, 400, "no such token"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": [4] * 500, "max_tokens": 20}, 400, "needed 520 positions; there is 512"),
        ({"model": "gpt"}, 404, "no model `gpt`; there is tiny, other"),
        ({"n": 2}, 400, "not supported: n"),
        ({"best_of": 3}, 400, "best_of"),
        ({"echo": True}, 400, "echo"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"stream": True, "logprobs": 1}, 400, "logprobs with stream"),
        ({"max_tokens": -5}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 2}, 400, "top_p"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["x"] * 99}, 400, "stop"),
        ({"moonpool": {"alow_converted": True}}, 400, "alow_converted"),
        ({"moonpool": {"wait_converted_s": 1e6}}, 400, "wait_converted_s"),
    ],
)
def test_bad_fields(shared: Site, fields: dict[str, Any], status: int, text: str) -> None:
    response = shared.ask(**fields)
    assert response.status_code == status
    assert text in error_of(response)
    assert shared.settled()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_chats(shared: Site, fields: dict[str, Any], text: str) -> None:
    response = shared.chat(**fields)
    assert response.status_code == 400
    assert text in error_of(response)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"model": "tiny"}', b'{"model": "\xff\xfe"}', b'{"model": "\\ud800"}']
)
def test_bodies_that_are_no_request(shared: Site, raw: bytes) -> None:
    response = shared.client.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert error_of(response)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(shared: Site) -> None:
    response = shared.client.post("/v1/completions", content=b"x" * (10 << 20))
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in error_of(response)

    def parts() -> Iterator[bytes]:  # no Content-Length
        for _ in range(10):
            yield b"x" * (1 << 20)

    assert shared.client.post("/v1/completions", content=parts()).status_code == 413
    with socket.create_connection(("127.0.0.1", shared.server.port), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in raw.recv(1024)
    assert shared.ask().status_code == 200


def test_unknown_paths_and_methods_have_the_same_shape(shared: Site) -> None:
    assert shared.client.get("/v1/nothing").status_code == 404
    assert error_of(shared.client.get("/v1/completions"))


def test_a_full_queue_is_429_with_retry_after(site: Site) -> None:
    gate = Gate(site.tiny)
    with ThreadPoolExecutor(12) as clients:
        futures = [clients.submit(site.ask) for _ in range(12)]
        assert gate.entered.wait(20)
        end = time.monotonic() + 10
        while site.tiny.stats().rejected == 0 and time.monotonic() < end:
            time.sleep(0.01)
        gate.open()
        responses = [f.result(30) for f in futures]
    refused = [r for r in responses if r.status_code != 200]
    assert refused
    assert all(r.status_code == 429 and r.headers["retry-after"] == "1" for r in refused)


def test_a_closed_instance_is_503(site: Site) -> None:
    site.tiny.close()
    response = site.ask()
    assert response.status_code == 503
    assert "shutting down" in error_of(response)
    assert site.client.get("/health").status_code == 503


# -- disconnects and shutdown


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause", [0.01, 0.4], ids=["while tokens flow", "while none come"])
def test_a_client_that_goes_away_stops_its_request(
    site: Site, stream: bool, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, forward = threading.Event(), site.tiny._runner.forward

    def slow(*args: Any, **options: Any) -> Any:
        entered.set()
        time.sleep(pause)
        return forward(*args, **options)

    monkeypatch.setattr(site.tiny._runner, "forward", slow)
    body = json.dumps({"model": "tiny", "prompt": "fox", "max_tokens": 500, "stream": stream, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=10) as raw:
        raw.sendall((head + body).encode())
        assert entered.wait(20)
    assert site.settled()
    stats = site.tiny.stats()
    assert (stats.aborted, stats.finished) == (1, 0)
    assert stats.tokens_generated < 400
    monkeypatch.undo()
    assert site.ask().status_code == 200


def test_stopping_the_server_twice_is_safe_and_it_is_gone(model: Path) -> None:
    server = ServerThread({}).start()
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.stop()
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    ServerThread({}).stop()  # one that never started


def test_a_port_in_use_is_named() -> None:
    with ServerThread({}) as server, pytest.raises(ConfigError, match=f"port {server.port} is in use"):
        serve({}, port=server.port)


def test_other_machines_need_a_key(model: Path) -> None:
    with pytest.raises(ConfigError, match="no API key"):
        ServerThread({}, host="0.0.0.0")
    with ServerThread({}, host="0.0.0.0", api_key="secret") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
