"""One instance does both: the client's bytes go to it, its bytes come back."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from moonpool.conductor.executors.base import Call, Executor
from moonpool.conductor.upstream import Answer, Upstream


class PlainExecutor(Executor):
    def answer(self, call: Call, upstream: Upstream) -> AbstractAsyncContextManager[Answer]:
        return upstream.post(call.decode, call.path, call.raw, call.headers)
