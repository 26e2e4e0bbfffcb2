"""Addresses, as people write them and as they should not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.errors import ConfigError
from moonpool.wire import address
from moonpool.wire.address import TcpAddress, UnixAddress, advertised, host_only, is_loopback, parse


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/run/m.sock", "/run/m.sock"),
        ("unix:/run/m.sock", "/run/m.sock"),
        ("unix:///run/m.sock", "/run/m.sock"),
        ("unix:m.sock", "m.sock"),
        ("./localhost:80", "./localhost:80"),
    ],
)
def test_paths(text: str, path: str) -> None:
    assert parse(text) == UnixAddress(path)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:9000", "::1", 9000),
        ("[2001:db8::1]", "2001:db8::1", 7),
        ("2001:db8::1", "2001:db8::1", 7),
        ("2001:0db8:0::1", "2001:db8::1", 7),
        ("2001:db8::1:9000", "2001:db8::1:9000", 7),  # no port: it is an address already
        ("::", "::", 7),
        ("[fe80::1%eth0]:9000", "fe80::1%eth0", 9000),
        ("localhost:9000", "localhost", 9000),
        ("tcp://localhost:9000", "localhost", 9000),
        ("tcp://[::1]:9000", "::1", 9000),
        ("h", "h", 7),
        ("node-1.pool_a.example:0", "node-1.pool_a.example", 0),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
    ],
)
def test_j4_tcp(text: str, host: str, port: int) -> None:
    assert parse(text, default_port=7) == TcpAddress(host, port)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("[::1", "brackets"),
        ("::1]:9", "brackets"),
        ("[::1]9", "brackets"),
        ("[localhost]:9", "brackets"),
        ("[]:9", "brackets"),
        ("h:", "port"),
        ("h:99999", "port"),
        ("h:-1", "port"),
        ("h:+1", "port"),
        ("h:1_0", "port"),
        ("h:٣", "port"),
        ("h:http", "port"),
        (":9000", "no host"),
        ("10.0.0.1:5000:6000", "IPv6"),
        ("1.2.3:80", "IPv4"),
        ("256.1.1.1:80", "IPv4"),
        ("http://h:80", "scheme http"),
        ("grpc://h:80", "scheme grpc"),
        ("tcp://h:80/", "port"),
        (" h:80", "spaces"),
        ("h:80\n", "spaces"),
        ("h h:80", "spaces"),
        ("h\0:80", "host name"),
        ("-h:80", "host name"),
        ("h..x:80", "host name"),
        ("x" * 64 + ":80", "host name"),
        ("unix:", "path"),
        ("unix:///", "path"),
        ("a/\0b", "path"),
        ("/" + "x" * 107, "too long"),
        ("/" + "é" * 54, "too long"),
    ],
)
def test_j4_i4_what_is_no_address_says_why(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse(text, default_port=7)


@pytest.mark.parametrize("text", ["h", "::1", "[::1]", "10.0.0.1", "tcp://h"])
def test_a_port_must_be_said_where_there_is_no_default(text: str) -> None:
    with pytest.raises(ConfigError, match="no port"):
        parse(text)


@example("unix")
@given(st.text(max_size=60) | st.text("[]:/.%0129afhx- ", max_size=30))
def test_any_text_is_an_address_that_comes_back_or_an_error(text: str) -> None:
    try:
        parsed = parse(text, default_port=7)
    except ConfigError:
        return
    assert parse(address.format(parsed)) == parsed


@pytest.mark.parametrize("text", ["10.0.0.1:5000", "h:0", "[::1]:80", "tcp://h:1", "/run/m", "", " h", "http://h"])
def test_i4_a_host_holds_no_port(text: str) -> None:
    with pytest.raises(ConfigError):
        host_only(text)


def test_hosts() -> None:
    assert [host_only(t) for t in ("h", "10.0.0.1", "::1", "[::1]")] == ["h", "10.0.0.1", "::1", "::1"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_i5_a_wildcard_is_not_told_to_others(host: str) -> None:
    bound = TcpAddress(host, 9000)
    with pytest.raises(ConfigError, match="wildcard"):
        advertised(bound)
    with pytest.raises(ConfigError, match="wildcard"):
        advertised(TcpAddress("10.0.0.1", 9000), host)
    assert advertised(bound, "10.0.0.1") == TcpAddress("10.0.0.1", 9000)


def test_what_is_told_to_others() -> None:
    assert advertised(UnixAddress("/run/m")) == UnixAddress("/run/m")
    assert advertised(TcpAddress("h", 1)) == TcpAddress("h", 1)
    with pytest.raises(ConfigError, match="port 0"):
        advertised(TcpAddress("h", 0))
    with pytest.raises(ConfigError, match="with a port"):
        advertised(TcpAddress("h", 1), "10.0.0.1:5000")


def test_loopback() -> None:
    assert all(
        is_loopback(TcpAddress(h, 1)) for h in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost")
    )
    assert not any(is_loopback(TcpAddress(h, 1)) for h in ("0.0.0.0", "::", "10.0.0.1", "2001:db8::1", "no.invalid"))
