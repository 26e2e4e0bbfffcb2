"""Projector bundles: a folder that says what it is, proves that it is whole, and holds no code.

    weights.safetensors    the projector's tensors
    manifest.json          whose pages become whose, and how to build the projector
    report.json            the evaluator's findings (optional)
    report.md              the same, to read (optional)
    report-<kind>.json/md  further reports, on code, prose or chat (optional)
    report.png             the first report as a page of plots (optional)
    SHA256SUMS             sha256 of each file above; the bundle's digest is the sha256 of this file, cut to 32 hex digits

Adding a report therefore gives a new digest: a report is bound to the weights that it speaks of, and a rule that names the old
digest does not take the bundle with the new report.

Bytes are used only after they were verified: the manifest and the weights are parsed from the very bytes that were hashed, not
from a file that is opened a second time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from moonpool.c2c.projectors import S, build, fuser_kind, kind_of, projector_kind
from moonpool.c2c.projectors.base import Projector, Stored
from moonpool.c2c.projectors.fuse import Fuser
from moonpool.c2c.projectors.stored import as_stored
from moonpool.c2c.signature import Difference, ModelSpec, RopeSpec, check_contract, check_pair, differences
from moonpool.errors import BundleCorrupt, BundleError, DigestMismatch
from moonpool.keys import LAYOUT

FORMAT = 1
MANIFEST, WEIGHTS, SUMS = "manifest.json", "weights.safetensors", "SHA256SUMS"
KINDS = ("code", "prose", "chat")
"""Kinds of text that a bundle may carry further reports on."""
FILES = frozenset(
    {MANIFEST, WEIGHTS, "report.json", "report.md", "report.png"}
    | {f"report-{kind}.{ending}" for kind in KINDS for ending in ("json", "md")}
)
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
    sums: dict[str, str]
    """File name → sha256, as verified."""

    def read(self, name: str) -> bytes:
        """A file's bytes, verified once more as they are read: the folder may have changed since it was opened.

        Raises BundleCorrupt (the bundle has no such file), DigestMismatch.
        """
        if name not in self.sums:
            raise BundleCorrupt("the bundle has no such file", key=name, have=", ".join(sorted(self.sums)))
        return _verified(self.folder / name, self.sums[name])

    def projector(self) -> Projector:
        """Read the weights and build. Raises BundleCorrupt (missing, misshapen or non-finite weights), DigestMismatch,
        ConversionRefused (a fuser, which is no projector)."""
        return self._build(projector_kind(self.manifest.kind))

    def fuser(self) -> Fuser:
        """The same for a bundle of kind `fuse`. Raises what `projector` does; ConversionRefused for any other kind."""
        return self._build(fuser_kind(self.manifest.kind))

    def stored(self) -> Stored:
        """The same for whatever the bundle holds."""
        return self._build(kind_of(self.manifest.kind))

    def _build(self, kind: type[S]) -> S:
        try:
            tensors = load(self.read(WEIGHTS))
        except (SafetensorError, KeyError, ValueError) as e:  # KeyError: a type that torch does not have
            raise BundleCorrupt(f"unreadable weights: {e}", key=str(self.folder / WEIGHTS)) from e
        return build(kind, self.manifest.parameters, tensors)

    def check(self, source: ModelSpec, target: ModelSpec, page_size: int, kv_dtype: str = "bfloat16") -> None:
        """Raises ConversionRefused that names every field in which the bundle and the models differ."""
        check_pair(source, target)
        m = self.manifest
        found = [
            Difference(f"{role}.{d.field}", d.need, d.have)
            for role, need, spec in (("source", m.source, source), ("target", m.target, target))
            for d in differences(need, Side.of(spec))
        ]
        facts = (("kv_dtype", m.kv_dtype, kv_dtype), ("layout", m.layout, LAYOUT))
        found += [Difference(field, need, have) for field, need, have in facts if need != have]
        if m.page_sizes and page_size not in m.page_sizes:
            found.append(Difference("page_size", str(m.page_sizes), str(page_size)))
        check_contract(
            f"bundle {m.source.name} → {m.target.name} ({self.digest[:12]}) for {source.name} → {target.name}",
            found,
            fix="Use the bundle's own models, or fit one for these with `moonpool c2c fit`.",
        )


def write_bundle(
    folder: Path,
    projector: Stored,
    source: ModelSpec,
    target: ModelSpec,
    *,
    dtype: torch.dtype = torch.bfloat16,
    training_data: list[str] | None = None,
    created_by: str = "",
    page_sizes: list[int] | None = None,
) -> Bundle:
    """Write a bundle, all or nothing: a bundle that is there before is replaced only by a whole one that was read back.

    Weights are stored in `dtype`, a float type or int8 (`projectors.stored`); biases, gains and gates stay fp32. Raises
    BundleError (the folder holds something else), BundleCorrupt (weights with NaN or Inf, also after rounding).
    """
    manifest = Manifest(
        source=Side.of(source),
        target=Side.of(target),
        kind=projector.kind,
        parameters=projector.parameters(),
        page_sizes=page_sizes or ([projector.page_size] if projector.page_size else []),
        training_data=training_data or [],
        created_by=created_by,
    )

    def fill(temporary: Path) -> None:
        kept = as_stored(projector.tensors(), dtype)
        save_file({n: t.detach().cpu().contiguous() for n, t in kept.items()}, temporary / WEIGHTS)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))

    return _replace(folder, fill)


def _replace(folder: Path, fill: Callable[[Path], None]) -> Bundle:
    """Make a bundle next to `folder`, read it back and put it in its place."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - `resolve` would replace what a link points to
    if folder.exists() and not (folder / SUMS).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise BundleError(
            "something else is there", key=str(folder), need="a bundle, or nothing", fix="Choose another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(temporary)
        _write_sums(temporary)
        open_bundle(temporary).stored()
        temporary.chmod(0o755)
        _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_bundle(folder)


def _swap(new: Path, folder: Path) -> None:
    old = new.with_name(new.name + ".old")
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def add_files(bundle: Bundle, files: dict[str, bytes]) -> Bundle:
    """The bundle with these files added or replaced (a report), all or nothing; its digest changes."""
    foreign = files.keys() - (FILES - {MANIFEST, WEIGHTS})
    if foreign:
        raise BundleError("not a file that can be added", key=", ".join(sorted(foreign)), need="report.json, report.md")

    def fill(temporary: Path) -> None:
        for name in bundle.sums.keys() - files.keys():
            shutil.copyfile(bundle.folder / name, temporary / name)
            _check_file(temporary / name, bundle.sums[name])
        for name, content in files.items():
            (temporary / name).write_bytes(content)

    return _replace(bundle.folder, fill)


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
        if not m or m[2] not in FILES or m[2] in found:
            raise BundleCorrupt(
                "bad line in SHA256SUMS", key=key, need="sha256 and a bundle's file name, each once", have=line[:100]
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


def _bounded(path: Path, cap: int = _MAX_TEXT_BYTES) -> bytes:
    try:
        with path.open("rb") as f:
            raw = f.read(cap + 1)
    except OSError as e:
        raise BundleCorrupt(
            "no bundle here",
            key=str(path),
            need="a readable file",
            have=e.strerror or str(e),
            fix="See `moonpool c2c fit`.",
        ) from e
    if len(raw) > cap:
        raise BundleCorrupt("file too large", key=str(path), need=f"<= {cap} B")
    return raw


def _verified(path: Path, need: str) -> bytes:
    """The file's bytes. Raises DigestMismatch unless they are the ones that SHA256SUMS names."""
    raw = _bounded(path, MAX_FILE_BYTES if path.name == WEIGHTS else _MAX_TEXT_BYTES)
    _same_sum(path, need, hashlib.sha256(raw).hexdigest())
    return raw


def _check_file(path: Path, need: str) -> None:
    """Like `_verified`, without holding the file in memory."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BundleCorrupt("file too large", key=str(path), need=f"<= {MAX_FILE_BYTES} B")
        _same_sum(path, need, _sha256(path))
    except OSError as e:
        raise BundleCorrupt(
            "file is missing", key=str(path), have=e.strerror or str(e), fix="Fetch the bundle again."
        ) from e


def _same_sum(path: Path, need: str, have: str) -> None:
    if have != need:
        raise DigestMismatch("file was changed or cut off", key=str(path), need=need, have=have, fix="Fetch it again.")


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
    sums = read_sums(raw, str(folder))
    foreign = sorted(f.name for f in folder.iterdir() if f.name not in {*sums, SUMS} and not f.name.startswith("."))
    if foreign:
        raise BundleCorrupt("files that SHA256SUMS does not name", key=str(folder), have=", ".join(foreign[:8]))
    for name, need in sums.items():
        _check_file(folder / name, need)
    return Bundle(folder, digest, _manifest(_verified(folder / MANIFEST, sums[MANIFEST]), folder / MANIFEST), sums)


class _Format(msgspec.Struct):
    format: int = 0


def _manifest(raw: bytes, path: Path) -> Manifest:
    try:
        found = msgspec.json.decode(raw, type=_Format).format  # first: another format has other fields
        if found != FORMAT:
            raise BundleCorrupt("bundle of another format", key=str(path), need=str(FORMAT), have=str(found))
        return msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        raise BundleCorrupt(f"manifest: {e}", key=str(path)) from e
