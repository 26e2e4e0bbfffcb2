"""Batching, seeds, stops, aborts, deadlines and bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.instance import Instance
from moonpool.engine.request import EngineClosed, EngineFailed, GenerateResult, Piece, QueueFull
from moonpool.engine.sampling import SamplingParams
from moonpool.engine.scheduler import Limits
from moonpool.errors import DeadlineExceeded
from moonpool.store.embedded import EmbeddedPool
from moonpool.types import PutOptions
from tests.engine.conftest import PAGE, prompt
from tests.engine.test_instance import request

Start = Callable[..., Instance]
LONG = 400


class Gate:
    """Holds the model thread inside a step, so that a test decides what happens meanwhile."""

    def __init__(self, instance: Instance) -> None:
        self._forward = instance._runner.forward
        self.entered, self._open = threading.Event(), threading.Event()
        instance._runner.forward = self._wait  # type: ignore[method-assign]

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.set()
        assert self._open.wait(20)
        return self._forward(*args, **kwargs)

    def open(self) -> None:
        self._open.set()


class Events(list[Any]):
    """Collects a request's events and waits for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._end = threading.Event()

    def __call__(self, event: Any) -> None:
        self.append(event)
        if not isinstance(event, Piece):
            self._end.set()

    def last(self) -> Any:
        assert self._end.wait(20), "the request does not end"
        return self[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch(any_model: Path, start: Start, temperature: float) -> None:
    instance = start(any_model, limits=Limits(max_batch=3, prefill_chunk=32))
    sampling = SamplingParams(temperature=temperature, top_p=0.9, seed=11)
    requests = [request(prompt(n, seed=n), max_tokens=20, sampling=sampling) for n in (5, 70, 33, 1, 100)]
    alone = [instance.generate(r).tokens for r in requests]
    gate, events = Gate(instance), [Events() for _ in requests]
    for r, e in zip(requests, events, strict=True):
        instance.submit(r, e)
    gate.open()
    assert [e.last().tokens for e in events] == alone
    assert instance.stats().running == 0


def test_the_same_seed_gives_the_same_answer(model: Path, start: Start) -> None:
    instance = start(model)

    def ask(seed: int | None) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.5, seed=seed)
        return instance.generate(request(prompt(5), max_tokens=16, sampling=sampling)).tokens

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert ask(None) != ask(None)


def test_a_stop_string_across_tokens_ends_the_answer(model: Path, start: Start) -> None:
    instance = start(model)
    whole = instance.generate(request(prompt(5), max_tokens=24))
    texts = [instance.decode([t]) for t in whole.tokens]
    at = next(
        i for i in range(4, 20) if texts[i].isprintable() and texts[i + 1].isprintable() and texts[i] and texts[i + 1]
    )
    stop = texts[at][-1] + texts[at + 1][0]
    pieces = list(instance.stream(request(prompt(5), max_tokens=24, stop=(stop,))))
    result = pieces[-1]
    assert isinstance(result, GenerateResult)
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert "".join(p.text for p in pieces[:-1] if isinstance(p, Piece)) == result.text


def test_pieces_join_to_the_text_and_eos_ends_it(model: Path, start: Start) -> None:
    instance = start(model)
    sampling = SamplingParams(temperature=3.0, seed=4)
    pieces = list(instance.stream(request(prompt(9), max_tokens=300, ignore_eos=False, sampling=sampling)))
    result = pieces[-1]
    assert isinstance(result, GenerateResult)
    assert "".join(p.text for p in pieces[:-1] if isinstance(p, Piece)) == result.text == instance.decode(result.tokens)
    assert result.finish_reason == "stop"
    assert not set(result.tokens) & instance._eos


def test_logprobs_belong_to_the_tokens(model: Path, start: Start) -> None:
    result = start(model).generate(request(prompt(5), max_tokens=6, logprobs=3))
    assert result.logprobs is not None
    assert [p.token for p in result.logprobs] == list(result.tokens)
    assert all(p.top[0] == (p.token, p.logprob) for p in result.logprobs), "greedy takes the best"


def test_an_abort_frees_the_slot(model: Path, start: Start) -> None:
    instance = start(model, limits=Limits(max_batch=1))
    events, first_piece = Events(), threading.Event()

    def on_event(event: Any) -> None:
        events(event)
        first_piece.set()

    handle = instance.submit(request(prompt(5), max_tokens=LONG), on_event)
    assert first_piece.wait(20)
    handle.abort()
    handle.abort()
    assert events.last().finish_reason == "abort"
    assert len(events.last().tokens) < LONG
    assert len(instance.generate(request(prompt(5))).tokens) == 8
    stats = instance.stats()
    assert (stats.aborted, stats.finished, stats.running, stats.waiting) == (1, 1, 0, 0)


def test_leaving_a_stream_early_aborts(model: Path, start: Start) -> None:
    instance = start(model, limits=Limits(max_batch=1))
    for piece in instance.stream(request(prompt(5), max_tokens=LONG)):
        assert isinstance(piece, Piece)
        break
    assert len(instance.generate(request(prompt(5))).tokens) == 8
    assert instance.stats().aborted == 1


def test_a_waiting_request_can_be_aborted_or_run_out_of_time(model: Path, start: Start) -> None:
    instance = start(model, limits=Limits(max_batch=1))
    gate, running, ahead, aborted, late = Gate(instance), Events(), Events(), Events(), Events()
    instance.submit(request(prompt(5)), running)
    assert gate.entered.wait(20)
    instance.submit(request(prompt(5)), ahead)
    handle = instance.submit(request(prompt(5)), aborted)
    instance.submit(request(prompt(5), deadline_s=0.05), late)
    handle.abort()
    assert aborted.last().finish_reason == "abort"
    assert isinstance(late.last(), DeadlineExceeded)
    gate.open()
    assert len(running.last().tokens) == len(ahead.last().tokens) == 8


def test_a_running_request_runs_out_of_time(model: Path, start: Start) -> None:
    instance = start(model)
    gate, events = Gate(instance), Events()
    instance.submit(request(prompt(5), deadline_s=0.05), events)
    assert gate.entered.wait(20)
    threading.Event().wait(0.1)
    gate.open()
    assert isinstance(events.last(), DeadlineExceeded)
    assert instance.stats().failed == 1


def test_a_full_queue_refuses(model: Path, start: Start) -> None:
    instance = start(model, limits=Limits(max_batch=1, max_queue=2))
    gate = Gate(instance)
    accepted: list[Events] = []

    def submit_one() -> None:
        events = Events()
        instance.submit(request(prompt(5)), events)
        accepted.append(events)

    def flood() -> None:
        for _ in range(6):
            submit_one()

    with pytest.raises(QueueFull, match="too many requests wait"):
        flood()
    assert 2 <= len(accepted) <= 5
    gate.open()
    assert all(isinstance(e.last(), GenerateResult) for e in accepted)
    assert instance.stats().rejected == 1


def test_closing_fails_what_runs_and_what_waits(model: Path, start: Start) -> None:
    instance = start(model, limits=Limits(max_batch=1))
    gate, all_events = Gate(instance), [Events() for _ in range(4)]
    for events in all_events:
        instance.submit(request(prompt(5)), events)
    assert gate.entered.wait(20)
    closer = threading.Thread(target=instance.close)
    closer.start()
    gate.open()
    closer.join(20)
    assert all(isinstance(e.last(), EngineClosed) for e in all_events)
    with pytest.raises(EngineClosed):
        instance.generate(request(prompt(5)))
    instance.close()


def test_a_failing_step_fails_its_request_only(model: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = start(model)
    forward = instance._runner.forward

    def broken(sequences: Any, tokens: Any, *, keep: int) -> Any:
        if 99 in tokens[0]:
            raise RuntimeError("out of memory")
        return forward(sequences, tokens, keep=keep)

    monkeypatch.setattr(instance._runner, "forward", broken)
    with pytest.raises(EngineFailed, match="out of memory"):
        instance.generate(request([5, 99, 5]))
    assert instance.generate(request([5, 5])).tokens


def test_a_callback_that_raises_ends_only_its_request(model: Path, start: Start) -> None:
    instance = start(model)

    def raising(_: Any) -> None:
        raise RuntimeError("event loop is closed")

    instance.submit(request(prompt(5), max_tokens=LONG), raising)
    assert instance.generate(request(prompt(5))).tokens


def test_many_clients_at_once(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance = start(model, pool, limits=Limits(max_batch=4))
    requests = [request(prompt(PAGE * (1 + i % 3) + i, seed=i % 3), max_tokens=5) for i in range(12)]
    with ThreadPoolExecutor(6) as clients:
        got = [r.tokens for r in clients.map(instance.generate, requests)]
    assert got == [instance.generate(r).tokens for r in requests]
    stats = instance.stats()
    assert stats.finished == 24
    assert stats.tokens_native > 0
    assert stats.tokens_native + stats.tokens_computed == 2 * sum(len(r.prompt) for r in requests)


def test_a_slow_pool_skips_storing_instead_of_delaying(model: Path, pool: EmbeddedPool, start: Start) -> None:
    instance = start(model, pool, limits=Limits(store_queue=1))
    hold, reserve = threading.Event(), pool.reserve

    def slow(items: Any, options: PutOptions = PutOptions()) -> Any:
        assert hold.wait(20)
        return reserve(items, options)

    pool.reserve = slow  # type: ignore[method-assign]
    for seed in range(4):
        assert instance.generate(request(prompt(2 * PAGE, seed))).tokens
    assert instance.stats().pages_skipped >= 4
    hold.set()
    assert instance.flush()
    assert instance.stats().pages_stored >= 2
