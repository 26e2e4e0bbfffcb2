"""The cluster's C2C config: which models there are, and which projector turns whose pages into whose.

The operator writes YAML (`C2CFile`). `resolve` checks it as a whole, reads every model's parameters and every bundle's digest,
and gives the form that the master holds and serves (`C2CConfig`, JSON): there rules name identities and digests only, so
that a put is recognised by a dictionary lookup of its key's owner, never by a piece of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from moonpool.c2c.alias import Proven, read_proof
from moonpool.c2c.bundle import folder_digest
from moonpool.c2c.gate import Thresholds
from moonpool.c2c.signature import ModelSpec, load_spec
from moonpool.config import load
from moonpool.errors import ConfigError, ProtocolError

Mode = Literal["on_put", "on_miss", "hint", "on_load", "fuse"]
"""When a rule converts. Each of the first three includes the weaker ones: `on_put` ⊃ `on_miss` ⊃ `hint`. `on_load` stands apart:
the converter makes nothing, and the target's engine reads source pages and converts them itself when a request needs them. `fuse`
converts nothing: the target's engine prefills, and then improves its own cache with the source's pages."""

Pays = Literal["auto", "always"]
"""Whether the cost model has a say. `auto`: converted pages are made and taken only where that is faster than computing, which
this machine's calibration of the pair decides (`moonpool c2c calibrate`); without one, as `always`: whenever they can be."""

Serve = Literal["always", "on_request"]
"""Whether a lookup of the target may take converted pages by default, or only when the request asks for it."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ref: str
    """Local folder or hub name."""


class RuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    bundle: str
    """Folder, http(s) URL or `hf://org/repo[@revision][/folder]`."""
    digest: str = ""
    """The bundle's digest (32 hex digits). Required unless the bundle is a local folder."""
    mode: Mode = "on_put"
    serve: Serve = "always"
    deadline_s: float = 30.0
    """A conversion that did not begin within this time of being asked for is dropped: a miss, not a wait."""
    pays: Pays = "auto"
    store_loaded: bool = False
    """Mode `on_load` only: put what the engine converted into the pool, for the target's other engines."""
    gate: Thresholds = Thresholds()
    """What the bundle's report must show, or the rule is refused."""
    force: bool = False
    """Serve the bundle whatever its report shows, marked as forced wherever the rule is shown."""
    shadow: float = 0.0
    """Share of the requests answered over its pages that are computed natively afterwards and compared; 0.01 is plenty."""


class AliasEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two models with the same KV: the target reads the source's pages as its own, where it has none."""

    source: str
    target: str
    proof: str
    """File that `moonpool c2c prove-alias` wrote for these two."""
    until: list[int] = []
    """Token ids: the alias ends where they first stand in a prompt, besides where the proof says."""


class C2CFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The YAML file as written."""

    models: dict[str, ModelEntry]
    rules: list[RuleEntry] = []
    aliases: list[AliasEntry] = []
    page_size: int = 16
    workers: int = 1
    queue_pages: int = 8192
    batch_pages: int = 64
    allowed_hosts: list[str] = []
    """Hosts that bundles may be downloaded from, besides the hub's."""
    allow_cycles: bool = False


class Model(msgspec.Struct, frozen=True):
    name: str
    ref: str
    spec: ModelSpec
    owner: str
    """Digest of the model's `KVIdentity` at the cluster's page size."""


class Rule(msgspec.Struct, frozen=True):
    source: Model
    target: Model
    bundle: str
    digest: str
    mode: Mode
    serve: Serve
    deadline_s: float
    pays: Pays = "auto"
    store_loaded: bool = False
    gate: Thresholds = Thresholds()
    force: bool = False
    shadow: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.source.name}→{self.target.name}"


class Alias(msgspec.Struct, frozen=True):
    source: Model
    target: Model
    until: list[list[int]] = []
    """Sequences of tokens; pages at and behind the first of them are not the same."""


class C2CConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved config, as the master serves it by `get_c2c_config`."""

    models: dict[str, Model] = {}
    rules: list[Rule] = []
    """Those that convert, in the file's order."""
    fusions: list[Rule] = []
    """Those of mode `fuse`, which are the target's engine's alone; at most one for each target."""
    aliases: list[Alias] = []
    page_size: int = 16
    workers: int = 1
    queue_pages: int = 8192
    batch_pages: int = 64
    allowed_hosts: list[str] = []
    disabled: dict[str, str] = {}
    """Bundle digest → why nobody may take its pages, as of when the master was asked."""

    def origins(self, owner: str, requested: bool | None = None) -> tuple[str, ...]:
        """Bundles whose pages a lookup of this owner may take; a request's own wish beats the rules' defaults. Whether a rule was
        refused or disabled since, the pool is asked (`engine.rules`)."""
        if requested is False:
            return ()
        rules = (r for r in self.rules if r.target.owner == owner and r.digest not in self.disabled)
        return tuple(r.digest for r in rules if requested or r.serve == "always")

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(raw: bytes) -> C2CConfig:
        """Inverse of `encode`; empty bytes are the config without rules."""
        if not raw:
            return C2CConfig()
        try:
            return msgspec.json.decode(raw, type=C2CConfig)
        except (msgspec.DecodeError, msgspec.ValidationError) as e:
            raise ProtocolError(f"the master's C2C config is unreadable: {e}") from e


def load_c2c(path: str | Path, models_dir: Path | None = None) -> C2CConfig:
    """Read, check and resolve a C2C file. Relative folders are taken from the file's folder, then from `models_dir`."""
    file = load(path, C2CFile)
    check(file, name=str(path))
    return resolve(file, [Path(path).resolve().parent, *([models_dir] if models_dir else [])])


def check(file: C2CFile, *, name: str = "c2c config") -> None:
    """Everything that can be wrong without opening a model. Raises ConfigError with the place in its key."""
    _check_bounds(file, name)
    seen: set[tuple[str, str]] = set()
    fused: set[str] = set()
    for i, rule in enumerate(file.rules):
        place = f"{name}: rules[{i}]"
        for role in (rule.source, rule.target):
            if role not in file.models:
                known = ", ".join(sorted(file.models)) or "none"
                raise ConfigError(f"unknown model `{role}`", key=place, have=known, fix="Add it under `models`.")
        if rule.digest and not _DIGEST.fullmatch(rule.digest):
            raise ConfigError("bad digest", key=place, need="32 hex digits", have=rule.digest)
        if rule.deadline_s <= 0:
            raise ConfigError("deadline_s must be positive", key=place, have=str(rule.deadline_s))
        _check_gate(rule, place)
        if (rule.source, rule.target) in seen:
            raise ConfigError(f"second rule for {rule.source} → {rule.target}", key=place, fix="Keep one of them.")
        seen.add((rule.source, rule.target))
        if rule.mode == "fuse" and rule.target in fused:
            raise ConfigError(f"second source fused into {rule.target}", key=place, fix="Keep one of them.")
        fused |= {rule.target} if rule.mode == "fuse" else set()
    _check_aliases(file, seen, name)
    cycle = _cycle(sorted(seen))
    if cycle and not (file.allow_cycles and len(set(cycle)) > 1):
        raise ConfigError(
            f"cyclic rules: {' → '.join(cycle)}",
            key=name,
            fix="Drop one of them, or set `allow_cycles: true`: converted pages are never converted again, so a cycle ends, "
            "but every put is then converted each way.",
        )


def _check_gate(rule: RuleEntry, place: str) -> None:
    rule.gate.check(place)
    if not 0 <= rule.shadow <= 1:
        raise ConfigError("shadow out of range", key=place, need="0..1", have=str(rule.shadow))
    if rule.mode == "fuse" and (rule.shadow or rule.force or rule.gate != Thresholds()):
        fix = "Leave out `gate`, `force` and `shadow`."
        raise ConfigError("nothing is converted in mode fuse, so there is no gate", key=place, fix=fix)


def _check_aliases(file: C2CFile, rules: set[tuple[str, str]], name: str) -> None:
    """Aliases may go both ways between two models: nothing is made, and a lookup follows one alias only."""
    seen: set[tuple[str, str]] = set()
    for i, alias in enumerate(file.aliases):
        place, pair = f"{name}: aliases[{i}]", (alias.source, alias.target)
        for role in pair:
            if role not in file.models:
                known = ", ".join(sorted(file.models)) or "none"
                raise ConfigError(f"unknown model `{role}`", key=place, have=known, fix="Add it under `models`.")
        if alias.source == alias.target:
            raise ConfigError("a model is no alias of itself", key=place)
        if pair in seen:
            raise ConfigError(f"second alias for {alias.source} → {alias.target}", key=place, fix="Keep one of them.")
        if pair in rules:
            what = f"a rule and an alias for {alias.source} → {alias.target}"
            raise ConfigError(what, key=place, fix="Keep the alias: it is exact and costs nothing.")
        if any(t < 0 for t in alias.until):
            raise ConfigError("until holds no token ids", key=place, have=str(alias.until))
        seen.add(pair)


def _check_bounds(file: C2CFile, name: str) -> None:
    bounds = {
        "page_size": (file.page_size, 1, 4096),
        "workers": (file.workers, 1, 64),
        "queue_pages": (file.queue_pages, 1, 1 << 20),
        "batch_pages": (file.batch_pages, 1, 4096),
    }
    for field, (value, low, high) in bounds.items():
        if not low <= value <= high:
            raise ConfigError(f"{field} out of range", key=name, need=f"{low}..{high}", have=str(value))


def _cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """One cycle of the graph as a path that ends where it began; empty if there is none."""
    following: dict[str, list[str]] = {}
    for source, target in edges:
        following.setdefault(source, []).append(target)
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for after in following.get(node, []):
            if found := walk(after, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for start in following if (found := walk(start, []))), [])


def resolve(file: C2CFile, roots: list[Path]) -> C2CConfig:
    """Read the models' parameters and the local bundles' digests. Raises ModelError, ConfigError, BundleError."""
    models = {}
    for name, entry in file.models.items():
        ref = _locate(entry.ref, roots)
        spec = load_spec(ref)
        models[name] = Model(name, ref, spec, spec.identity(file.page_size).digest())
    return C2CConfig(
        models=models,
        rules=[_rule(rule, models, roots) for rule in file.rules if rule.mode != "fuse"],
        aliases=[_alias(entry, models, roots) for entry in file.aliases],
        fusions=[_rule(rule, models, roots) for rule in file.rules if rule.mode == "fuse"],
        page_size=file.page_size,
        workers=file.workers,
        queue_pages=file.queue_pages,
        batch_pages=file.batch_pages,
        allowed_hosts=file.allowed_hosts,
    )


def _rule(entry: RuleEntry, models: dict[str, Model], roots: list[Path]) -> Rule:
    remote = entry.bundle.startswith(("http://", "https://", "hf://"))
    if remote and not entry.digest:
        raise ConfigError("a remote bundle needs its digest", key=entry.bundle, fix="Add `digest:` to the rule.")
    bundle = entry.bundle if remote else _locate(entry.bundle, roots)
    if not remote and not Path(bundle).is_dir():
        raise ConfigError("no such bundle folder", key=entry.bundle, fix="Make it with `moonpool c2c fit`.")
    return Rule(
        source=models[entry.source],
        target=models[entry.target],
        bundle=bundle,
        digest=entry.digest or folder_digest(Path(bundle)),
        mode=entry.mode,
        serve=entry.serve,
        deadline_s=entry.deadline_s,
        pays=entry.pays,
        store_loaded=entry.store_loaded,
        gate=entry.gate,
        force=entry.force,
        shadow=entry.shadow,
    )


def _alias(entry: AliasEntry, models: dict[str, Model], roots: list[Path]) -> Alias:
    """Raises ConfigError (no proof), ConversionRefused (a proof about other weights or another config)."""
    path = Path(_locate(entry.proof, roots))
    proof, pair = read_proof(path), (models[entry.source], models[entry.target])
    proven = [Proven.of(Path(m.ref), m.spec) for m in pair]
    proof.check(proven[0], proven[1], (pair[0].spec.tokenizer, pair[1].spec.tokenizer), str(path))
    return Alias(*pair, until=[*proof.until, *([entry.until] if entry.until else [])])


def _locate(ref: str, roots: list[Path]) -> str:
    """The first root that has this folder; a reference found nowhere is left as it is (a hub name)."""
    return next((str(root / ref) for root in roots if (root / ref).exists()), ref)
