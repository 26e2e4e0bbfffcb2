"""SGLang's disaggregation: both calls at once, meeting in a room of the prefill's bootstrap server."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager

from moonpool.conductor.executors.base import Call, Executor, together
from moonpool.conductor.upstream import Answer, Upstream
from moonpool.errors import ConfigError


class SGLangExecutor(Executor):
    def __init__(self, rooms: random.Random | None = None) -> None:
        self._rooms = rooms or random.Random()

    def answer(self, call: Call, upstream: Upstream) -> AbstractAsyncContextManager[Answer]:
        host, _, port = call.prefill.bootstrap.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError("no bootstrap server", key=call.prefill.name, need="bootstrap: host:port")
        meeting = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": self._rooms.getrandbits(63)}
        both = call.for_decode(**meeting)
        return together(upstream, call, both, both)
