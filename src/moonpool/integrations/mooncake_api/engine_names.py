"""From a target's name to where it listens: by the name itself (P2PHANDSHAKE) or through the HTTP metadata server."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Protocol

import requests

from moonpool.errors import ConfigError, ConnectionLost, NotFound, WireError
from moonpool.integrations.mooncake_api import names
from moonpool.wire.address import TcpAddress
from moonpool.wire.auth import Security
from moonpool.wire.dial import connect

P2P = "P2PHANDSHAKE"
_HTTP_S = 5.0
_PROBE_S = 1.0


class Directory(Protocol):
    def publish(self, name: str, address: TcpAddress) -> None:
        """Say that `name` listens at `address`. Raises ConfigError if another living process has the name, ConnectionLost."""

    def find(self, name: str) -> TcpAddress:
        """Raises NotFound, ConnectionLost, ConfigError."""

    def withdraw(self, name: str) -> None:
        """Forget `name`, if that is possible."""


def directory_of(metadata_server: str, security: Security) -> Directory:
    """Raises ConfigError for a kind of metadata server that is not spoken here."""
    if metadata_server == P2P:
        return ByName()
    if metadata_server.startswith(("http://", "https://")):
        return ByHttp(metadata_server, security)
    raise ConfigError(
        "this kind of metadata server is not spoken here",
        key=metadata_server,
        need=f"{P2P} or http://HOST:PORT/metadata",
        fix="Start one: moonpool metadata.",
    )


class ByName:
    """The name is `host:rpc_port`."""

    def publish(self, name: str, address: TcpAddress) -> None: ...

    def find(self, name: str) -> TcpAddress:
        host, port = names.split(name)
        if port is None:
            raise ConfigError("no port in the target's name", key=name, need="host:rpc_port")
        return TcpAddress(host, port)

    def withdraw(self, name: str) -> None: ...


class ByHttp:
    """The key `mooncake/[cluster/]rpc_meta/<name>`, as the peer's engines use it."""

    def __init__(self, url: str, security: Security) -> None:
        self._url, self._security = url, security
        cluster = os.environ.get("MC_METADATA_CLUSTER_ID", "")
        self._prefix = f"mooncake/{cluster}/" if cluster else "mooncake/"

    def publish(self, name: str, address: TcpAddress) -> None:
        body = json.dumps({"ip_or_host_name": address.host, "rpc_port": address.port}).encode()
        if self._ask("PUT", name, body).status_code == 200:
            return
        self._refuse_if_alive(name)  # else its owner was killed and this is its successor
        self._ask("DELETE", name)
        answer = self._ask("PUT", name, body)
        if answer.status_code != 200:
            raise ConfigError("the metadata server refuses the name", key=name, have=answer.text[:200])

    def find(self, name: str) -> TcpAddress:
        answer = self._ask("GET", name)
        if answer.status_code != 200:
            raise NotFound("no such engine at the metadata server", key=name)
        try:
            found = json.loads(answer.content)
            return TcpAddress(str(found["ip_or_host_name"]), int(found["rpc_port"]))
        except (ValueError, KeyError, TypeError) as e:
            raise NotFound(f"unreadable descriptor: {e}", key=name) from e

    def withdraw(self, name: str) -> None:
        with contextlib.suppress(ConnectionLost):
            self._ask("DELETE", name)

    def _refuse_if_alive(self, name: str) -> None:
        try:
            address = self.find(name)
            connect(address, self._security, _PROBE_S).close()
        except (WireError, NotFound):
            return
        raise ConfigError("another engine has this name", key=name, have=str(address), fix="Choose another name.")

    def _ask(self, method: str, name: str, body: bytes | None = None) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment is not for machines of the cluster
            try:
                key = f"{self._prefix}rpc_meta/{name}"
                return session.request(method, self._url, params={"key": key}, data=body, timeout=_HTTP_S)
            except requests.RequestException as e:
                raise ConnectionLost(f"no answer from the metadata server: {e}", key=self._url) from e
