"""Downloads of bundles from a loopback server that behaves as badly as servers do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from moonpool.c2c import download
from moonpool.c2c.bundle import Bundle, _write_sums, open_bundle, sums_digest, write_bundle
from moonpool.c2c.download import resolve_bundle
from moonpool.c2c.projectors.linear import LinearParameters, LinearProjector
from moonpool.errors import BundleCorrupt, ConfigError, DigestMismatch, DownloadFailed
from tests.c2c.support import spec


class Site(ThreadingHTTPServer):
    """Serves one folder. `cut`: name → bytes after which each connection for it drops. `moved`: path → Location."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.cut: dict[str, int] = {}
        self.moved: dict[str, str] = {}
        self.ranges = True
        self.asked: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        site, path = self.server, self.server.folder / name
        start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if site.ranges else 0
        site.asked.append((name, start))
        if self.path in site.moved:
            self._head(302, {"Location": site.moved[self.path]})
            return
        if not path.is_file() or start > path.stat().st_size:
            self._head(404 if start == 0 else 416, {})
            return
        body = path.read_bytes()[start:]
        self._head(206 if start else 200, {"Content-Length": str(len(body))})
        self.wfile.write(body[: site.cut.get(name, len(body))])

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for field, value in headers.items():
            self.send_header(field, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def made(tmp_path: Path) -> Bundle:
    parameters = LinearParameters(
        source_layers=1, source_width=64, target_layers=1, target_width=64, sources=[[[0], [0]]]
    )
    weights = [[torch.randn(128, 64, generator=torch.Generator().manual_seed(h)) for h in (0, 1)]]
    p = LinearProjector(parameters, weights, torch.zeros(1, 2, 64))
    return write_bundle(tmp_path / "site", p, spec(layers=1, dim=32), spec(layers=1, dim=32))


@pytest.fixture
def site(made: Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    server = Site(made.folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def visible(cache: Path) -> list[str]:
    return sorted(f.name for f in (cache / "bundles").iterdir() if f.is_dir() and f.suffix != ".part")


def test_a_folder_is_used_where_it_is(made: Bundle) -> None:
    assert resolve_bundle(str(made.folder), "") == made.folder


def test_fetched_verified_and_cached(site: Site, made: Bundle, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = resolve_bundle(site.url, made.digest, cache_dir=cache, progress=lambda *a: seen.append(a))
    assert open_bundle(found, expect_digest=made.digest).digest == made.digest
    assert found == cache / "bundles" / made.digest
    size = (made.folder / "weights.safetensors").stat().st_size
    assert ("weights.safetensors", size, size) in seen
    asked = len(site.asked)
    assert resolve_bundle(site.url + "/", made.digest, cache_dir=cache) == found
    assert len(site.asked) == asked, "the second time comes from the cache"


def test_a_damaged_cache_is_fetched_anew(site: Site, made: Bundle, cache: Path) -> None:
    found = resolve_bundle(site.url, made.digest, cache_dir=cache)
    (found / "weights.safetensors").write_bytes(b"rot")
    assert open_bundle(resolve_bundle(site.url, made.digest, cache_dir=cache)).digest == made.digest


def test_another_bundle_than_asked_for_is_never_visible(site: Site, cache: Path) -> None:
    with pytest.raises(DigestMismatch, match="another bundle"):
        resolve_bundle(site.url, "0" * 32, cache_dir=cache)
    assert visible(cache) == []


def test_a_dropped_connection_is_resumed(site: Site, made: Bundle, cache: Path) -> None:
    site.cut["weights.safetensors"] = 5000
    found = resolve_bundle(site.url, made.digest, cache_dir=cache)
    assert open_bundle(found).digest == made.digest
    starts = [at for name, at in site.asked if name == "weights.safetensors"]
    assert starts[:3] == [0, 5000, 10000]


def test_a_download_that_failed_goes_on_where_it_stopped(site: Site, made: Bundle, cache: Path) -> None:
    (part := cache / "bundles" / f"{made.digest}.part").mkdir(parents=True)
    whole = (made.folder / "weights.safetensors").read_bytes()
    (part / "weights.safetensors").write_bytes(whole[:7000])
    (part / "SHA256SUMS").write_bytes(b"left over")
    (part / "stray.pt").write_bytes(b"left over")
    resolve_bundle(site.url, made.digest, cache_dir=cache)
    assert ("weights.safetensors", 7000) in site.asked
    assert ("weights.safetensors", 0) not in site.asked


def test_what_is_there_but_of_another_file_is_fetched_from_the_start(site: Site, made: Bundle, cache: Path) -> None:
    (part := cache / "bundles" / f"{made.digest}.part").mkdir(parents=True)
    (part / "weights.safetensors").write_bytes(b"y" * 7000)
    assert open_bundle(resolve_bundle(site.url, made.digest, cache_dir=cache)).digest == made.digest


def test_a_server_without_ranges_starts_again(site: Site, made: Bundle, cache: Path) -> None:
    site.ranges = False
    (part := cache / "bundles" / f"{made.digest}.part").mkdir(parents=True)
    (part / "weights.safetensors").write_bytes(b"y" * 7000)
    assert open_bundle(resolve_bundle(site.url, made.digest, cache_dir=cache)).digest == made.digest


def test_a_server_that_sends_nothing_is_given_up(site: Site, made: Bundle, cache: Path) -> None:
    site.cut["weights.safetensors"] = 0
    with pytest.raises(DownloadFailed, match="connection broke"):
        resolve_bundle(site.url, made.digest, cache_dir=cache)
    assert len([a for a in site.asked if a[0] == "weights.safetensors"]) == download._ATTEMPTS
    assert visible(cache) == []


@pytest.mark.parametrize("content", [b"", b"x" * 40000])
def test_a_swapped_file_is_refused(site: Site, made: Bundle, cache: Path, content: bytes) -> None:
    (made.folder / "weights.safetensors").write_bytes(content)
    with pytest.raises(DigestMismatch, match="weights"):
        resolve_bundle(site.url, made.digest, cache_dir=cache)
    assert visible(cache) == []


def test_a_missing_file_is_named(site: Site, made: Bundle, cache: Path) -> None:
    (made.folder / "manifest.json").unlink()
    with pytest.raises(DownloadFailed, match=r"404.*|manifest"):
        resolve_bundle(site.url, made.digest, cache_dir=cache)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "weights.pt"])
def test_foreign_names_are_refused_even_with_the_right_digest(
    site: Site, made: Bundle, cache: Path, name: str, tmp_path: Path
) -> None:
    sums = (made.folder / "SHA256SUMS").read_bytes() + f"{'0' * 64}  {name}\n".encode()
    (made.folder / "SHA256SUMS").write_bytes(sums)
    with pytest.raises(BundleCorrupt, match="bad line"):
        resolve_bundle(site.url, sums_digest(sums), cache_dir=cache)
    assert not (cache / "x").exists()
    assert visible(cache) == []


@pytest.mark.parametrize("digest", ["", "../../x", "A" * 32, "0" * 31])
def test_a_remote_bundle_needs_a_digest(digest: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match="digest"):
        resolve_bundle("http://127.0.0.1:1", digest, cache_dir=cache)


@pytest.mark.parametrize(
    "url",
    ["http://example.org/b", "http://127.0.0.1@example.org/b", "http://127.0.0.1.example.org", "http://[x", "http://"],
)
def test_other_hosts_are_not_talked_to(url: str, cache: Path) -> None:
    with pytest.raises(ConfigError):
        resolve_bundle(url, "0" * 32, cache_dir=cache)


def test_a_query_is_refused(site: Site, cache: Path) -> None:
    with pytest.raises(ConfigError, match="query"):
        resolve_bundle(f"{site.url}/b?x=1", "0" * 32, cache_dir=cache)


def test_redirects_go_to_allowed_hosts_only(site: Site, made: Bundle, cache: Path) -> None:
    site.moved["/old/SHA256SUMS"] = "/SHA256SUMS"
    site.moved["/old/manifest.json"] = f"{site.url}/manifest.json"
    site.moved["/old/weights.safetensors"] = "http://example.org/weights.safetensors"
    with pytest.raises(ConfigError, match=r"example\.org"):
        resolve_bundle(f"{site.url}/old", made.digest, cache_dir=cache)
    site.moved["/old/weights.safetensors"] = "/weights.safetensors"
    assert open_bundle(resolve_bundle(f"{site.url}/old", made.digest, cache_dir=cache)).digest == made.digest


def test_redirects_in_a_circle_end(site: Site, made: Bundle, cache: Path) -> None:
    site.moved["/SHA256SUMS"] = "/SHA256SUMS"
    with pytest.raises(DownloadFailed, match="redirects"):
        resolve_bundle(site.url, made.digest, cache_dir=cache)


def test_files_over_the_cap_are_refused_before_they_come(
    site: Site, made: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_FILE_BYTES", 1000)
    with pytest.raises(DownloadFailed, match="too large"):
        resolve_bundle(site.url, made.digest, cache_dir=cache)


def test_one_download_for_many_callers(site: Site, made: Bundle, cache: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_bundle(site.url, made.digest, cache_dir=cache)))
        for _ in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [cache / "bundles" / made.digest] * 6
    assert len([a for a in site.asked if a[0] == "weights.safetensors"]) == 1


def test_a_cache_that_cannot_be_written_says_so(site: Site, made: Bundle, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadFailed, match="cache"):
        resolve_bundle(site.url, made.digest, cache_dir=tmp_path / "cache")


def _hub(monkeypatch: pytest.MonkeyPatch, folder: Path, asked: list[tuple[str, ...]]) -> None:
    def get(repo: str, name: str, *, subfolder: str | None, revision: str | None) -> str:
        asked.append((repo, str(revision), str(subfolder)))
        if not (folder / name).is_file():
            raise OSError("offline")
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", get)


def test_from_the_hub(made: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    _hub(monkeypatch, made.folder, asked)
    found = resolve_bundle("hf://org/repo@v1/a/b", made.digest, cache_dir=cache)
    assert open_bundle(found).digest == made.digest
    assert set(asked) == {("org/repo", "v1", "a/b")}


def test_the_hub_is_not_believed_either(made: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, made.folder, [])
    with pytest.raises(DigestMismatch):
        resolve_bundle("hf://org/repo", "0" * 32, cache_dir=cache)
    (made.folder / "weights.safetensors").write_bytes(b"rot")
    with pytest.raises(DigestMismatch):
        resolve_bundle("hf://org/repo", made.digest, cache_dir=cache)
    _write_sums(made.folder)
    (made.folder / "SHA256SUMS").unlink()
    with pytest.raises(DownloadFailed, match="hub"):
        resolve_bundle("hf://org/repo", made.digest, cache_dir=cache)
    for bad in ("hf://org", "hf://org/repo/../x", "hf:///etc/passwd"):
        with pytest.raises(ConfigError, match="hub reference"):
            resolve_bundle(bad, made.digest, cache_dir=cache)
    assert visible(cache) == []
