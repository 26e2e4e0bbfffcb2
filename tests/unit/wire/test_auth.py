"""Who gets in, as what, and what those see who do not."""

from __future__ import annotations

import base64
import io
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from rich.pretty import Pretty

from moonpool.errors import AccessDenied, ConfigError, MoonpoolError
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.wire import framing, handshake
from moonpool.wire.auth import THIS_PROCESS, Peer, Role, Security, load_security, security_from_environment
from moonpool.wire.dial import connect
from moonpool.wire.handshake import Accepted, Challenge, Open, Proof
from moonpool.wire.listener import Listener
from moonpool.wire.messages import Error

CANARY = b"canary-secret-0123456789"
ADMIN = b"canary-admin-9876543210"
OPEN, DATA, BOTH, ADMIN_ONLY = Security(), Security(CANARY), Security(CANARY, ADMIN), Security(None, ADMIN)


class Door:
    """A listener that remembers who came in."""

    def __init__(self, address: str, security: Security) -> None:
        self.came: list[Peer] = []
        self.listener = Listener(address, security, {"rpc": self._serve})

    def _serve(self, sock: socket.socket, peer: Peer) -> None:
        self.came.append(peer)
        sock.sendall(b"inside")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with no_leaks():
        yield


def place(kind: str, folder: Path) -> str:
    return str(folder / "s") if kind == "unix" else "127.0.0.1:0"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("server", "client", "asked", "role"),
    [
        (OPEN, OPEN, None, "data"),
        (DATA, DATA, None, "data"),
        (BOTH, DATA, None, "data"),
        (BOTH, BOTH, None, "admin"),
        (BOTH, BOTH, "data", "data"),
        (BOTH, ADMIN_ONLY, None, "admin"),
        (ADMIN_ONLY, OPEN, None, "data"),
        (ADMIN_ONLY, ADMIN_ONLY, None, "admin"),
    ],
)
def test_who_knows_the_secret_gets_in(
    kind: str, server: Security, client: Security, asked: Role | None, role: str, tmp_path: Path
) -> None:
    door = Door(place(kind, tmp_path), server)
    with connect(door.listener.address, client, 20, role=asked) as sock:
        assert sock.recv(100) == b"inside"
    door.listener.close()
    if kind == "unix" and server.admin_secret is None:
        role = "admin"  # the same user on the same machine, and nobody asked for more
    assert [(p.role, p.local) for p in door.came] == [(role, kind == "unix")]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("server", "client", "why"),
    [
        (DATA, OPEN, "a secret is needed"),
        (BOTH, OPEN, "a secret is needed"),
        (DATA, Security(b"another-secret-012345678"), "wrong secret"),
        (DATA, Security(CANARY + b"x"), "wrong secret"),
        (OPEN, DATA, "cannot prove"),
        (DATA, BOTH, "no admin secret"),
        (OPEN, ADMIN_ONLY, "no admin secret"),
        (BOTH, Security(CANARY, CANARY + b"-no-admin"), "wrong secret"),
        (ADMIN_ONLY, Security(None, CANARY), "wrong secret"),
    ],
)
def test_who_does_not_is_told_why_and_gets_nothing(
    kind: str, server: Security, client: Security, why: str, tmp_path: Path
) -> None:
    door = Door(place(kind, tmp_path), server)
    with pytest.raises(AccessDenied, match=why):
        connect(door.listener.address, client, 20)
    door.listener.close()
    assert not door.came
    assert door.listener.refused == 1


def test_a_role_asked_for_without_its_secret_is_refused() -> None:
    door = Door("127.0.0.1:0", BOTH)
    with pytest.raises(AccessDenied):
        connect(door.listener.address, DATA, 20, role="admin")
    door.listener.close()
    assert not door.came


def test_admin_verbs() -> None:
    THIS_PROCESS.require_admin("remove_all")
    with pytest.raises(AccessDenied, match="remove_all"):
        Peer("data", False, "x").require_admin("remove_all")


# -- attacks. `Raw` speaks the handshake by hand.


class Raw:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(20)

    def send(self, message: msgspec.Struct) -> None:
        framing.send(self.sock, msgspec.msgpack.encode(message))

    def get(self) -> Open | Proof | Challenge | Accepted | Error:
        body = framing.receive(self.sock)
        assert body is not None
        answer: Open | Proof | Challenge | Accepted | Error = msgspec.msgpack.decode(
            body, type=Open | Proof | Challenge | Accepted | Error
        )
        return answer


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1:0", BOTH)
    yield door
    door.listener.close()
    assert not door.came


def to(door: Door) -> Raw:
    address = door.listener.address
    return Raw(socket.create_connection((address.host, address.port)))  # type: ignore[union-attr]


def refused(raw: Raw, name: str = "AccessDenied") -> bool:
    answer = raw.get()
    with raw.sock:
        return isinstance(answer, Error) and answer.name == name and framing.receive(raw.sock) is None


def overheard(security: Security) -> list[Open | Proof | Challenge | Accepted | Error]:
    """All messages of one good handshake, in order."""
    client, ear_c = socket.socketpair()
    ear_s, server = socket.socketpair()
    with client, server, ear_c, ear_s:
        threads = [
            threading.Thread(target=handshake.admit, args=(server, security, {"rpc"}, lambda: None)),
            threading.Thread(target=handshake.offer, args=(client, security, "rpc", None, time.monotonic() + 5)),
        ]
        for thread in threads:
            thread.start()
        tap = []
        for source, sink in [(Raw(ear_c), Raw(ear_s)), (Raw(ear_s), Raw(ear_c))] * 2:
            tap.append(source.get())
            sink.send(tap[-1])
        for thread in threads:
            thread.join()
    return tap


def test_a_replay_is_refused(door: Door) -> None:
    opened, _, proof, accepted = overheard(BOTH)
    raw = to(door)
    raw.send(opened)
    assert isinstance(raw.get(), Challenge)
    raw.send(proof)
    assert refused(raw)
    assert isinstance(accepted, Accepted)


def test_a_servers_proof_is_none_of_a_client(door: Door) -> None:
    """Reflection: the proof that a server gave is sent back to it as a client's, with the same nonces."""
    opened, challenge, _, accepted = overheard(BOTH)
    assert isinstance(opened, Open)
    assert isinstance(challenge, Challenge)
    assert isinstance(accepted, Accepted)
    a, b = socket.socketpair()
    with a, b, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda _: challenge.nonce)  # even if the server drew the same nonce again
        raw = Raw(a)
        raw.send(opened)
        assert accepted.mac is not None
        raw.send(Proof(accepted.mac))
        with pytest.raises(AccessDenied, match="wrong secret"):
            handshake.admit(b, BOTH, {"rpc"}, lambda: None)


@pytest.mark.parametrize("lie", [{"role": "data"}, {"purpose": "data"}, {"nonce": bytes(32)}])
def test_a_proof_is_good_for_what_was_opened_only(lie: dict[str, object]) -> None:
    opened, challenge, proof, _ = overheard(BOTH)
    assert isinstance(challenge, Challenge)
    for change, good in ((lie, False), ({}, True)):
        a, b = socket.socketpair()
        with a, b, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "urandom", lambda _: challenge.nonce)
            raw = Raw(a)
            raw.send(msgspec.structs.replace(opened, **change))
            raw.send(proof)
            both = Security(ADMIN, CANARY)  # swapped, so that only what was said differs
            server = both if change.get("role") else BOTH
            if good:
                handshake.admit(b, server, {"rpc", "data"}, lambda: None)
            else:
                with pytest.raises(AccessDenied, match="wrong secret"):
                    handshake.admit(b, server, {"rpc", "data"}, lambda: None)


@pytest.mark.parametrize(
    "answers",
    [
        [Accepted(None)],
        [Accepted(bytes(32))],
        [Challenge(bytes(32)), Accepted(None)],
        [Challenge(bytes(32)), Accepted(bytes(32))],
        [Challenge(bytes(32)), Challenge(bytes(32))],
        [Challenge(bytes(32)), "its own proof"],
    ],
)
def test_an_impostor_is_not_trusted(answers: list[msgspec.Struct | str]) -> None:
    """Somebody took the server's place. The client hangs up before it sends a byte of ours."""
    client, impostor = socket.socketpair()
    heard: list[bytes] = []

    def impersonate() -> None:
        raw = Raw(impostor)
        raw.get()
        for answer in answers:
            if isinstance(answer, msgspec.Struct):
                raw.send(answer)
            else:
                reflected = raw.get()
                assert isinstance(reflected, Proof)
                raw.send(Accepted(reflected.mac))
        while data := impostor.recv(1000):
            heard.append(data)

    thread = threading.Thread(target=impersonate)
    thread.start()
    with client, pytest.raises(AccessDenied):
        handshake.offer(client, DATA, "rpc", None, time.monotonic() + 5)
    thread.join()
    impostor.close()
    assert len(b"".join(heard)) <= 8 + 41  # a proof at the most


@pytest.mark.parametrize(
    "message", [Proof(bytes(32)), Challenge(bytes(32)), Accepted(bytes(32)), Accepted(None), Error("x", {})]
)
def test_the_wrong_first_step_is_refused(door: Door, message: msgspec.Struct) -> None:
    raw = to(door)
    raw.send(message)
    assert refused(raw, "ProtocolError")


@pytest.mark.parametrize("message", [Open("rpc", "data", bytes(32)), Challenge(bytes(32)), Accepted(None)])
def test_the_wrong_second_step_is_refused(door: Door, message: msgspec.Struct) -> None:
    raw = to(door)
    raw.send(Open("rpc", "data", bytes(32)))
    assert isinstance(raw.get(), Challenge)
    raw.send(message)
    assert refused(raw, "ProtocolError")


def test_strangers_cannot_ask_for_memory(door: Door) -> None:
    raw = to(door)
    raw.sock.sendall(framing.HEADER.pack(framing.MAGIC, framing.VERSION, handshake.MAX_HANDSHAKE + 1))
    assert refused(raw, "FrameTooLarge")


# -- files


def secret_file(folder: Path, content: bytes = CANARY + b"\n", mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_secret_comes_from_its_file(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    assert load_security(secret_file=path) == Security(CANARY)
    assert security_from_environment({"MOONPOOL_SECRET_FILE": path}).secret == CANARY
    assert security_from_environment({}) == Security()


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o666, 0o601])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        load_security(secret_file=path)
    assert caught.value.key == path


@pytest.mark.parametrize("content", [b"", b"\n\n", b"short", b" " * 100, b"x" * 5000])
def test_a_file_without_a_good_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="no good secret"):
        load_security(secret_file=secret_file(tmp_path, content))


def test_other_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_security(secret_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"plain file|cannot read"):
        load_security(secret_file=str(tmp_path))
    with pytest.raises(ConfigError, match="belong together"):
        load_security(tls_cert="cert.pem")
    path = secret_file(tmp_path)
    with pytest.raises(ConfigError, match="same"):
        load_security(secret_file=path, admin_secret_file=path)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_security(tls_cert="c", tls_key=secret_file(tmp_path, mode=0o644))
    with pytest.raises(ConfigError, match="TLS_MUTUAL"):
        security_from_environment({"MOONPOOL_TLS_MUTUAL": "yes"})


# -- Q3


def test_q3_no_secret_in_reprs() -> None:
    out = io.StringIO()
    Console(file=out).print(Pretty(BOTH), [BOTH])
    shown = [repr(BOTH), str(BOTH), f"{BOTH}", f"{[BOTH]!r}", out.getvalue()]
    assert not any(b"canary" in text.encode() for text in shown)
    assert "***" in repr(BOTH)


def test_q3_no_secret_in_logs_errors_or_tracebacks(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    door = Door("127.0.0.1:0", BOTH)
    address = door.listener.address
    for client in (BOTH, DATA, OPEN, Security(CANARY + b"?"), Security(None, ADMIN + b"?")):
        try:
            connect(address, client, 20).close()
        except MoonpoolError as e:
            said += [str(e), repr(e), repr(e.fields()), *traceback.TracebackException.from_exception(e).format()]
    for make in (
        lambda: Security(CANARY, CANARY),
        lambda: Security(CANARY[:10]),
        lambda: load_security(secret_file=secret_file(tmp_path, CANARY[:10])),
        lambda: load_security(secret_file=secret_file(tmp_path, mode=0o644)),
        lambda: Listener("0.0.0.0:0", Security(None, ADMIN), {}),
        lambda: Listener(address, BOTH, {}),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        said += [str(caught.value), repr(caught.value.fields())]
    assert eventually(lambda: door.listener.connections == 0)
    door.listener.close()
    assert len(said) > 10
    assert "refused" in caplog.text
    everything = "\n".join([caplog.text, *said]).encode()
    for secret in (CANARY, ADMIN):
        for form in (secret[:10], secret[:10].hex().encode(), base64.b64encode(secret)[:12]):
            assert form not in everything
