"""`moonpool master` and `moonpool messenger`: the processes of `store.processes` with health and metrics beside them."""

from __future__ import annotations

import logging
import socket
from contextlib import AbstractContextManager

import msgspec

from moonpool.metrics import MasterMetrics, MessengerMetrics
from moonpool.ops import ports
from moonpool.ops.http import HealthServer, health_app
from moonpool.ops.metered import Metered
from moonpool.ops.settings import MasterSettings, MessengerSettings, S, shown
from moonpool.store.host import MessengerHost
from moonpool.store.master.service import MasterService
from moonpool.store.processes import run_master, run_messenger
from moonpool.wire.rpc import Service

log = logging.getLogger(__name__)


def serve_master(settings: MasterSettings) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError."""
    settings = _with_ports(settings, ports.MASTER, ports.MASTER_HTTP)
    log.info("settings %s", shown(settings))
    c2c = _c2c(settings.c2c) if settings.c2c else b""
    if not settings.http:
        return run_master(settings, c2c)
    meter = _Meter()

    def beside(service: MasterService) -> AbstractContextManager[object]:
        app = health_app(lambda: "", [MasterMetrics(service), *meter.made])
        return HealthServer(app, settings.http, settings.security.load(), "master")

    return run_master(settings, c2c, beside=beside, meter=meter)


def _c2c(file: str) -> bytes:
    from moonpool import paths
    from moonpool.c2c.config import load_c2c  # needs torch, which a master without rules does not

    return load_c2c(file, paths.models_dir() or paths.repo_dir("models")).encode()


def serve_messenger(settings: MessengerSettings) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError, DiskError."""
    settings = _with_ports(settings, ports.MESSENGER, ports.MESSENGER_HTTP)
    settings = msgspec.structs.replace(settings, name=settings.name or socket.gethostname())
    log.info("settings %s", shown(settings))
    if not settings.http:
        return run_messenger(settings)
    meter = _Meter()

    def beside(host: MessengerHost) -> AbstractContextManager[object]:
        app = health_app(lambda: why_not_ready(host), [MessengerMetrics(host), *meter.made])
        return HealthServer(app, settings.http, settings.security.load(), "messenger")

    return run_messenger(settings, beside=beside, meter=meter)


def why_not_ready(host: MessengerHost) -> str:
    """Empty if work may be sent there."""
    if host.service.draining:
        return "draining"
    return "" if host.joined else "the master does not know this messenger (yet)"


class _Meter:
    """Makes the meter, and remembers it for the metrics."""

    def __init__(self) -> None:
        self.made: list[Metered] = []

    def __call__(self, service: Service) -> Metered:
        self.made.append(Metered(service))
        return self.made[-1]


def _with_ports(settings: S, listen: int, http: int) -> S:
    return msgspec.structs.replace(
        settings,
        listen=ports.tcp(settings.listen, listen) if settings.listen else "",
        http=ports.tcp(settings.http, http) if settings.http else "",
    )
