"""Models whose KV is the same by construction: the same weights under two names, or one base with an adapter that acts only
from an invocation sequence on. Their pages need no conversion: the target reads the source's, in place.

Nobody's word is taken for it. A rule names a proof, which `moonpool c2c prove-alias` writes after it compared the two models
(`c2c.prove`), and the proof must be about the very weights and configs that the rule's models have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonpool.c2c.signature import Difference, ModelSpec, check_contract
from moonpool.errors import ConfigError
from moonpool.keys import digest

FORMAT = 1
_MAX_BYTES = 1 << 20


class Proven(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two models, as it was when they were compared."""

    revision: str
    """Digest of all its weight files."""
    config: str
    """sha256 of its `config.json`."""
    adapter_config: str = ""
    """sha256 of its `adapter_config.json`, if it has one."""

    @staticmethod
    def of(folder: Path, spec: ModelSpec) -> Proven:
        """Raises ConfigError where the folder has no readable config."""
        adapter = folder / ADAPTER_CONFIG
        return Proven(spec.revision, _sha256(folder / "config.json"), _sha256(adapter) if adapter.exists() else "")


ADAPTER_CONFIG = "adapter_config.json"


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found equal, of which two models."""

    format: int = FORMAT
    source: Proven
    target: Proven
    tokenizer: str
    until: list[list[int]] = []
    """Invocation sequences: from the first of them on, the two models' KV differ."""
    tensors: int
    """Weights that were compared, by sha256."""
    weights: str
    """Digest over their names and sums."""
    tokens: int
    """Sample tokens over which both models' KV was equal, bit for bit."""
    kv: str
    """Digest of that KV."""
    digest: str = ""
    """Over all of the above, so that a proof that was edited is none."""

    def sealed(self) -> Proof:
        """The proof with its digest."""
        raw = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=digest("moonpool.proof", [("proof", raw)]))

    def check(self, source: Proven, target: Proven, tokenizers: tuple[str, str], key: str) -> None:
        """Raises ConversionRefused unless the proof is about these two models."""
        found = [
            Difference(f"{role}.{field}", getattr(need, field), getattr(have, field))
            for role, need, have in (("source", self.source, source), ("target", self.target, target))
            for field in Proven.__struct_fields__
            if getattr(need, field) != getattr(have, field)
        ]
        for role, have in zip(("source", "target"), tokenizers, strict=True):
            if have != self.tokenizer:
                found.append(Difference(f"{role}.tokenizer", self.tokenizer, have))
        check_contract(f"{key} proves it of other models", found, fix="Prove it again with `moonpool c2c prove-alias`.")


def read_proof(path: Path) -> Proof:
    """Raises ConfigError: no file, no proof, or one that was changed."""
    key, fix = str(path), "Make it with `moonpool c2c prove-alias`."
    try:
        with path.open("rb") as f:
            found = msgspec.json.decode(f.read(_MAX_BYTES), type=Proof)
    except OSError as e:
        raise ConfigError("no proof here", key=key, have=e.strerror or str(e), fix=fix) from e
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"not a proof: {e}", key=key, fix=fix) from e
    if found.format != FORMAT:
        raise ConfigError("proof of another format", key=key, need=str(FORMAT), have=str(found.format), fix=fix)
    if found.sealed().digest != found.digest:
        raise ConfigError("the proof was changed", key=key, need=found.sealed().digest, have=found.digest, fix=fix)
    return found


def equal_tokens(tokens: Sequence[int], until: Sequence[Sequence[int]]) -> int:
    """How many leading tokens the alias covers: up to the first invocation sequence, all of them if there is none."""
    whole = list(tokens)
    ends = [len(whole)]
    for sequence in map(list, until):
        starts = (i for i, t in enumerate(whole) if t == sequence[0])
        ends += [next((i for i in starts if whole[i : i + len(sequence)] == sequence), len(whole))]
    return min(ends)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        fix = "An alias needs the model's folder, not a hub name."
        raise ConfigError("cannot read the model's file", key=str(path), have=e.strerror or str(e), fix=fix) from e
