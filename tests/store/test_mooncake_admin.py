"""The peer's admin port as a plain HTTP server here: what is read of it, what is made of nonsense, what a watch hears."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from moonpool.errors import ConfigError, ConnectionLost
from moonpool.keys import PageKey
from moonpool.store.mooncake.admin import Admin
from moonpool.store.mooncake.events import LocalEvents
from moonpool.store.mooncake.watch import KeyWatch
from moonpool.types import Stored

OWNER = "a" * 32
_names = count()


class Replies(BaseHTTPRequestHandler):
    pages: dict[str, bytes]

    def do_GET(self) -> None:
        body = self.pages.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def pages() -> dict[str, bytes]:
    return {}


@pytest.fixture
def admin(pages: dict[str, bytes]) -> Iterator[Admin]:
    class Mine(Replies): ...

    Mine.pages = pages
    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Admin(f"127.0.0.1:{server.server_port}", 5.0)
        server.shutdown()
        thread.join()


def page(origin: str = "") -> PageKey:
    return PageKey(OWNER, next(_names), f"{next(_names):032x}", origin)


def test_figures_segments_and_keys_are_read(admin: Admin, pages: dict[str, bytes]) -> None:
    pages["/metrics"] = (
        b'# HELP x y\nmaster_key_count 5\nmaster_total_capacity_bytes 1.6e+07\nsegment_bytes{segment="a"} 7\n\n'
    )
    assert admin.figures() == {"master_key_count": 5, "master_total_capacity_bytes": 16_000_000}
    segment = {
        "segment_name": "h:1",
        "te_endpoint": "h:2",
        "base_address": "0x7f00",
        "size_bytes": 16,
        "allocator_used_bytes": 8,
        "status": "OK",
        "unknown_to_us": 1,
    }
    pages["/get_segments_detail"] = json.dumps({"total_segments": 1, "segments": [segment]}).encode()
    [read] = admin.segments()
    assert (read.segment_name, read.base, read.size_bytes) == ("h:1", 0x7F00, 16)
    pages["/get_all_keys"] = "a\né\n\nlast".encode()
    assert list(admin.all_keys()) == ["a", "é", "last"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"segments": [{}]}', b"\xff\xfe"])
def test_nonsense_is_a_lost_connection(admin: Admin, pages: dict[str, bytes], body: bytes) -> None:
    pages["/get_segments_detail"] = body
    with pytest.raises(ConnectionLost):
        admin.segments()
    with pytest.raises(ConnectionLost):
        admin.figures()  # 404
    with pytest.raises(ConnectionLost):
        list(Admin("127.0.0.1:1", 1.0).all_keys())
    with pytest.raises(ConfigError):
        Admin("no port", 1.0)


def test_a_watch_tells_new_native_pages_of_who_is_subscribed_once(admin: Admin, pages: dict[str, bytes]) -> None:
    events = LocalEvents()
    watch = KeyWatch(admin, events, 60.0)
    old, new, own = page(), page(), page()
    others = ["no page", page("b" * 32).text, PageKey("f" * 32, 0, "c" * 32).text]

    def look(*keys: PageKey) -> list[str]:
        pages["/get_all_keys"] = "\n".join([*(k.text for k in keys), *others]).encode()
        watch.look()
        return [e.key for e in stream.next(100, 0.0)]

    stream = events.subscribe([OWNER], 100)
    assert look(old) == [old.text]
    watch.note([own.text])
    assert look(new, own, old) == [new.text]
    assert look(new, own) == []
    assert look(new, own, old) == [old.text], "it was gone, and is there again"
    stream.close()
    pages.clear()
    watch.look()  # nobody listens: nothing is asked, so nothing can fail
    watch.close()


def test_a_watch_says_once_that_the_master_is_away_and_goes_on(
    admin: Admin, pages: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    events = LocalEvents()
    stream = events.subscribe([OWNER], 100)
    watch = KeyWatch(admin, events, 0.01)
    assert stream.next(10, 0.2) == []
    key = page()
    pages["/get_all_keys"] = key.text.encode()
    assert stream.next(10, 10.0) == [Stored(key.text, 0)]
    watch.close()
    assert len(caplog.records) == 1
