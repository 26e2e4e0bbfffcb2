"""The metadata server: its table, and the HTTP protocol as Mooncake's engines speak it."""

from __future__ import annotations

import socket

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from moonpool.errors import ConfigError
from moonpool.store.metadata.server import MetadataServer, listen
from moonpool.store.metadata.table import Outcome, Table
from moonpool.testing.leaks import no_leaks

RPC = "mooncake/rpc_meta/10.0.0.1:12345"


def test_a_value_is_replaced_but_a_living_owners_place_is_not_taken() -> None:
    table = Table()
    assert table.put("mooncake/ram/a", b"1") is table.put("mooncake/ram/a", b"2") is Outcome.DONE
    assert table.get("mooncake/ram/a") == b"2"
    assert table.put(RPC, b"1") is Outcome.DONE
    assert table.put(RPC, b"2") is Outcome.TAKEN
    assert table.put(RPC, b"1") is Outcome.DONE  # the owner says it again
    assert table.get(RPC) == b"1"


def test_a_dead_owners_descriptors_go_together_and_nobody_elses() -> None:
    table = Table()
    for key in (RPC, "mooncake/ram/10.0.0.1:12345", "mooncake/c1/ram/10.0.0.1:12345", "mooncake/ram/110.0.0.1:12345"):
        table.put(key, b"x")
    assert table.remove_owner("10.0.0.1:12345") == 3
    assert list(table.values) == ["mooncake/ram/110.0.0.1:12345"]
    assert table.put(RPC, b"its successor") is Outcome.DONE


def test_the_table_is_bounded_in_number_and_bytes() -> None:
    table = Table(max_keys=2, max_value=10, max_total=15)
    assert table.put("a", bytes(11)) is Outcome.TOO_LARGE
    assert table.put("k" * 1025, b"") is Outcome.TOO_LARGE
    assert table.put("a", bytes(10)) is Outcome.DONE
    assert table.put("b", bytes(6)) is Outcome.FULL
    assert table.put("b", bytes(5)) is Outcome.DONE
    assert table.put("c", b"") is Outcome.FULL
    assert table.put("a", bytes(9)) is Outcome.DONE  # in place of its own old value
    assert table.remove("a")
    assert not table.remove("a")
    assert table.put("c", bytes(10)) is Outcome.DONE


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.booleans())))
def test_the_total_is_the_sum_of_what_is_there(steps: list[tuple[str, int, bool]]) -> None:
    table = Table(max_keys=2, max_value=10, max_total=15)
    for key, size, put in steps:
        _ = table.put(key, bytes(size)) if put else table.remove(key)
        assert table.total == sum(map(len, table.values.values())) <= 15
        assert len(table.values) <= 2


def test_the_protocol_answers_as_the_peers_server() -> None:
    with no_leaks(), MetadataServer() as server, requests.Session() as http:
        http.trust_env = False

        def ask(method: str, key: str | None = None, body: bytes | None = None) -> tuple[int, bytes]:
            answer = http.request(method, server.url, params={} if key is None else {"key": key}, data=body)
            assert answer.headers["content-type"] == "application/json"
            return answer.status_code, answer.content

        for method in ("GET", "PUT", "DELETE", "PATCH"):
            for key in (None, "", "   "):
                assert ask(method, key, b"v") == (400, b"metadata key is required")
        assert ask("GET", "k") == (404, b"metadata not found")
        assert ask("PUT", "  k  ", b"\x00\xff{}") == (200, b"metadata updated")
        assert ask("GET", "k") == (200, b"\x00\xff{}")
        assert ask("POST", "k", b"v") == ask("PATCH", "k", b"v") == (405, b"Method not allowed")
        assert ask("PUT", RPC, b"1")[0] == 200
        assert ask("PUT", RPC, b"2") == (400, b"Duplicate rpc_meta key not allowed")
        assert ask("DELETE", "k") == (200, b"metadata deleted")
        assert ask("DELETE", "k") == (404, b"metadata not found")
        assert ask("PUT", "big", bytes(server.table.max_value + 1))[0] == 413
        base = server.url.removesuffix("/metadata")
        assert http.get(f"{base}/health").status_code == 200
        assert http.delete(f"{base}/owners", params={"name": "10.0.0.1:12345"}).text == "1"
        assert ask("GET", RPC)[0] == 404


def test_only_loopback_unless_the_network_is_trusted_explicitly() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="no authentication"):
            MetadataServer(host)
    with listen("0.0.0.0", 0, trust_network=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            MetadataServer(port=port)
