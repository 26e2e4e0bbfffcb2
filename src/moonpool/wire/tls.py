"""TLS for TCP connections, by the standard library."""

from __future__ import annotations

import socket
import ssl

from moonpool.errors import AccessDenied, ConfigError, ConnectionLost, DeadlineExceeded
from moonpool.wire.auth import TlsFiles


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises ConfigError for files that are missing or no PEM."""
    if not files.cert or not files.key:
        raise ConfigError("a TLS server needs a certificate and its key", fix="Give tls_cert and tls_key.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, files)
    if files.mutual:
        if not files.ca:
            raise ConfigError("mutual TLS needs a CA", fix="Give tls_ca: who signs the clients' certificates.")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Verifies the server's certificate and name. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not files.ca:
        context.load_default_certs()
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        if files.cert:
            context.load_cert_chain(files.cert, files.key or None, password=_no_password)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the TLS certificate and key: {_reason(e)}", key=files.cert) from e
    try:
        if files.ca:
            context.load_verify_locations(files.ca)
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot use the TLS CA: {_reason(e)}", key=files.ca) from e


def _no_password() -> str:
    raise ValueError("the key is encrypted; Moonpool cannot ask for a password")


def accept(sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """The socket to use from here on; its handshake comes with `handshake`."""
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def connect(sock: socket.socket, files: TlsFiles, host: str) -> ssl.SSLSocket:
    """A TLS session over `sock`, whose timeout counts. Raises AccessDenied if the server is not who it should be, ConnectionLost."""
    wrapped = client_context(files).wrap_socket(
        sock, server_hostname=files.name or host.partition("%")[0], do_handshake_on_connect=False
    )
    try:
        handshake(wrapped)
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def handshake(sock: ssl.SSLSocket) -> None:
    try:
        sock.do_handshake()
    except ssl.SSLCertVerificationError as e:
        raise AccessDenied(
            f"the certificate is not trusted: {e.verify_message}",
            fix="Check tls_ca, and tls_name if it is another name.",
        ) from e
    except TimeoutError as e:
        raise DeadlineExceeded("no TLS handshake in time") from e
    except (OSError, ValueError) as e:
        raise ConnectionLost(f"TLS handshake failed: {_reason(e)}", fix="Do both sides use TLS?") from e


def _reason(e: Exception) -> str:
    return str(getattr(e, "reason", None) or getattr(e, "strerror", None) or e)
