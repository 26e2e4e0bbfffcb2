"""An OpenAI-compatible engine that only counts: for tests of the conductor, and to measure its proxy.

`mode`, which a test may change at any time, says how it behaves:

    ok          an answer of `pieces` pieces
    refuse      503        fail    500        bad     400
    silent      takes the request and never answers
    break       cuts the connection after the first piece
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

import msgspec
import uvicorn

from moonpool.wire.http import bind


class StubEngine:
    """ASGI."""

    def __init__(self, name: str = "stub", pieces: int = 4, delay_s: float = 0.0, prefill_s: float = 0.0) -> None:
        self.name, self.pieces, self.delay_s, self.prefill_s = name, pieces, delay_s, prefill_s
        self.mode = "ok"
        self.healthy = True
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ended: list[str] = []
        """How each went: whole, aborted."""
        self.keep = True
        """Whether to remember bodies."""
        self._whole = msgspec.json.encode(self._answer("text"))
        self._piece = b"data: " + msgspec.json.encode(self._answer("x")) + b"\n\n"

    def _answer(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
        more = {"kv_transfer_params": {"remote_block_ids": [1, 2], "remote_host": self.name}}
        return {"id": "1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage, **more}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return None
        if scope["path"] in ("/health", "/query"):
            content = b'{"0": {"engine_id": "engine-7"}}' if scope["path"] == "/query" else b"{}"
            return await self._send(send, 200 if self.healthy else 503, content)
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = msgspec.json.decode(raw)
        if self.keep:
            self.requests.append(body)
            self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        try:
            await asyncio.wait_for(self._reply(body, send), None) if self.mode != "silent" else await self._gone(
                receive
            )
            self.ended.append("whole")
        except (asyncio.CancelledError, OSError):
            self.ended.append("aborted")
            raise
        return None

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        raise OSError("client left")

    async def _reply(self, body: dict[str, Any], send: Any) -> None:
        codes = {"refuse": 503, "fail": 500, "bad": 400}
        if self.mode in codes:
            return await self._send(send, codes[self.mode], b'{"error": {"message": "as told"}}')
        if self.prefill_s:
            await asyncio.sleep(self.prefill_s)
        if not body.get("stream"):
            return await self._send(send, 200, self._whole)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for _ in range(self.pieces):
            await send({"type": "http.response.body", "body": self._piece, "more_body": True})
            if self.mode == "break":
                raise OSError("as told")
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        return None

    @staticmethod
    async def _send(send: Any, status: int, content: bytes) -> None:
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})


class StubServer:
    """A stub engine on a thread of its own."""

    def __init__(self, engine: StubEngine | None = None) -> None:
        self.engine = engine or StubEngine()
        self._listener = bind("127.0.0.1", 0, api_key="")
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        options = uvicorn.Config(
            self.engine,
            loop="asyncio",
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._listener]), daemon=True)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._listener.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
