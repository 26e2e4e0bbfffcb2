"""An instance's figures at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moonpool.engine.fuse import Unfused
from moonpool.engine.prefix import LoadCounters
from moonpool.engine.publish import StoreCounters
from moonpool.engine.sequence import RunningSequence


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, gauges, and sums of seconds over all requests."""

    waiting: int = 0
    running: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    """Refused because the queue was full."""

    tokens_native: int = 0
    tokens_converted: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0

    queue_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0

    pages_stored: int = 0
    pages_existed: int = 0
    pages_skipped: int = 0
    """Not stored because the store queue was full."""
    pages_failed: int = 0
    pages_vanished: int = 0
    """Gone between lookup and read; computed instead."""
    pages_wrong_size: int = 0
    pool_errors: int = 0

    prefixes_paid: int = 0
    """Requests whose converted pages were taken because that was faster than computing them."""
    prefixes_too_short: int = 0
    """Not taken: too few tokens for what taking them costs."""
    prefixes_too_slow: int = 0
    """Not taken: computing is as fast as reading or converting them."""
    tokens_declined: int = 0
    """Computed although a conversion could have given them."""
    on_load_pages: int = 0
    """Converted by this engine in its own load step."""
    on_load_failed: int = 0
    """Could not be converted in time, or at all; computed instead."""
    tokens_shared: int = 0
    """Of the native ones: read from another model that has the same KV."""
    requests_fused: int = 0
    """Whose cache was improved with another model's."""
    requests_unfused: int = 0
    """Wanted that, but the source's pages were not all there, or its fuser was not."""
    tokens_fused: int = 0
    tokens_drafted: int = 0
    """Of answers: guessed by the draft."""
    tokens_accepted: int = 0
    """Of these: right."""
    tokens_replayed: int = 0
    """Computed once more because rounding could have decided between two tokens."""


@dataclass(slots=True)
class Totals:
    """Sums over ended requests. Every method is called under the scheduler's lock."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    native: int = 0
    converted: int = 0
    computed: int = 0
    generated: int = 0
    declined: int = 0
    fused: int = 0
    unfused: int = 0
    tokens_fused: int = 0
    shared: int = 0
    drafted: int = 0
    accepted: int = 0
    replayed: int = 0
    queue: float = 0.0
    lookup: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    ttft: float = 0.0

    def add(self, seq: RunningSequence) -> None:
        """Count a sequence that ended, in whichever way."""
        if seq.finish_reason is None:
            self.failed += 1
        elif seq.finish_reason == "abort":
            self.aborted += 1
        else:
            self.finished += 1
        usage = seq.usage
        self.native += usage.native
        self.converted += usage.converted
        self.computed += usage.computed
        self.generated += usage.completion
        self.declined += usage.declined
        self.fused += seq.fused
        self.unfused += isinstance(seq.fusing, Unfused)
        self.tokens_fused += usage.fused
        self.shared += usage.shared
        self.drafted += usage.drafted
        self.accepted += usage.accepted
        self.replayed += usage.replayed
        for name in ("queue", "lookup", "load", "prefill", "decode", "ttft"):
            setattr(self, name, getattr(self, name) + getattr(seq.timing, name))

    def snapshot(self, waiting: int, running: int, load: LoadCounters, store: StoreCounters) -> EngineStats:
        return EngineStats(
            waiting=waiting,
            running=running,
            requests=self.requests,
            finished=self.finished,
            aborted=self.aborted,
            failed=self.failed,
            rejected=self.rejected,
            tokens_native=self.native,
            tokens_converted=self.converted,
            tokens_computed=self.computed,
            tokens_generated=self.generated,
            queue_s=self.queue,
            lookup_s=self.lookup,
            load_s=self.load,
            prefill_s=self.prefill,
            decode_s=self.decode,
            ttft_s=self.ttft,
            pages_stored=store.stored,
            pages_existed=store.existed,
            pages_skipped=store.skipped,
            pages_failed=store.failed,
            pages_vanished=load.vanished,
            pages_wrong_size=load.wrong_size,
            pool_errors=load.pool_errors,
            prefixes_paid=load.decisions["pays"],
            prefixes_too_short=load.decisions["too_short"],
            prefixes_too_slow=load.decisions["too_slow"],
            tokens_declined=self.declined,
            tokens_shared=self.shared,
            requests_fused=self.fused,
            requests_unfused=self.unfused,
            tokens_fused=self.tokens_fused,
            tokens_drafted=self.drafted,
            tokens_accepted=self.accepted,
            tokens_replayed=self.replayed,
            on_load_pages=load.on_load["converted"],
            on_load_failed=load.on_load.total() - load.on_load["converted"] - load.on_load["not_stored"],
        )
