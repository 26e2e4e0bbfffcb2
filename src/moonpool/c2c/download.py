"""Projector bundles from elsewhere: fetched in parts, resumed, verified, then visible in the cache under their digest.

    reference                                  fetched by
    a folder                                   nothing: used where it is
    http(s)://host/folder                      requests, file by file with Range requests
    hf://org/repo[@revision][/folder]          huggingface_hub (its own resume and cache)

A remote bundle needs its digest beforehand. SHA256SUMS is fetched first and must have that digest; it names all other files and
their digests. Nothing is visible in the cache before every file matched, and nothing is ever written outside of it. A bundle
in the cache is verified again when it is asked for, and fetched anew if it was damaged.

Why not pooch: it cannot resume, and it follows redirects to any host.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

import requests
import urllib3
from filelock import FileLock, Timeout

from moonpool import paths
from moonpool.c2c.bundle import MAX_FILE_BYTES, SUMS, open_bundle, read_sums, sums_digest
from moonpool.errors import BundleError, ConfigError, DigestMismatch, DownloadFailed

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (file name, bytes so far, bytes in all or 0)."""

_TIMEOUT_S = 30.0
"""Without a single byte for this long, a connection counts as broken."""
_DEADLINE_S = 3600.0
"""For one bundle, however slowly its bytes drip."""
_CHUNK = 1 << 20
_ATTEMPTS = 4
"""Broken connections in a row that brought nothing new."""
_PAUSE_S = 0.2
_REDIRECTS = 5
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MAX_SUMS_BYTES = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{32}")


def resolve_bundle(
    ref: str,
    digest: str,
    *,
    cache_dir: Path | None = None,
    allowed_hosts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Path:
    """The folder of a bundle, fetched if it must be. Blocks; safe from several threads and processes at once.

    `digest`: 32 hex digits, needed for everything but a local folder. `allowed_hosts`: hosts besides loopback and the hub's.
    Raises ConfigError (no or bad digest, host not allowed), DigestMismatch, BundleCorrupt, DownloadFailed.
    """
    if not ref.startswith(("http://", "https://", "hf://")):
        return Path(ref)
    if not _DIGEST.fullmatch(digest):
        what = "bad digest" if digest else "a remote bundle needs its digest"
        raise ConfigError(what, key=ref, need="32 hex digits", have=digest, fix="Add `digest:` to the rule.")
    home = (cache_dir or paths.cache_dir()) / "bundles"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f"{digest}.lock", timeout=_DEADLINE_S):
            return _cached(home / digest, digest) or _fetch(ref, digest, home, allowed_hosts, progress)
    except Timeout as e:
        raise DownloadFailed(f"another process holds the download for {_DEADLINE_S:.0f} s", key=ref) from e
    except OSError as e:  # disk full, no permission
        raise DownloadFailed("cannot write the cache", key=str(home), have=e.strerror or str(e)) from e


def _cached(done: Path, digest: str) -> Path | None:
    """The bundle in the cache if it is there and whole; a damaged one is removed."""
    if not done.is_dir():
        return None
    try:
        open_bundle(done, expect_digest=digest)
    except BundleError:
        shutil.rmtree(done)
        return None
    return done


def _fetch(ref: str, digest: str, home: Path, hosts: Sequence[str], progress: Progress | None) -> Path:
    """Fetch into `<digest>.part`, which an interrupted download finds again, verify and make visible."""
    part = home / f"{digest}.part"
    part.mkdir(exist_ok=True)
    report = progress or (lambda _name, _done, _total: None)
    try:
        if ref.startswith("hf://"):
            _fetch_hub(ref, digest, part, report)
        else:
            _fetch_http(ref.rstrip("/"), digest, part, hosts, report)
        open_bundle(part, expect_digest=digest)
    except BundleError:
        shutil.rmtree(part)  # whole but wrong: nothing of it is worth resuming
        raise
    part.rename(home / digest)
    return home / digest


def _check_sums(raw: bytes, digest: str, ref: str) -> dict[str, str]:
    if sums_digest(raw) != digest:
        raise DigestMismatch("another bundle than the rule names", key=ref, need=digest, have=sums_digest(raw))
    return read_sums(raw, ref)


def _fetch_http(base: str, digest: str, part: Path, hosts: Sequence[str], report: Progress) -> None:
    parts = _allowed(base, hosts)
    if parts.query or parts.fragment:
        raise ConfigError("a bundle's URL is a folder's, without a query", key=base)
    with requests.Session() as session:
        session.trust_env = parts.hostname not in _LOOPBACK  # no proxy on the way to this machine
        client = _Client(session, frozenset(hosts), time.monotonic() + _DEADLINE_S, report)
        (part / SUMS).unlink(missing_ok=True)  # a few lines, never worth resuming
        client.download(f"{base}/{SUMS}", part / SUMS, _MAX_SUMS_BYTES)
        sums = _check_sums((part / SUMS).read_bytes(), digest, base)
        _keep_only(part, {*sums, SUMS})
        for name, need in sums.items():
            client.verified(f"{base}/{name}", part / name, need)


def _keep_only(part: Path, names: Iterable[str]) -> None:
    for stray in {f.name for f in part.iterdir()} - set(names):
        (part / stray).unlink()


def _allowed(url: str, hosts: Iterable[str]) -> SplitResult:
    """The URL, parsed. Raises ConfigError unless its host may be talked to."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError as e:
        raise ConfigError(f"not a URL: {e}", key=url) from e
    if parts.scheme not in ("http", "https") or (host not in _LOOPBACK and host not in hosts):
        raise ConfigError(
            "host is not allowed", key=url, have=host or "none", fix="Add it to `allowed_hosts` in the C2C config."
        )
    return parts


@dataclass(frozen=True, slots=True)
class _Client:
    """Fetches files of one bundle."""

    session: requests.Session
    hosts: frozenset[str]
    deadline: float
    report: Progress

    def verified(self, url: str, to: Path, need: str) -> None:
        """Fetch a file, going on from what is there; if that gives other bytes (the server's file was replaced in between),
        once more from the start. Raises DigestMismatch."""
        resumed = to.exists()
        if resumed and _sha256(to) == need:
            return
        self.download(url, to, MAX_FILE_BYTES)
        if resumed and _sha256(to) != need:
            to.unlink()
            self.download(url, to, MAX_FILE_BYTES)
        if (have := _sha256(to)) != need:
            raise DigestMismatch("the server's file is another one", key=url, need=need, have=have)

    def download(self, url: str, to: Path, cap: int) -> None:
        """Fetch one file. A broken connection is taken up again from where it broke."""
        failures = 0
        while True:
            before = _size(to)
            try:
                return self._continue(url, to, cap)
            except (requests.RequestException, urllib3.exceptions.HTTPError) as e:
                failures = 0 if _size(to) > before else failures + 1
                if failures >= _ATTEMPTS or time.monotonic() > self.deadline:
                    raise DownloadFailed(f"the connection broke: {e}", key=url, fix="Start again: it resumes.") from e
            time.sleep(_PAUSE_S * failures)

    def _continue(self, url: str, to: Path, cap: int) -> None:
        have = _size(to)
        with self._get(url, have) as answer:
            if answer.status_code == 416:  # nothing past what we have: the digest will tell whether it is whole
                return
            if answer.status_code == 200:
                have = 0
            elif answer.status_code != 206:
                raise DownloadFailed(f"the server answers {answer.status_code}", key=url)
            length = answer.headers.get("Content-Length", "")
            total = have + int(length) if length.isdecimal() else 0
            _check_cap(url, max(total, have), cap)
            with to.open("r+b" if have else "wb") as out:
                out.seek(have)
                out.truncate()
                # Not `iter_content`: it throws away the part of a chunk that came before a connection broke.
                while chunk := answer.raw.read1(_CHUNK):
                    have += out.write(chunk)
                    _check_cap(url, have, cap)
                    self._check_time(url)
                    self.report(to.name, have, total)
        if have < total:
            raise requests.ConnectionError(f"{have} of {total} B came")

    def _get(self, url: str, start: int) -> requests.Response:
        """The answer to a GET from byte `start` on; redirects are followed only to hosts that are allowed."""
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        for _ in range(_REDIRECTS):
            answer = self.session.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S, allow_redirects=False)
            if not answer.is_redirect:
                return answer
            answer.close()
            after = urljoin(url, answer.headers["Location"])
            if _allowed(after, self.hosts).scheme == "http" and url.startswith("https:"):
                raise DownloadFailed("redirected from https to http", key=url, have=after)
            url = after
        raise DownloadFailed(f"more than {_REDIRECTS} redirects", key=url)

    def _check_time(self, url: str) -> None:
        if time.monotonic() > self.deadline:
            raise DownloadFailed(f"took longer than {_DEADLINE_S:.0f} s", key=url, fix="Start again: it resumes.")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_cap(key: str, have: int, cap: int) -> None:
    if have > cap:
        raise DownloadFailed("file too large", key=key, need=f"<= {cap} B", have=f"{have} B")


def _fetch_hub(ref: str, digest: str, part: Path, report: Progress) -> None:
    repo, revision, folder = _hub_parts(ref)

    def get(name: str, cap: int) -> None:
        path = _hub_file(ref, repo, revision, folder, name)
        _check_cap(f"{ref}/{name}", path.stat().st_size, cap)
        shutil.copyfile(path, part / name)
        report(name, path.stat().st_size, path.stat().st_size)

    get(SUMS, _MAX_SUMS_BYTES)
    sums = _check_sums((part / SUMS).read_bytes(), digest, ref)
    _keep_only(part, {*sums, SUMS})
    for name in sums:
        get(name, MAX_FILE_BYTES)


def _hub_parts(ref: str) -> tuple[str, str | None, str | None]:
    """(repository, revision, folder in it) of `hf://org/repo[@revision][/folder]`."""
    pieces = PurePosixPath(ref.removeprefix("hf://")).parts
    if len(pieces) < 2 or ".." in pieces or pieces[0] == "/":
        raise ConfigError("bad hub reference", key=ref, need="hf://org/repo[@revision][/folder]")
    repo, _, revision = "/".join(pieces[:2]).partition("@")
    return repo, revision or None, "/".join(pieces[2:]) or None


def _hub_file(ref: str, repo: str, revision: str | None, folder: str | None, name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, subfolder=folder, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as e:
        raise DownloadFailed(f"the hub gives no {name}: {type(e).__name__}", key=ref) from e
