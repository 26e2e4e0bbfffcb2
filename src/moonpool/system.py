"""One machine's whole picture from one config file: pool, converter, instances, HTTP server, in one process.

    System ──► Pool (master, messenger, converter)
       └─────► Instance … ◄── server (OpenAI API)

`moonpool up` and the demo are this object. In multi-process mode the same parts are started one by one by
`moonpool master | messenger | converter | serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from moonpool import paths
from moonpool.c2c.config import C2CConfig, C2CFile, ModelEntry, RuleEntry, check, resolve
from moonpool.c2c.signature import load_spec
from moonpool.config import load
from moonpool.engine.draft import DraftKV, DraftModel
from moonpool.engine.instance import Instance
from moonpool.engine.model import Compute
from moonpool.engine.scheduler import Limits
from moonpool.engine.server import serve
from moonpool.errors import ConfigError
from moonpool.metrics import ConverterMetrics, PoolMetrics
from moonpool.pool import Pool
from moonpool.store.client import PoolClient
from moonpool.types import RuleStatus
from moonpool.wire.auth import security_from_environment


class PoolSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    capacity_mib: int = 512


class EngineSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compute: Compute = "float32"
    """fp32 keeps answers equal, token for token, whatever came from the pool. `auto` takes bf16 where the CPU has units for it:
    faster, and equal up to bf16's rounding of intermediate results."""
    prefill_chunk: int = 256
    max_batch: int = 8
    max_queue: int = 64

    def limits(self) -> Limits:
        return Limits(prefill_chunk=self.prefill_chunk, max_batch=self.max_batch, max_queue=self.max_queue)


class DraftEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """A name from `c2c.models`: a small model with the same tokenizer."""
    tokens: int = 4
    """Guessed at a time, at most."""
    kv: DraftKV = "converted"
    """`native`: the draft computes its prompts itself (or finds its own pages in the pool)."""


class InstanceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    draft: DraftEntry | None = None
    """Guesses tokens ahead; the answers stay the same (`engine.speculative`)."""


class ServerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""


class SystemConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one config file."""

    pool: PoolSection = PoolSection()
    engine: EngineSection = EngineSection()
    server: ServerSection = ServerSection()
    instances: list[str | InstanceEntry] = []
    """Models to serve, each a name from `c2c.models` or an entry with options; all of them if empty."""
    c2c: C2CFile


def load_system(path: str | Path) -> tuple[SystemConfig, C2CConfig]:
    """Read and check the file; model and bundle folders are relative to it, or under the known model folders."""
    config = load(path, SystemConfig)
    check(config.c2c, name=f"{path}: c2c")
    roots = [Path(path).resolve().parent, paths.models_dir(), paths.repo_dir("models"), paths.repo_dir("bundles")]
    return config, resolve(config.c2c, [r for r in roots if r is not None])


class System:
    """Pool and instances, started in that order and closed in the other one. Closing twice is safe."""

    def __init__(
        self,
        c2c: C2CConfig,
        *,
        capacity: int,
        serve: Sequence[str | InstanceEntry] | None = None,
        engine: EngineSection | None = None,
    ) -> None:
        entries = [InstanceEntry(model=e) if isinstance(e, str) else e for e in serve or list(c2c.models)]
        named = [n for e in entries for n in (e.model, *([e.draft.model] if e.draft else []))]
        unknown = [n for n in named if n not in c2c.models]
        if unknown:
            raise ConfigError(f"unknown model `{unknown[0]}` under instances", have=", ".join(sorted(c2c.models)))
        self.c2c, self._engine = c2c, engine or EngineSection()
        self.pool = Pool.open(capacity, c2c=c2c)
        self.instances: dict[str, Instance] = {}
        try:
            for entry in entries:
                self.instances[entry.model] = self._instance(entry)
        except BaseException:
            self.close()
            raise

    def _instance(self, entry: InstanceEntry) -> Instance:
        model, draft = self.c2c.models[entry.model], None
        if entry.draft:
            small = self.c2c.models[entry.draft.model]
            draft = DraftModel(ref=small.ref, spec=small.spec, tokens=entry.draft.tokens, kv=entry.draft.kv)
        return Instance(
            model.ref,
            model.spec,
            self.pool,
            page_size=self.c2c.page_size,
            origins=lambda requested: self.c2c.origins(model.owner, requested),
            c2c=self.c2c,
            draft=draft,
            limits=self._engine.limits(),
            compute=self._engine.compute,
        )

    def close(self) -> None:
        for instance in self.instances.values():
            instance.close()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def bundled_system() -> tuple[SystemConfig, C2CConfig]:
    """The pair and the bundle that come with the checkout. Raises ConfigError outside of one."""
    names = ("moon-large", "moon-small")
    models, bundles = paths.repo_dir("models"), paths.repo_dir("bundles")
    if models is None or bundles is None:
        raise ConfigError(
            "the bundled pair comes with the checkout only", fix="Give a system file: `moonpool up FILE`."
        )
    rule = RuleEntry(source=names[0], target=names[1], bundle=str(bundles / "-to-".join(names)))
    file = C2CFile(models={n: ModelEntry(str(models / n)) for n in names}, rules=[rule])
    return SystemConfig(c2c=file), resolve(file, [])


def described(status: RuleStatus) -> str:
    """One line about a rule: whether it is served, and what the gate made of it."""
    gate = f" ({status.gate})" if status.gate and status.gate != status.state else ""
    return f"rule {status.name}: {status.state}{gate} {status.reason}".rstrip()


def run_system(path: Path | None, host: str | None, port: int | None) -> None:
    """`moonpool up`: start everything and serve until Ctrl-C."""
    config, c2c = load_system(path) if path else bundled_system()
    capacity = config.pool.capacity_mib << 20
    with System(c2c, capacity=capacity, serve=config.instances or None, engine=config.engine) as system:
        for status in system.pool.converter.wait_ready(60):
            print(described(status))
        for instance in system.instances.values():
            instance.wait_ready(60)
            for rule, why in instance.refusals().items():
                print(f"rule {rule}: refused {why}")
        host, port = host or config.server.host, config.server.port if port is None else port
        print(f"serving {', '.join(system.instances)} at http://{host}:{port}/v1 (Ctrl-C ends)", flush=True)
        serve(
            system.instances,
            host=host,
            port=port,
            api_key=config.server.api_key,
            collectors=(PoolMetrics(system.pool), ConverterMetrics(system.pool.converter)),
        )


def run_instance(model: str, master: str, host: str, port: int, api_key: str) -> None:
    """`moonpool serve`: one instance as a process of its own, on the pool behind `master`."""
    with PoolClient.connect(master, security=security_from_environment()) as pool:
        # Asked anew while it runs: what is disabled now may be enabled tomorrow.
        c2c = msgspec.structs.replace(C2CConfig.decode(pool.get_c2c_config()), disabled={})
        ref = paths.find_model(model)
        spec = load_spec(ref)
        owner = spec.identity(c2c.page_size).digest()
        instance = Instance(
            ref,
            spec,
            pool,
            page_size=c2c.page_size,
            origins=lambda asked: c2c.origins(owner, asked),
            c2c=c2c,
            compute=EngineSection().compute,
        )
        try:
            serve({spec.name: instance}, host=host, port=port, api_key=api_key, collectors=(PoolMetrics(pool),))
        finally:
            instance.close()
