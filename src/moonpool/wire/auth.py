"""Who may talk to a pool, and as what: its secrets and TLS files, read once and never shown."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from moonpool.errors import AccessDenied, ConfigError

Role: TypeAlias = Literal["data", "admin"]

MIN_SECRET = 16
"""Bytes. The handshake shows a MAC of the secret to who takes the server's place, so it must not be guessable."""
_MAX_SECRET = 4096
_FIX = "Make one: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE."
_ENVIRONMENT = {
    "secret_file": "MOONPOOL_SECRET_FILE",
    "admin_secret_file": "MOONPOOL_ADMIN_SECRET_FILE",
    "tls_cert": "MOONPOOL_TLS_CERT",
    "tls_key": "MOONPOOL_TLS_KEY",
    "tls_ca": "MOONPOOL_TLS_CA",
    "tls_name": "MOONPOOL_TLS_NAME",
}


class Peer(NamedTuple):
    """Who is at the other end of an authenticated connection."""

    role: Role
    local: bool
    """Over a Unix socket, or in this process: it can be given descriptors."""
    name: str
    """For logs."""
    pid: int = 0
    """Of a local peer in another process."""

    def require_admin(self, verb: str) -> None:
        """Raises AccessDenied."""
        if self.role != "admin":
            raise AccessDenied("for admins only", key=verb, have=f"role {self.role}", fix="Give the admin secret.")


THIS_PROCESS = Peer("admin", True, "this process")


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files for TLS over TCP. A server needs `cert` and `key`; a client needs `ca`, or trusts what the system trusts."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    """Who signs the other side's certificate."""
    name: str = ""
    """The name in the servers' certificates, where it is not the host that clients connect to."""
    mutual: bool = False
    """The server asks clients for a certificate signed by `ca`."""


class Security(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """What a process knows. The default is an open pool, which only listens on Unix sockets and loopback.

    `secret` is for every verb. `admin_secret`, if there is one, is for the admin verbs on top; without one, admins are the local
    Unix-socket peers of the same user.
    """

    secret: bytes | None = None
    admin_secret: bytes | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for name, value in (("secret", self.secret), ("admin secret", self.admin_secret)):
            if value is not None and len(value) < MIN_SECRET:
                raise ConfigError(f"the {name} is too short", need=f">= {MIN_SECRET} bytes", fix=_FIX)
        if self.secret is not None and self.secret == self.admin_secret:
            raise ConfigError("secret and admin secret are the same, so everybody would be an admin", fix=_FIX)

    def __repr__(self) -> str:
        return f"Security(secret={_shown(self.secret)}, admin_secret={_shown(self.admin_secret)}, tls={self.tls!r})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("secret", _shown(self.secret)), ("admin_secret", _shown(self.admin_secret)), ("tls", self.tls)]


def _shown(secret: bytes | None) -> str:
    return "None" if secret is None else "***"


def load_security(
    *,
    secret_file: str = "",
    admin_secret_file: str = "",
    tls_cert: str = "",
    tls_key: str = "",
    tls_ca: str = "",
    tls_name: str = "",
    tls_mutual: bool = False,
) -> Security:
    """Read the files; empty = none. Raises ConfigError for what is missing, too short, or readable by others."""
    if bool(tls_cert) != bool(tls_key):
        raise ConfigError("certificate and key belong together", key=tls_cert or tls_key, fix="Give both.")
    if tls_key:
        _open_to_others(Path(tls_key).stat() if Path(tls_key).exists() else None, tls_key)
    has_tls = tls_cert or tls_ca or tls_name
    tls = TlsFiles(cert=tls_cert, key=tls_key, ca=tls_ca, name=tls_name, mutual=tls_mutual) if has_tls else None
    return Security(_read(secret_file), _read(admin_secret_file), tls)


def security_from_environment(environment: Mapping[str, str] = os.environ) -> Security:
    """MOONPOOL_SECRET_FILE, MOONPOOL_ADMIN_SECRET_FILE, MOONPOOL_TLS_CERT, _KEY, _CA, _NAME, _MUTUAL=1; unset = none."""
    files = {name: environment.get(variable, "") for name, variable in _ENVIRONMENT.items()}
    mutual = environment.get("MOONPOOL_TLS_MUTUAL", "")
    if mutual not in ("", "0", "1"):
        raise ConfigError("not a switch", key="MOONPOOL_TLS_MUTUAL", need="0 or 1", have=mutual)
    return load_security(tls_mutual=mutual == "1", **files)


def _read(path: str) -> bytes | None:
    """The secret in `path`, white space around it left out."""
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            _open_to_others(os.fstat(file.fileno()), path)
            raw = file.read(_MAX_SECRET + 1)
    except OSError as e:
        raise ConfigError("cannot read the secret", key=path, have=e.strerror or str(e), fix=_FIX) from e
    secret = raw.strip()
    if len(raw) > _MAX_SECRET or len(secret) < MIN_SECRET:
        need = f"{MIN_SECRET} to {_MAX_SECRET} bytes"
        raise ConfigError("no good secret in the file", key=path, need=need, have=f"{len(secret)} bytes", fix=_FIX)
    return secret


def _open_to_others(info: os.stat_result | None, path: str) -> None:
    """A group may read (that is how Kubernetes mounts secrets), nobody else, and only the owner may write."""
    if info is None:
        raise ConfigError("no such file", key=path)
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError("not a plain file", key=path)
    if info.st_mode & 0o027:
        have = f"mode {stat.S_IMODE(info.st_mode):03o}"
        raise ConfigError("others can read or write this file", key=path, have=have, fix=f"Run: chmod 600 {path}")
    if info.st_uid not in (0, os.geteuid()):
        raise ConfigError("the file belongs to another user", key=path, have=f"uid {info.st_uid}", fix="Make your own.")
