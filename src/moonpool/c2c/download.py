"""Projector bundles from elsewhere: fetched in parts, resumed, verified, then visible in the cache under their digest.

    reference                                  fetched by
    a folder                                   nothing: used where it is
    http(s)://host/folder                      requests, file by file with Range requests
    hf://org/repo[@revision][/folder]          huggingface_hub (its own resume and cache)

A remote bundle needs its digest beforehand. SHA256SUMS is fetched first and must have that digest; it names all other files and
their digests. Nothing is visible in the cache before every file matched, and nothing is ever written outside of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import requests
from filelock import FileLock, Timeout

from moonpool import paths
from moonpool.c2c.bundle import MAX_FILE_BYTES, SUMS, open_bundle, read_sums, sums_digest
from moonpool.errors import BundleError, ConfigError, DigestMismatch, DownloadFailed

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (file name, bytes so far, bytes in all or 0)."""

_TIMEOUT_S = 30.0
_CHUNK = 1 << 20
_ATTEMPTS = 4
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MAX_SUMS_BYTES = 1 << 16


def resolve_bundle(
    ref: str,
    digest: str,
    *,
    cache_dir: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Path:
    """The folder of a bundle, fetched if it must be. Blocks; safe from several threads and processes at once.

    Raises ConfigError (no digest, host not allowed), DigestMismatch, DownloadFailed.
    """
    if not ref.startswith(("http://", "https://", "hf://")):
        return Path(ref)
    if not digest:
        raise ConfigError("a remote bundle needs its digest", key=ref, fix="Add `digest:` to the rule.")
    home = (cache_dir or paths.cache_dir()) / "bundles"
    done = home / digest
    if done.is_dir():
        return done
    home.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(home / f"{digest}.lock", timeout=3600):
            if not done.is_dir():
                _fetch(ref, digest, home / f"{digest}.part", allowed_hosts, progress)
                (home / f"{digest}.part").rename(done)
    except Timeout as e:
        raise DownloadFailed("another process holds the download for an hour", key=ref) from e
    return done


def _fetch(ref: str, digest: str, part: Path, hosts: Sequence[str], progress: Progress | None) -> None:
    part.mkdir(exist_ok=True)
    if ref.startswith("hf://"):
        _fetch_hub(ref.removeprefix("hf://"), digest, part)
    else:
        _fetch_http(ref.rstrip("/"), digest, part, hosts, progress)
    try:
        open_bundle(part, expect_digest=digest)
    except BundleError:
        shutil.rmtree(part)  # whole but wrong: nothing of it is worth resuming
        raise


def _fetch_http(base: str, digest: str, part: Path, hosts: Sequence[str], progress: Progress | None) -> None:
    host = urlsplit(base).hostname or ""
    if host not in _LOOPBACK and host not in hosts:
        raise ConfigError(
            "host is not allowed", key=base, have=host, fix="Add it to `allowed_hosts` in the C2C config."
        )
    with requests.Session() as session:
        _download(session, f"{base}/{SUMS}", part / SUMS, _MAX_SUMS_BYTES, None)
        sums = (part / SUMS).read_bytes()
        if sums_digest(sums) != digest:
            shutil.rmtree(part)
            raise DigestMismatch("another bundle than the rule names", key=base, need=digest, have=sums_digest(sums))
        for name in read_sums(sums, base):
            _download(session, f"{base}/{name}", part / name, MAX_FILE_BYTES, progress)


def _download(session: requests.Session, url: str, to: Path, cap: int, progress: Progress | None) -> None:
    """Fetch one file, continuing from what is there. A broken connection is tried again from where it broke."""
    last: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            return _continue(session, url, to, cap, progress)
        except requests.RequestException as e:
            last = e
    raise DownloadFailed(
        f"the connection broke {_ATTEMPTS} times: {last}", key=url, fix="Start again: it resumes."
    ) from last


def _continue(session: requests.Session, url: str, to: Path, cap: int, progress: Progress | None) -> None:
    have = to.stat().st_size if to.exists() else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
    with session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S, allow_redirects=False) as answer:
        if answer.status_code == 416:  # nothing past what we have: the digest will tell whether it is whole
            return
        if answer.status_code not in (200, 206):
            raise DownloadFailed(f"the server answers {answer.status_code}", key=url, fix="Redirects are not followed.")
        if answer.status_code == 200:
            have = 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        if total > cap:
            raise DownloadFailed("file too large", key=url, need=f"<= {cap} B", have=f"{total} B")
        with to.open("r+b" if have else "wb") as out:
            out.seek(have)
            out.truncate()
            for chunk in answer.iter_content(_CHUNK):
                have += out.write(chunk)
                if have > cap:
                    raise DownloadFailed("file too large", key=url, need=f"<= {cap} B", have=f"{have} B")
                if progress:
                    progress(to.name, have, total)
        if total and have < total:
            raise requests.ConnectionError(f"{have} of {total} B came")


def _fetch_hub(ref: str, digest: str, part: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    pieces = ref.split("/")
    repo, revision = "/".join(pieces[:2]), None
    if "@" in repo:
        repo, revision = repo.split("@", 1)
    folder = "/".join(pieces[2:])

    def get(name: str) -> None:
        try:
            path = hf_hub_download(repo, name, subfolder=folder or None, revision=revision)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as e:
            raise DownloadFailed(f"the hub gives no {name}: {type(e).__name__}", key=f"hf://{ref}") from e
        shutil.copyfile(path, part / name)

    get(SUMS)
    sums = (part / SUMS).read_bytes()
    if sums_digest(sums) != digest:
        raise DigestMismatch(
            "another bundle than the rule names", key=f"hf://{ref}", need=digest, have=sums_digest(sums)
        )
    for name in read_sums(sums, ref):
        get(name)
