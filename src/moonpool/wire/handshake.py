"""How a connection opens: both sides prove that they know the secret before either reads anything else.

    client                                          server
    Open(purpose, role, nonce)           ───►
                                         ◄───       Challenge(nonce)                    ┐ only with
    Proof(HMAC(secret, "client" + all))  ───►                                           ┘ a secret
                                         ◄───       Accepted(HMAC(secret, "server" + all))

"All" is the protocol's version, role, purpose and both nonces: a proof is good for one connection, one direction and one role, so
it can be neither replayed, nor reflected, nor used for another role. The client proves first: a stranger who connects gets nothing
to guess secrets from. Who sits between the two can relay them; TLS is against that.

These messages are decoded by their own decoders, in frames of at most MAX_HANDSHAKE bytes: a stranger reaches no other code.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Container
from typing import Annotated, Any, TypeVar

import msgspec

from moonpool.errors import AccessDenied, ConnectionLost, MoonpoolError, ProtocolError, WireError, from_fields
from moonpool.wire import framing
from moonpool.wire.address import TcpAddress
from moonpool.wire.auth import Peer, Role, Security
from moonpool.wire.messages import Error, Message

MAX_HANDSHAKE = 1024
_NONCE = 32
_MAC = 32
_FIX = "Give both sides the same secret file."

Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE, max_length=_NONCE)]
Mac = Annotated[bytes, msgspec.Meta(min_length=_MAC, max_length=_MAC)]
M = TypeVar("M", bound=Message)


class Open(Message, frozen=True):
    purpose: Annotated[str, msgspec.Meta(max_length=16)]
    role: Role
    nonce: Nonce | None
    """None: the client knows no secret."""


class Challenge(Message, frozen=True):
    nonce: Nonce


class Proof(Message, frozen=True):
    mac: Mac


class Accepted(Message, frozen=True):
    mac: Mac | None


_encode = msgspec.msgpack.Encoder().encode
_from_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Open | Proof)
_from_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Challenge | Accepted | Error)


def offer(sock: socket.socket, security: Security, purpose: str, role: Role | None, deadline: float) -> None:
    """The client's side. `role`: None = the highest that `security` has a secret for.

    Raises AccessDenied (a side did not prove itself), ConnectionLost, DeadlineExceeded, ProtocolError.
    """
    role = role or ("admin" if security.admin_secret else "data")
    secret = _secret_of(security, role)
    nonce = os.urandom(_NONCE) if secret else None
    framing.send(sock, _encode(Open(purpose, role, nonce)))
    answer = _answer(sock, deadline)
    if secret is None or nonce is None:
        if not isinstance(answer, Accepted):
            raise ProtocolError("peer asks for a proof that was not offered")
        return
    if not isinstance(answer, Challenge):
        raise AccessDenied("the peer proves no secret, so it is not trusted with ours", fix=_FIX)
    proved = (role, purpose, nonce, answer.nonce)
    framing.send(sock, _encode(Proof(_mac(secret, "client", *proved))))
    answer = _answer(sock, deadline)
    if (
        not isinstance(answer, Accepted)
        or answer.mac is None
        or not hmac.compare_digest(answer.mac, _mac(secret, "server", *proved))
    ):
        raise AccessDenied("the peer does not know our secret", fix=_FIX)


def admit(
    sock: socket.socket, security: Security, purposes: Container[str], let_in: Callable[[], None]
) -> tuple[str, Peer]:
    """The server's side: the purpose and who it is. The caller ends a handshake that takes too long.

    A client that is refused is told why. `let_in` is called when it has proved itself, and may refuse by a MoonpoolError.
    Raises AccessDenied, ProtocolError, FrameTooLarge, ConnectionLost, and what `let_in` raises.
    """
    try:
        opened = _request(sock, Open)
        mac = _checked(sock, security, opened)
        if opened.purpose not in purposes:
            raise ProtocolError("not offered here", key=opened.purpose)
        let_in()
    except MoonpoolError as e:
        with contextlib.suppress(WireError):  # perhaps it is still there to hear why
            framing.send(sock, _encode(Error(type(e).__name__, e.fields())))
        raise
    framing.send(sock, _encode(Accepted(mac)))
    return opened.purpose, _peer(sock, security, opened.role)


def _checked(sock: socket.socket, security: Security, opened: Open) -> bytes | None:
    """Our own proof, after the client's; None where no secret is asked for."""
    secret = security.admin_secret if opened.role == "admin" else security.secret
    if secret is None and opened.role == "admin":
        raise AccessDenied("this server has no admin secret", fix="Start it with one, or connect without.")
    if secret is None and opened.nonce is not None:
        raise AccessDenied("this server has no secret, so it cannot prove to know yours", fix=_FIX)
    if secret is None:
        return None
    if opened.nonce is None:
        raise AccessDenied("a secret is needed here", fix=_FIX)
    nonce = os.urandom(_NONCE)
    framing.send(sock, _encode(Challenge(nonce)))
    proof = _request(sock, Proof)
    proved = (opened.role, opened.purpose, opened.nonce, nonce)
    if not hmac.compare_digest(proof.mac, _mac(secret, "client", *proved)):
        raise AccessDenied("wrong secret", fix=_FIX)
    return _mac(secret, "server", *proved)


def _secret_of(security: Security, role: Role) -> bytes | None:
    return security.admin_secret if role == "admin" else security.secret


def _mac(secret: bytes, side: str, role: str, purpose: str, client: bytes, server: bytes) -> bytes:
    said = _encode(("moonpool", framing.VERSION, side, role, purpose, client, server))
    return hmac.digest(secret, said, "sha256")


def _answer(sock: socket.socket, deadline: float) -> Any:
    body = framing.receive(sock, cap=MAX_HANDSHAKE, deadline=deadline)
    if body is None:
        raise ConnectionLost("peer closed the connection")
    answer = decoded(_from_server, body)
    if isinstance(answer, Error):
        raise from_fields(answer.name, answer.fields)
    return answer


def _request(sock: socket.socket, kind: type[M]) -> M:
    body = framing.receive(sock, cap=MAX_HANDSHAKE)
    if body is None:
        raise ConnectionLost("peer closed the connection")
    request = decoded(_from_client, body)
    if not isinstance(request, kind):
        raise ProtocolError("not the next step of the handshake", need=kind.__name__, have=type(request).__name__)
    return request


def decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes | bytearray) -> Any:
    """Raises ProtocolError for all that is no message of that decoder."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:  # ValueError: not UTF-8
        raise ProtocolError(f"unreadable message: {e}") from e


def _peer(sock: socket.socket, security: Security, role: Role) -> Peer:
    if sock.family != socket.AF_UNIX:
        try:
            host, port = sock.getpeername()[:2]
        except OSError as e:
            raise ConnectionLost(f"gone already: {e}") from e
        return Peer(role, False, str(TcpAddress(host, port)))
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if security.admin_secret is None and uid == os.geteuid():
        role = "admin"
    return Peer(role, True, f"pid {pid} uid {uid}", pid)
