"""The converter as a process of its own: it works, it may be killed in mid-work, and it outlives the messenger."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonpool.c2c.bundle import write_bundle
from moonpool.c2c.projectors.identity import IdentityParameters, IdentityProjector
from moonpool.store.client import PoolClient
from moonpool.testing.cluster import LocalCluster
from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put
from tests.c2c.pairs import PAGE, config, keys_of, model, random_kv, rule

pytestmark = pytest.mark.cluster

SOURCE, TARGET = model("source"), model("target")
SHAPE = SOURCE.spec.page_shape(PAGE)
COUNT = 400
PAGES = random_kv(SHAPE, COUNT)
SOURCE_KEYS, TARGET_KEYS = keys_of(SOURCE, COUNT * PAGE), keys_of(TARGET, COUNT * PAGE)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LocalCluster, str]]:
    """A cluster whose master holds one rule with an identity bundle, and the bundle's digest."""
    projector = IdentityProjector(IdentityParameters(layers=SHAPE.layers, width=SHAPE.width))
    bundle = write_bundle(tmp_path / "bundle", projector, SOURCE.spec, TARGET.spec)
    conf = config(rule(SOURCE, TARGET, bundle=str(bundle.folder), digest=bundle.digest, force=True))
    with no_leaks(), LocalCluster(c2c_config=conf.encode()) as running:
        yield running, bundle.digest


@contextmanager
def converter(cluster: LocalCluster) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "moonpool", "converter", "--master", cluster.master.socket]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def made(pool: PoolClient, digest: str) -> int:
    return sum(pool.batch_is_exist([k.converted(digest).text for k in TARGET_KEYS]))


def ask(pool: PoolClient, digest: str) -> int:
    """Look all pages up, which announces the missing ones, and count what is there."""
    return sum(m is not None for m in pool.lookup(TARGET_KEYS[1:], [digest]))


def put(pool: PoolClient, first: int, last: int) -> None:
    keys = [k.text for k in SOURCE_KEYS[first:last]]
    assert pool.batch_put(keys, PAGES[first:last]) == [Put.STORED] * (last - first)


def assert_whole(pool: PoolClient, digest: str) -> None:
    """Every converted page that can be seen is, bit for bit, the source's."""
    for i, got in enumerate(pool.batch_get([k.converted(digest).text for k in TARGET_KEYS])):
        assert got is None or got == bytes(PAGES[i])


def test_it_takes_its_config_from_the_master_and_converts(cluster: tuple[LocalCluster, str]) -> None:
    running, digest = cluster
    pool = running.client()
    with converter(running) as process:
        put(pool, 0, 8)
        assert eventually(lambda: ask(pool, digest) == 7, timeout_s=60)
        assert_whole(pool, digest)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_kill_9_in_mid_work_leaves_nothing_half_made(cluster: tuple[LocalCluster, str]) -> None:
    running, digest = cluster
    pool = running.client()
    with converter(running) as process:
        put(pool, 0, 4)
        assert eventually(lambda: ask(pool, digest) == 3, timeout_s=60)
        put(pool, 4, COUNT)
        assert eventually(lambda: made(pool, digest) > 3)
        process.kill()
        process.wait()
    assert eventually(lambda: pool.stats().writes_open == 0 and pool.stats().reads_open == 0)
    assert_whole(pool, digest)
    pool.put("the rest goes on", b"yes")
    with converter(running):  # what was lost is a miss, and a miss is converted when it is asked for
        assert eventually(lambda: ask(pool, digest) == COUNT - 1, timeout_s=60)
        assert_whole(pool, digest)


def test_it_subscribes_again_when_the_messenger_comes_back(cluster: tuple[LocalCluster, str]) -> None:
    running, digest = cluster
    pool = running.client()
    with converter(running) as process:
        put(pool, 0, 4)
        assert eventually(lambda: ask(pool, digest) == 3, timeout_s=60)
        running.messengers[0].restart()
        assert eventually(lambda: pool.batch_put(["alive"], [b"x"]) == [Put.STORED])
        assert made(pool, digest) == 0, "a restarted messenger's objects are misses"
        put(pool, 0, 4)
        assert eventually(lambda: ask(pool, digest) == 3, timeout_s=60)
        assert_whole(pool, digest)
        assert process.poll() is None


def test_without_rules_it_says_so_and_ends(tmp_path: Path) -> None:
    with no_leaks(), LocalCluster() as running, converter(running) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert b"the pool holds no C2C rules" in process.stderr.read()
