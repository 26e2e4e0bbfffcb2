"""What `moonpool master` and `moonpool messenger` are told, by file, environment (`MOONPOOL_…`) and flags, the last one first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from moonpool import config
from moonpool.config import Said
from moonpool.errors import ConfigError
from moonpool.store.processes import MasterConfig, MessengerConfig
from moonpool.telemetry import Format, Level

PREFIX = "MOONPOOL_"
_OTHERS = (
    "MOONPOOL_MODELS",
    "MOONPOOL_CACHE",
    "MOONPOOL_API_KEY",
    "MOONPOOL_TENANT",
    # of the benchmarks and their launchers
    "MOONPOOL_BENCH_INSIDE",
    "MOONPOOL_PEER_PYTHON",
    "MOONPOOL_PEER_VENV",
    "MOONPOOL_PYTHON",
)
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
"""What Kubernetes puts into the environment of every pod for a Service whose name begins with `moonpool`."""


class MasterSettings(MasterConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    c2c: str = ""
    http: str = ""
    log_format: Format = "text"
    log_level: Level = "info"


class MessengerSettings(MessengerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    """Empty: the host's name."""
    http: str = ""
    log_format: Format = "text"
    log_level: Level = "info"


S = TypeVar("S", MasterSettings, MessengerSettings)


class Option(NamedTuple):
    """One setting. The flag gives the variable's name: `--disk-capacity`, MOONPOOL_DISK_CAPACITY."""

    path: str
    """In the file: `disk.capacity`."""
    flag: str
    help: str
    size: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.flag.removeprefix("--").upper().replace("-", "_")

    @property
    def parameter(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_SERVING = (
    Option("security.secret_file", "--secret-file", "File with the secret that every process of the pool must know."),
    Option("security.admin_secret_file", "--admin-secret-file", "File with the secret for admin verbs."),
    Option("security.tls_cert", "--tls-cert", "PEM certificate: TLS over TCP."),
    Option("security.tls_key", "--tls-key", "Its key."),
    Option("security.tls_ca", "--tls-ca", "PEM file of who signs the other sides' certificates."),
    Option("security.tls_name", "--tls-name", "Name in the certificates, where it is not the host."),
    Option("security.tls_mutual", "--tls-mutual", "Ask clients for certificates too."),
    Option("http", "--http", "HOST:PORT for /healthz, /readyz and /metrics; none if empty."),
    Option("log_format", "--log-format", "text, or json: one object a line."),
    Option("log_level", "--log-level", "debug, info, warning or error."),
)
MASTER = (
    Option("socket", "--socket", "Unix socket of this process."),
    Option("listen", "--listen", "HOST:PORT for other machines."),
    Option("expiry_s", "--expiry-s", "Silence after which a messenger is taken for dead, in seconds."),
    Option(
        "quotas", "--quota", "TENANT=SIZE, several with commas: most that a tenant may hold in the whole pool.", True
    ),
    Option("c2c", "--c2c", "C2C file to hold and to serve."),
    *_SERVING,
)
MESSENGER = (
    Option("name", "--name", "Unique in the pool; the host's name if not given."),
    Option("socket", "--socket", "Unix socket of this process."),
    Option("master", "--master", "Address of the master; alone if empty."),
    Option("listen", "--listen", "HOST:PORT for other machines; port 0 for any free one."),
    Option("advertise", "--advertise", "Host that others are told, where it is not the one in --listen."),
    Option("capacity", "--capacity", "Size of the segment: bytes, or such as 4GiB.", True),
    Option("prefault", "--prefault", "Take all of the segment's memory at the start."),
    Option("disk.folder", "--disk", "Folder of the disk tier; none if not given."),
    Option("disk.capacity", "--disk-capacity", "Most that the folder may take.", True),
    Option("disk.fsync", "--disk-fsync", "Survive a power cut, not only the end of the process."),
    Option("disk.layout", "--disk-layout", "Name of how callers lay bytes out; records of another one miss."),
    Option("high_watermark", "--high-watermark", "Share of the segment above which a put evicts."),
    Option("eviction_ratio", "--eviction-ratio", "Share of the segment that such an eviction frees beyond that."),
    Option("reservation_ttl_s", "--reservation-ttl-s", "Seconds after which a writer loses its key to the next one."),
    Option("max_objects", "--max-objects", "Most objects in memory."),
    Option(
        "grace_s", "--grace", "Seconds after SIGTERM for open reads and writes, and for the disk tier to take the rest."
    ),
    *_SERVING,
)


def resolve(
    kind: type[S],
    options: Sequence[Option],
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
) -> S:
    """The settings; `flags` by parameter name, None for those not given. Raises ConfigError."""
    said = [
        Said(o.path, _value(o, environment[o.variable], o.variable), o.variable)
        for o in options
        if o.variable in environment
    ]
    said += [Said(o.path, _value(o, v, o.flag), o.flag) for o in options if (v := flags.get(o.parameter)) is not None]
    try:
        return config.layered(kind, file, said, sizes=[o.path for o in options if o.size])
    except ConfigError as e:
        missing = re.search(r"missing required field `(\w+)`", e.what)
        path = (
            f"{e.what.partition(':')[0]}.{missing[1]}" if missing and ":" in e.what else missing[1] if missing else ""
        )
        option = next((o for o in options if o.path == path), None)
        if option is None:
            raise
        fix = f"Give {option.flag}, {option.variable}, or `{option.path}` in the file."
        raise ConfigError(e.what, key=e.key, fix=fix) from e


def _value(option: Option, text: object, origin: str) -> object:
    """`a=1GiB,b=2GiB` as a mapping where the field is one; all else as it is."""
    if option.path != "quotas" or not isinstance(text, str):
        return text
    pairs = [p.partition("=") for p in text.split(",") if p.strip()]
    bad = next((p for p in pairs if not p[1]), None)
    if bad:
        raise ConfigError("not a quota", key=origin, need="TENANT=SIZE", have=repr(bad[0]))
    return {tenant.strip(): size for tenant, _, size in pairs}


def variables() -> list[str]:
    """All that Moonpool reads from the environment under its prefix."""
    return sorted({*_OTHERS, *(o.variable for o in (*MASTER, *MESSENGER))})


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse variables with our prefix that nothing reads: a misspelt one would silently be a default. Raises ConfigError."""
    known = variables()
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.search(name):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError("no such variable", key=name, fix=f"Did you mean {close[0]}? If not, unset it.")


def shown(settings: MasterSettings | MessengerSettings) -> str:
    """The effective settings as one line. Secrets are not among them, only the names of their files."""
    return msgspec.json.encode(settings).decode()
