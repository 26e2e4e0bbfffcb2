"""Both ends of a proxy measurement, as cheap as Python allows, so that the cores are left to the proxy: an engine that answers with
ready-made bytes, and a client that sends ready-made bytes and counts whole answers.

    python -m benchmarks.conductor.lean serve PORT
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

PIECES = 32
ANSWER = json.dumps(
    {"id": "1", "object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "x" * 200}}]}
)
_JSON = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(ANSWER)}\r\n\r\n{ANSWER}".encode()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"choices":[{"delta":{"content":"token"}}]}\n\n'
_CHUNK = f"{len(_EVENT):x}\r\n".encode() + _EVENT + b"\r\n"
_LAST = b"data: [DONE]\n\n"
_TAIL = f"{len(_LAST):x}\r\n".encode() + _LAST + b"\r\n0\r\n\r\n"
_OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 38\r\n\r\n{"data": [{"id": "m"}], "status":"ok"}'


class _Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 : head.find(b"\r\n", at) if head.find(b"\r\n", at) > 0 else end])
            elif b"transfer-encoding: chunked" in head:
                last = self._buffer.find(b"0\r\n\r\n", end)
                if last < 0:
                    return
                length = last + 5 - end - 4
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            if head.startswith(b"get"):
                self._transport.write(_OK)
            elif b'"stream": true' in body or b'"stream":true' in body:
                self._transport.write(_HEAD)
                for _ in range(PIECES):
                    self._transport.write(_CHUNK)
                self._transport.write(_TAIL)
            else:
                self._transport.write(_JSON)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", port)
    await server.serve_forever()


def request(host: str, stream: bool, words: int = 40) -> bytes:
    """A chat request of about 1 KB, as it goes over the wire."""
    content = " ".join(f"word{i}" for i in range(words))
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream, "max_tokens": 64}
    )
    kind = "content-type: application/json"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n{kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def _one(port: int, raw: bytes, stream: bool, until: float, times: list[float], errors: list[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head[:20]:
                errors.append(head[:200].decode("latin-1"))
                return
            lower = head.lower()
            if (at := lower.find(b"content-length:")) >= 0:
                body = await reader.readexactly(int(lower[at + 15 : lower.find(b"\r\n", at)]))
            else:
                body = await _chunked(reader)
            whole = body.count(b"data: {") == PIECES and b"[DONE]" in body if stream else b"xxx" in body
            if not whole:
                errors.append(f"not whole: {body[:80]!r}")
                return
            times.append(time.perf_counter() - began)
    finally:
        writer.close()


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


async def load(port: int, *, stream: bool, connections: int, seconds: float) -> dict[str, float]:
    """Whole answers per second and the median time of one. Raises RuntimeError if any was not whole."""
    raw = request(f"127.0.0.1:{port}", stream)
    times: list[float] = []
    errors: list[str] = []
    for length, keep in ((1.0, False), (seconds, True)):  # the first second is not counted
        times.clear()
        until = time.perf_counter() + length
        began = time.perf_counter()
        await asyncio.gather(*(_one(port, raw, stream, until, times, errors) for _ in range(connections)))
        took = time.perf_counter() - began
        if errors:
            raise RuntimeError(f"{len(errors)} answers were not whole: {errors[0]}")
        if keep:
            return {"rps": len(times) / took, "p50_ms": 1000 * statistics.median(times)}
    raise AssertionError


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve(int(sys.argv[2])))
