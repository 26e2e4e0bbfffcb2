"""Projector bundles: a folder that says what it is, proves that it is whole, and holds no code.

    weights.safetensors    the projector's tensors
    manifest.json          whose pages become whose, and how to build the projector
    report.json            the evaluator's findings (optional)
    report.md              the same, to read (optional)
    SHA256SUMS             sha256 of each file above; the bundle's digest is the sha256 of this file, cut to 32 hex digits

Adding a report therefore gives a new digest: a report is bound to the weights that it speaks of.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.c2c.projectors import build_projector
from moonpool.c2c.projectors.base import Projector
from moonpool.c2c.signature import ModelSpec, RopeSpec, check_pair
from moonpool.errors import BundleCorrupt, BundleError, ConversionRefused, DigestMismatch
from moonpool.keys import LAYOUT

FORMAT = 1
MANIFEST, WEIGHTS, SUMS = "manifest.json", "weights.safetensors", "SHA256SUMS"
FILES = frozenset({MANIFEST, WEIGHTS, "report.json", "report.md"})
"""All that a bundle may contain; any other name is refused."""
MAX_FILE_BYTES = 8 << 30
_MAX_TEXT_BYTES = 16 << 20
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9._-]+)")


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model must be for the bundle to serve it. The fields are `ModelSpec`'s."""

    name: str
    revision: str
    tokenizer: str
    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: bool

    @staticmethod
    def of(spec: ModelSpec) -> Side:
        return Side(**{f: getattr(spec, f) for f in Side.__struct_fields__})


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    source: Side
    target: Side
    kind: str
    parameters: dict[str, Any]
    kv_dtype: str = "bfloat16"
    layout: str = LAYOUT
    page_sizes: list[int] = []
    """Page sizes that the bundle serves; empty = any (projectors work token by token)."""
    training_data: list[str] = []
    created_by: str = ""


class Bundle(msgspec.Struct, frozen=True):
    """A verified bundle folder."""

    folder: Path
    digest: str
    manifest: Manifest

    def projector(self) -> Projector:
        """Read the weights and build. Raises BundleCorrupt (missing, misshapen or non-finite weights)."""
        try:
            tensors = load_file(self.folder / WEIGHTS)
        except (SafetensorError, OSError) as e:
            raise BundleCorrupt(f"unreadable weights: {e}", key=str(self.folder / WEIGHTS)) from e
        return build_projector(self.manifest.kind, self.manifest.parameters, tensors)

    def check(self, source: ModelSpec, target: ModelSpec, page_size: int, kv_dtype: str = "bfloat16") -> None:
        """Raises ConversionRefused that names the first field in which the bundle and the models differ."""
        check_pair(source, target)
        for role, need, spec in (("source", self.manifest.source, source), ("target", self.manifest.target, target)):
            for field in Side.__struct_fields__:
                if field != "name" and getattr(need, field) != getattr(spec, field):
                    raise _refused(self, f"the {role} differs in {field}", getattr(need, field), getattr(spec, field))
        if self.manifest.kv_dtype != kv_dtype:
            raise _refused(self, "kv_dtype differs", self.manifest.kv_dtype, kv_dtype)
        if self.manifest.layout != LAYOUT:
            raise _refused(self, "layout differs", self.manifest.layout, LAYOUT)
        if self.manifest.page_sizes and page_size not in self.manifest.page_sizes:
            raise _refused(self, "page_size differs", self.manifest.page_sizes, page_size)


def _refused(bundle: Bundle, what: str, need: object, have: object) -> ConversionRefused:
    m = bundle.manifest
    return ConversionRefused(
        what,
        key=f"bundle {m.source.name} → {m.target.name} ({bundle.digest[:12]})",
        need=str(need),
        have=str(have),
        fix="Use the bundle's own models, or fit one for these with `moonpool c2c fit`.",
    )


def write_bundle(
    folder: Path,
    projector: Projector,
    source: ModelSpec,
    target: ModelSpec,
    *,
    dtype: torch.dtype = torch.bfloat16,
    training_data: list[str] | None = None,
    created_by: str = "",
    page_sizes: list[int] | None = None,
) -> Bundle:
    """Write a bundle, all or nothing: a folder that is there before is replaced only by a whole one."""
    manifest = Manifest(
        source=Side.of(source),
        target=Side.of(target),
        kind=projector.kind,
        parameters=projector.parameters(),
        page_sizes=page_sizes or [],
        training_data=training_data or [],
        created_by=created_by,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _save(temporary / WEIGHTS, projector.tensors(), dtype)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _write_sums(temporary)
        _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_bundle(folder)


def _save(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Matrices in `dtype`; vectors (biases, gains, gates) stay fp32, they cost nothing."""
    kept = {n: t.to(dtype) if t.ndim >= 2 and "bias" not in n else t for n, t in tensors.items()}
    save_file({n: t.detach().cpu().contiguous() for n, t in kept.items()}, path)


def _swap(new: Path, folder: Path) -> None:
    old = new.with_name(new.name + ".old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    folder.chmod(0o755)


def add_files(bundle: Bundle, files: dict[str, bytes]) -> Bundle:
    """The bundle with these files added or replaced (a report); its digest changes."""
    for name, content in files.items():
        if name not in FILES - {MANIFEST, WEIGHTS}:
            raise BundleError("not a file that a bundle may hold", key=name, need=", ".join(sorted(FILES)))
        temporary = bundle.folder / f".{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(bundle.folder / name)
    _write_sums(bundle.folder)
    return open_bundle(bundle.folder)


def _write_sums(folder: Path) -> None:
    lines = [f"{_sha256(folder / n)}  {n}\n" for n in sorted(FILES) if (folder / n).is_file()]
    temporary = folder / f".{SUMS}.{os.getpid()}"
    temporary.write_text("".join(lines))
    temporary.replace(folder / SUMS)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_sums(raw: bytes, key: str) -> dict[str, str]:
    """File name → sha256 from SHA256SUMS. Raises BundleCorrupt for anything that is not exactly that, or a foreign name."""
    found: dict[str, str] = {}
    for line in raw.decode("ascii", errors="replace").splitlines():
        m = _SUM_LINE.fullmatch(line)
        if not m or m[2] not in FILES:
            raise BundleCorrupt(
                "bad line in SHA256SUMS", key=key, need="sha256 and a bundle's file name", have=line[:100]
            )
        found[m[2]] = m[1]
    if not {MANIFEST, WEIGHTS} <= found.keys():
        raise BundleCorrupt("SHA256SUMS is incomplete", key=key, need=f"{MANIFEST}, {WEIGHTS}", have=", ".join(found))
    return found


def sums_digest(raw: bytes) -> str:
    """A bundle's digest from its SHA256SUMS."""
    return hashlib.sha256(raw).hexdigest()[:32]


def folder_digest(folder: Path) -> str:
    """The digest of a bundle folder, without verifying its files. Raises BundleCorrupt where there is no bundle."""
    return sums_digest(_bounded(folder / SUMS))


def _bounded(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise BundleCorrupt("too large", key=str(path), need=f"<= {_MAX_TEXT_BYTES} B")
        return path.read_bytes()
    except OSError as e:
        raise BundleCorrupt(
            "no bundle here",
            key=str(path),
            need="a readable file",
            have=e.strerror or str(e),
            fix="See `moonpool c2c fit`.",
        ) from e


def open_bundle(folder: Path, *, expect_digest: str = "") -> Bundle:
    """Verify every file against SHA256SUMS and read the manifest; weights are read by `Bundle.projector`.

    Raises DigestMismatch (not the bundle that was asked for, or a file was changed), BundleCorrupt (not a bundle).
    """
    raw = _bounded(folder / SUMS)
    digest = sums_digest(raw)
    if expect_digest and digest != expect_digest:
        raise DigestMismatch(
            "another bundle than the rule names",
            key=str(folder),
            need=expect_digest,
            have=digest,
            fix="Mend `digest:`.",
        )
    for name, need in read_sums(raw, str(folder)).items():
        path = folder / name
        if not path.is_file():
            raise BundleCorrupt("file is missing", key=str(path), fix="Fetch the bundle again.")
        have = _sha256(path)
        if have != need:
            raise DigestMismatch(
                "file was changed or cut off", key=str(path), need=need, have=have, fix="Fetch it again."
            )
    return Bundle(folder, digest, _manifest(folder / MANIFEST))


def _manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(_bounded(path), type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise BundleCorrupt(f"manifest: {e}", key=str(path)) from e
    if manifest.format != FORMAT:
        raise BundleCorrupt("bundle of another format", key=str(path), need=str(FORMAT), have=str(manifest.format))
    return manifest
