"""The live front door before stub engines: what goes through untouched, what is tried again, what is never counted twice."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from moonpool.conductor.breaker import BreakerOptions
from moonpool.conductor.config import AdmissionOptions, ConductorConfig, HealthOptions, ModelOptions
from moonpool.conductor.perf import PerfModel
from moonpool.conductor.registry import ROLES, InstanceEntry
from moonpool.conductor.server.run import ConductorThread
from moonpool.conductor.types import SLO, Role
from moonpool.conductor.upstream import Timeouts
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.testing.stub_engine import StubEngine, StubServer

PROMPT = "the quick brown fox " * 200
QUICK = HealthOptions(every_s=0.01, timeout_s=1.0, dead_after=2)


class Site:
    """Stub engines behind a conductor."""

    def __init__(self, url: str, stubs: list[StubServer], thread: ConductorThread) -> None:
        self.stubs, self.conductor, self.url = stubs, thread.conductor, url
        self.client = httpx.Client(base_url=url, timeout=20)

    def ask(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 4, **fields})

    def idle(self) -> bool:
        models = self.conductor.models.values()
        return not any(len(m.cluster.ledger) for m in models) and not any(i.in_flight for i in self.conductor.registry)


@contextmanager
def site(count: int = 2, roles: list[tuple[Role, ...]] | None = None, **options: Any) -> Iterator[Site]:
    with no_leaks(), ExitStack() as stack:
        stubs = [stack.enter_context(StubServer(StubEngine(f"s{i}"))) for i in range(count)]
        entries = [
            InstanceEntry(
                url=s.url, model="m", id=f"s{i}", bootstrap=f"127.0.0.1:{s.port}", roles=roles[i] if roles else ROLES
            )
            for i, s in enumerate(stubs)
        ]
        config = ConductorConfig(**{"instances": entries, "health": QUICK, "seed": 7, **options})
        thread = stack.enter_context(ConductorThread(config))
        found = Site(thread.url, stubs, thread)
        stack.callback(found.client.close)
        eventually(lambda: len([i for i in found.conductor.registry if i.state == "ready"]) == count)
        yield found


@pytest.fixture
def two() -> Iterator[Site]:
    with site() as found:
        yield found


def test_bytes_go_through_untouched_with_headers_that_explain(two: Site) -> None:
    answer = two.ask(unknown={"deep": [1]})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "text"
    assert answer.headers["x-conductor-prefill"] in ("s0", "s1")
    assert answer.headers["x-conductor-policy"] == "kvcache"
    assert float(answer.headers["x-conductor-predicted-ttft-ms"]) > 0
    (got,) = [r for s in two.stubs for r in s.engine.requests]
    assert got == {"model": "m", "prompt": PROMPT, "max_tokens": 4, "unknown": {"deep": [1]}}
    assert answer.headers["x-request-id"] == next(h for s in two.stubs for h in s.engine.headers)["x-request-id"]
    again = two.ask()
    assert again.headers["x-conductor-prefill"] == answer.headers["x-conductor-prefill"], "its prefix is there"
    assert int(again.headers["x-conductor-matched-tokens"]) > 900
    log = two.client.get("/debug/decisions", params={"id": again.headers["x-request-id"]}).json()["decisions"]
    assert log[0]["plan"]["cached_tokens"] == int(again.headers["x-conductor-matched-tokens"])


def test_a_stream_comes_as_it_is(two: Site) -> None:
    with two.client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 5
    assert json.loads(lines[0][6:])["choices"][0]["text"] == "x"
    eventually(two.idle)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": PROMPT}], **more}


@pytest.mark.parametrize("mode", ["fail", "refuse"])
def test_another_instance_is_tried_before_the_first_byte(two: Site, mode: str) -> None:
    two.stubs[0].engine.mode = mode
    for i in range(12):
        answer = two.ask(prompt=f"{i} {PROMPT}")
        assert answer.status_code == 200
        assert answer.headers["x-conductor-prefill"] == "s1"
    states = {i["id"]: i["breaker"] for i in two.client.get("/instances").json()["instances"]}
    assert states["s1"] == "closed"
    assert len(two.stubs[0].engine.requests) <= 5, "the failed one is passed over"
    eventually(two.idle)


def test_a_client_mistake_is_passed_on_and_opens_nothing(two: Site) -> None:
    for stub in two.stubs:
        stub.engine.mode = "bad"
    for _ in range(8):
        answer = two.ask()
        assert answer.status_code == 400
        assert answer.json() == {"error": {"message": "as told"}}
    states = {i["breaker"] for i in two.client.get("/instances").json()["instances"]}
    assert states == {"closed"}
    assert sum(len(s.engine.requests) for s in two.stubs) == 8, "nothing was tried twice"


def test_half_an_answer_is_never_taken_for_a_whole(two: Site) -> None:
    for stub in two.stubs:
        stub.engine.mode = "break"
    with (
        pytest.raises(httpx.RemoteProtocolError),
        two.client.stream("POST", "/v1/completions", json=chat(prompt="x", stream=True)) as a,
    ):
        list(a.iter_bytes())
    assert sum(len(s.engine.requests) for s in two.stubs) == 1
    eventually(two.idle)


def test_a_client_that_leaves_ends_the_request_upstream(two: Site) -> None:
    for stub in two.stubs:
        stub.engine.mode = "silent"
    with pytest.raises(httpx.ReadTimeout):
        two.client.post("/v1/completions", json=chat(prompt="x"), timeout=0.3)
    eventually(lambda: [e for s in two.stubs for e in s.engine.ended] == ["aborted"])
    eventually(two.idle)


def test_a_dead_instance_leaves_at_once_and_comes_back() -> None:
    with site(breaker=BreakerOptions(open_s=0.05)) as found:
        found.stubs[0].engine.healthy = False
        eventually(lambda: found.conductor.registry.get("s0").state == "dead")  # type: ignore[union-attr]
        assert "s0" not in found.conductor.model("m").cluster.members
        used = Counter(found.ask(prompt=f"{i} {PROMPT}").headers["x-conductor-prefill"] for i in range(10))
        assert set(used) == {"s1"}
        found.stubs[1].engine.healthy = False
        eventually(lambda: not found.conductor.registry.models())
        assert found.ask().status_code == 503
        assert found.client.get("/v1/models").json()["data"] == []
        assert found.client.get("/ready").status_code == 503
        found.stubs[0].engine.healthy = True
        eventually(lambda: found.conductor.registry.models() == ["m"])
        assert found.ask().status_code == 200


def test_overload_is_429_with_a_time_to_come_back() -> None:
    slow = ModelOptions(perf=PerfModel(prefill=(0.0, 0.01, 0.0), decode=(0.01, 0.0, 0.0)))
    gate = AdmissionOptions(gate="hard", test="early")
    with site(models={"m": slow}, admission=gate, slo=SLO(ttft_s=5.0)) as found:
        answer = found.ask(prompt="other " + PROMPT)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert answer.json()["error"]["code"] == "slo_prefill"
        assert (
            found.client.post("/v1/completions", json=chat(prompt="x"), headers={"x-slo-ttft-ms": "60000"}).status_code
            == 200
        )
        assert (
            found.client.post("/v1/completions", json=chat(prompt="x"), headers={"x-slo-ttft-ms": "no"}).status_code
            == 400
        )


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"model": "other", "prompt": "x"}',
        b'{"model": "m", "prompt": ["a", "b"]}',
        b'{"model": "m", "max_tokens": "x"}',
    ],
)
def test_what_is_no_request_is_said_so(two: Site, body: bytes) -> None:
    answer = two.client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_schedule_is_a_lease_without_a_proxy(two: Site) -> None:
    made = two.client.post("/v1/schedule", json=chat()).json()
    assert made["urls"]["prefill"] == two.stubs[int(made["plan"]["prefill"][1])].url
    assert len(two.conductor.model("m").cluster.ledger) == 1
    for outcome in ("first_token", "finished"):
        assert two.client.post(f"/v1/schedule/{made['id']}/release", json={"outcome": outcome}).status_code == 200
    assert two.client.post(f"/v1/schedule/{made['id']}/release").status_code == 404
    dry = two.client.post("/v1/schedule?dry_run=1", json=chat()).json()
    assert dry["plan"]["predicted_ttft_s"] > 0
    assert two.idle()


def test_instances_come_and_go(two: Site) -> None:
    with StubServer() as third:
        entry = {"url": third.url, "model": "m", "id": "s2"}
        assert two.client.post("/instances", json=entry).status_code == 201
        assert two.client.post("/instances", json=entry).json() == {"id": "s2", "new": False}
        assert two.client.post("/instances", json={"url": "x", "model": "m"}).status_code == 400
        assert two.client.post("/instances/s2/drain").status_code == 200
        eventually(lambda: two.conductor.registry.get("s2") is None)
        assert two.client.delete("/instances/s2").status_code == 404


PD: list[tuple[Role, ...]] = [("prefill",), ("decode",)]


def test_prefill_then_decode_through_a_store() -> None:
    with site(roles=PD, models={"m": ModelOptions(executor="store")}) as found:
        answer = found.client.post(
            "/v1/chat/completions", json=chat(stream=True, stream_options={"include_usage": True}, n=1, max_tokens=50)
        )
        assert answer.text.endswith("data: [DONE]\n\n")
        (prefill,), (decode,) = (s.engine.requests for s in found.stubs)
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
        assert {"stream_options", "n"} & set(prefill) == set()
        assert prefill["messages"] == decode["messages"]
        assert (decode["max_tokens"], decode["stream"]) == (50, True)


def test_nixl_repeats_what_the_prefill_said() -> None:
    with site(roles=PD, models={"m": ModelOptions(executor="nixl")}) as found:
        assert found.ask().status_code == 200
        (prefill,), (decode,) = (s.engine.requests for s in found.stubs)
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert decode["kv_transfer_params"] == {"remote_block_ids": [1, 2], "remote_host": "s0"}


def test_mooncake_and_sglang_meet_by_name() -> None:
    with site(roles=PD, models={"m": ModelOptions(executor="mooncake")}) as found:
        assert found.ask().status_code == 200
        (prefill,), (decode,) = (s.engine.requests for s in found.stubs)
        p, d = prefill["kv_transfer_params"], decode["kv_transfer_params"]
        assert p["transfer_id"] == d["transfer_id"]
        assert d["remote_engine_id"] == "engine-7"
        assert d["do_remote_prefill"] is True
    with site(roles=PD, models={"m": ModelOptions(executor="sglang")}) as found:
        assert found.ask(max_tokens=9).status_code == 200
        (prefill,), (decode,) = (s.engine.requests for s in found.stubs)
        assert prefill == decode
        assert prefill["bootstrap_room"] >= 0
        assert prefill["max_tokens"] == 9


@pytest.mark.parametrize("executor", ["mooncake", "sglang"])
def test_either_leg_that_fails_ends_the_other(executor: str) -> None:
    with site(roles=PD, models={"m": ModelOptions(executor=executor)}, retries=0) as found:
        found.stubs[0].engine.mode, found.stubs[1].engine.mode = "fail", "silent"
        assert found.ask().status_code == 502
        eventually(lambda: found.stubs[1].engine.ended == ["aborted"])
        eventually(found.idle)


def test_the_ledger_is_nothing_after_every_kind_of_ending() -> None:
    """Requests that end well, badly, at once, in the middle and not at all, while health checks run every 10 ms."""
    timeouts = Timeouts(first_byte_s=0.3, idle_s=0.3)
    with site(4, timeouts=timeouts, breaker=BreakerOptions(failures=1000), retries=1) as found:
        modes = ["ok", "ok", "fail", "break", "silent", "bad"]
        stop = threading.Event()

        def change() -> None:
            turn = 0
            while not stop.wait(0.02):
                for i, stub in enumerate(found.stubs):
                    stub.engine.mode = modes[(turn + i) % len(modes)]
                turn += 1

        def one(i: int) -> int:
            try:
                with httpx.Client(base_url=found.url, timeout=0.05 if i % 7 == 0 else 5) as client:
                    return client.post(
                        "/v1/completions", json=chat(prompt=f"{i % 9} {PROMPT}", stream=bool(i % 2))
                    ).status_code
            except httpx.HTTPError:
                return 0

        changer = threading.Thread(target=change)
        changer.start()
        with ThreadPoolExecutor(8) as pool:
            seen = Counter(pool.map(one, range(240)))
        stop.set()
        changer.join()
        assert len(seen) >= 3
        eventually(found.idle)
        ledger = found.conductor.model("m").cluster.ledger
        ledger.check()
        now = found.conductor.clock()
        assert all(ledger.queue_s(f"s{i}", now) == ledger.context(f"s{i}") == 0 for i in range(4))


def test_metrics_and_health(two: Site) -> None:
    two.ask()
    text = two.client.get("/metrics").text
    assert 'moonpool_conductor_requests_total{outcome="ok"} 1.0' in text
    assert 'moonpool_conductor_instance_up{instance="s0",model="m"} 1.0' in text
    assert two.client.get("/health").json() == {"status": "ok"}


def test_a_context_cache_is_warmed_used_and_told(two: Site) -> None:
    kept = {"role": "system", "content": PROMPT}
    made = two.client.post("/v1/caching", json={"model": "m", "messages": [kept], "ttl": 60}).json()
    eventually(lambda: two.client.get(f"/v1/caching/{made['id']}").json()["status"] == "ready")
    assert sum(len(s.engine.requests) for s in two.stubs) == 1, "one prefill for one token"
    body = chat(messages=[kept, {"role": "user", "content": "and now?"}])
    answer = two.client.post("/v1/chat/completions", json=body, headers={"X-Msh-Context-Cache": made["id"]})
    assert answer.headers["msh-context-cache-id"] == made["id"]
    assert int(answer.headers["msh-context-cache-token-saved"]) > 900
    short = chat(
        messages=[{"role": "cache", "content": f"cache_id={made['id']}"}, {"role": "user", "content": "and now?"}]
    )
    assert two.client.post("/v1/chat/completions", json=short).status_code == 200
    sent = [r for s in two.stubs for r in s.engine.requests]
    assert sent[-1]["messages"][0] == kept, "the cached messages stand where the reference was"
    assert len({a.headers["x-conductor-prefill"] for a in (answer,)}) == 1
    gone = chat(messages=[{"role": "cache", "content": "cache_id=cache-nope"}, {"role": "user", "content": "x"}])
    assert two.client.post("/v1/chat/completions", json=gone).status_code == 404
    assert two.client.delete(f"/v1/caching/{made['id']}").json()["deleted"] is True


def test_the_dashboard_is_one_page_that_asks_for_the_state(two: Site) -> None:
    two.ask()
    eventually(two.idle)
    page = two.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "debug/state" in page.text
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    state = two.client.get("/debug/state").json()
    assert {i["id"]: i["state"] for i in state["instances"]} == {"s0": "ready", "s1": "ready"}
    assert state["outcomes"]["ok"] == 1
    assert state["ttft"]["within_slo"] == 1
    assert state["decisions"][0]["tokens"] == len(PROMPT) // 4


def test_a_key_is_asked_for() -> None:
    with no_leaks(), ConductorThread(ConductorConfig(health=QUICK), api_key="secret") as thread:
        assert httpx.get(f"{thread.url}/v1/models").status_code == 401
        assert httpx.post(f"{thread.url}/v1/completions", json={}).status_code == 401
        assert httpx.get(f"{thread.url}/health").status_code == 200
        assert httpx.get(f"{thread.url}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
