"""KV events: every shape that engines send, any loss and order, and what a lookup sees in the end."""

from __future__ import annotations

import random
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.chain import Context, TokenChain
from moonpool.conductor.config import ConductorConfig, HealthOptions, ModelOptions
from moonpool.conductor.events import codec
from moonpool.conductor.events.codec import Batch, BlockRemoved, BlockStored, Cleared
from moonpool.conductor.events.source import Apply, Forget, Replay, Source, batches
from moonpool.conductor.events.translate import Translator
from moonpool.conductor.index import Plane, PrefixIndex
from moonpool.conductor.registry import InstanceEntry
from moonpool.conductor.server.run import ConductorThread
from moonpool.errors import ProtocolError
from moonpool.testing.kv_publisher import KVPublisher
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.testing.stub_engine import StubServer

SIZE = 4
TOKENS = list(range(100, 100 + 8 * SIZE))


def stored(first: int, count: int = 1, **more: Any) -> dict[str, Any]:
    """Blocks `[first, first + count)` of TOKENS as vLLM's map."""
    found = {
        "type": "BlockStored",
        "block_hashes": [f"h{i}".encode() for i in range(first, first + count)],
        "parent_block_hash": f"h{first - 1}".encode() if first else None,
        "token_ids": TOKENS[first * SIZE : (first + count) * SIZE],
        "block_size": SIZE,
    }
    return {**found, **more}


def decoded(*events: Any) -> Batch:
    return codec.decode(msgspec.msgpack.encode([1.5, list(events), 0]))


def test_maps_and_arrays_bytes_and_numbers_are_the_same_event() -> None:
    as_map = decoded(stored(0, 2, medium="CPU", lora_name="l", group_idx=0, lookahead_token_ids=[1]))
    array = ["BlockStored", [b"h0", b"h1"], None, TOKENS[: 2 * SIZE], SIZE, None, "CPU_PINNED", "l"]
    assert decoded(array).events == as_map.events
    want = BlockStored([b"h0", b"h1"], None, TOKENS[: 2 * SIZE], SIZE, Plane.CPU, "l")
    assert as_map.events == [want]
    numbers = {**stored(0), "block_hashes": [-5], "cache_salt": "s"}
    assert decoded(numbers).events == [BlockStored([-5], None, TOKENS[:SIZE], SIZE, salt="s")]
    mooncake = {"event_type": "removed", "seq_hashes": [7], "medium": "disk", "event_id": 1}
    assert decoded(mooncake, ["BlockRemoved", [1], "GPU"]).events == [BlockRemoved([7], Plane.DISK), BlockRemoved([1])]
    assert decoded({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]).events == [Cleared(), Cleared()]
    assert decoded({"type": "New"}, {"type": "New"}).unknown == {"New": 2}


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([1, [5]])])
def test_what_is_no_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(raw)


def test_an_event_of_a_wrong_shape_is_refused() -> None:
    for wrong in ({"type": "BlockStored"}, {**stored(0), "block_hashes": [1.5]}, {**stored(0), "block_size": "x"}):
        with pytest.raises(ProtocolError, match="wrong shape"):
            decoded(wrong)


def test_replayed_messages_have_a_topic_or_none() -> None:
    number, payload = (9).to_bytes(8, "big"), b"p"
    assert codec.replayed([b"", b"topic", number, payload]) == codec.replayed([b"", number, payload]) == (9, b"p")
    assert codec.replayed([b"", b"", b"\xff" * 8, b""]) is None
    assert codec.replayed([b"", b"\xff" * 8, b""]) is None
    with pytest.raises(ProtocolError):
        codec.replayed([b"", b"x"])
    assert codec.live([b"", number, payload]) == (9, b"p")


def numbered(n: int) -> Batch:
    return Batch([BlockRemoved([n])])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)), st.integers(0, 29))))
def test_whatever_is_lost_a_replay_mends(case: tuple[int, set[int], int]) -> None:
    """Batches 0 … n-1 of which some never arrive live; a replay comes in the middle of what goes on."""
    count, lost, late = case
    source, done = Source(replays=True), list[Batch]()
    asked: list[int] = []
    for n in range(count):
        if n in lost:
            continue
        actions = source.live(n, numbered(n), float(n))
        done += batches(actions)
        asked += [a.start for a in actions if isinstance(a, Replay)]
        if asked and n >= late:
            start = asked.pop()
            for k in range(start, n + 1):
                done += batches(source.replayed(k, numbered(k), float(n)))
            done += batches(source.replay_ended(float(n)))
    if asked:
        for k in range(asked.pop(), count):
            done += batches(source.replayed(k, numbered(k), 99.0))
        done += batches(source.replay_ended(99.0))
    seen = [e.hashes[0] for b in done for e in b.events if isinstance(e, BlockRemoved)]
    assert seen == sorted(set(seen)), "in order, none twice"
    if source.state == "exact":
        assert seen == list(range(source.last + 1)), "exact means whole"


def test_an_engine_that_restarts_is_forgotten_and_learnt_anew() -> None:
    source = Source(replays=True)
    for n in range(5):
        source.live(n, numbered(n), 0)
    assert source.live(0, numbered(0), 1) == [Forget(), Apply(numbered(0))]
    assert (source.state, source.last) == ("exact", 0)
    assert source.live(0, numbered(0), 1) == [], "the same batch twice is no restart"


def test_without_replay_or_with_one_that_fails_it_is_degraded_until_all_is_cleared() -> None:
    blind = Source(replays=False)
    assert batches(blind.live(3, numbered(3), 0)) == [numbered(3)]
    assert blind.state == "degraded"
    assert batches(blind.live(4, Batch([Cleared()]), 0))
    assert str(blind.state) == "exact"
    silent = Source(replays=True, answer_s=10, cool_down_s=30)
    assert silent.live(3, numbered(3), 0) == [Replay(0)]
    assert silent.tick(9) == []
    assert batches(silent.tick(10)) == [numbered(3)]
    assert silent.state == "degraded"
    assert not [a for a in silent.live(9, numbered(9), 20) if isinstance(a, Replay)], (
        "it was asked in vain not long ago"
    )
    assert [a for a in silent.live(15, numbered(15), 41) if isinstance(a, Replay)] == [Replay(10)]


def test_a_replay_that_begins_too_late_is_no_whole() -> None:
    source = Source(replays=True)
    source.live(50, numbered(50), 0)
    done = batches(source.replayed(40, numbered(40), 1))
    assert source.state == "degraded"
    assert numbered(50) in done


def translator(size: int = SIZE) -> tuple[Translator, PrefixIndex]:
    index = PrefixIndex(random.Random(0))
    index.register("i")
    return Translator("i", index, "m", size), index


def depth(index: PrefixIndex, salt: str = "", lora: str = "") -> int:
    found = index.matches(TokenChain(TOKENS, Context("", "m", lora, SIZE, salt)))
    return found["i"].blocks if found else 0


def test_our_keys_come_from_the_tokens_and_the_engines_from_nowhere() -> None:
    t, index = translator()
    t.apply(decoded(stored(0, 3)))
    t.apply(decoded(stored(3)))
    assert depth(index) == 4
    assert depth(index, salt="s") == depth(index, lora="l") == 0
    t.apply(decoded({"type": "BlockRemoved", "block_hashes": [b"h3", b"unknown"]}))
    assert depth(index) == 3
    t.apply(decoded(stored(4)))
    assert (depth(index), t.orphaned) == (3, 1), "its parent is gone"
    t.apply(decoded(stored(3)))
    assert depth(index) == 5, "and here it is again"
    t.apply(decoded({"type": "AllBlocksCleared"}))
    assert depth(index) == 0


def test_what_does_not_fit_is_told_and_not_indexed() -> None:
    t, index = translator(16)
    t.apply(decoded(stored(0)))
    assert (t.refused, t.why_refused) == (1, "blocks of 4 tokens, the conductor's have 16")
    t, index = translator()
    t.apply(decoded(stored(0, group_idx=1)))
    assert (t.other_groups, depth(index)) == (1, 0)
    for i in range(6000):
        t.apply(decoded({**stored(1), "parent_block_hash": f"x{i}".encode()}))
    assert len(t._orphans) <= 4096


@pytest.mark.parametrize("topic", [True, False])
def test_a_live_engine_tells_the_conductor_what_it_holds(topic: bool) -> None:
    with no_leaks(), StubServer() as stub, KVPublisher(topic_in_replay=topic) as engine:
        engine.lose([stored(0, 2)])  # before anybody listened
        entry = InstanceEntry(url=stub.url, model="m", id="i", events=engine.events, replay=engine.replay)
        health = HealthOptions(every_s=0.01, dead_after=2)
        config = ConductorConfig(instances=[entry], models={"m": ModelOptions(block_size=16)}, health=health)
        with ConductorThread(msgspec.structs.replace(config, models={"m": ModelOptions(block_size=SIZE)})) as thread:

            def told() -> dict[str, Any]:
                found = httpx.get(f"{thread.url}/instances").json()["instances"][0]["kv_events"] or {}
                return found if isinstance(found, dict) else {}

            def exact() -> bool:
                engine.publish([])  # a subscriber that joins slowly misses the first ones
                return bool(told().get("ranks", {}).get("0", {}).get("state") == "exact")

            eventually(exact)
            index = thread.conductor.model("m").cluster.index
            assert depth(index) == 2, "what was published before came by replay"
            engine.lose([stored(2)])
            engine.publish([stored(3)])
            eventually(lambda: depth(index) == 4)
            assert told()["ranks"]["0"]["gaps"] >= 1
            engine.restart()
            engine.publish([])
            eventually(lambda: depth(index) == 0)
            stub.engine.healthy = False
            eventually(lambda: not thread.conductor.feeds)
