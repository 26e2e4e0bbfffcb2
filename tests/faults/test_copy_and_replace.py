"""A copy or move that is overtaken by a replacement: the old bytes are nowhere afterwards, and the new ones are not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.testing.leaks import eventually, no_leaks
from moonpool.types import Put, PutOptions
from tests.cluster.test_many_messengers import Pool

NEW = PutOptions(replace=True)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(tmp_path)
        yield pool
        pool.close()


def when_copied(pool: Pool, target: int, action: Callable[[], object]) -> None:
    """Does `action` at messenger `target` after the bytes of a task were copied and before they are visible."""
    tasks: Any = pool.hosts[target].service.tasks
    copy = tasks._copy

    def copy_and_act(*args: Any) -> None:
        copy(*args)
        action()

    tasks._copy = copy_and_act


@pytest.mark.parametrize("verb", ["copy", "move"])
@pytest.mark.parametrize("far", [False, True])
def test_what_is_replaced_while_it_is_copied_is_not_copied(pool: Pool, verb: str, far: bool) -> None:
    client = pool.client(0, far=far)
    client.put("k", b"old" * 1000)
    when_copied(pool, 1, lambda: client.put("k", b"new" * 1000, NEW))
    task = client.copy("k", ["m1"]) if verb == "copy" else client.move("k", "m1")
    assert eventually(lambda: client.task(task).state == "failed")
    for home in range(3):
        assert pool.client(home).get("k") == b"new" * 1000
    assert [r.messenger for r in client.replicas(["k"])[0]] == ["m0"]


def test_a_replacement_on_another_messenger_takes_the_copy_with_it(pool: Pool) -> None:
    a, b = pool.client(0), pool.client(2)
    a.put("k", b"old" * 1000)
    when_copied(pool, 1, lambda: b.put("k", b"new" * 1000, PutOptions(replace=True, preferred=("m2",))))
    task = a.copy("k", ["m1"])
    assert eventually(lambda: a.task(task).state == "failed")
    assert {r.messenger for r in a.replicas(["k"])[0]} == {"m2"}
    assert a.get("k") == b"new" * 1000


def test_what_is_removed_while_it_is_moved_does_not_come_back(pool: Pool) -> None:
    client = pool.client(0)
    client.put("k", b"old" * 1000)
    when_copied(pool, 1, lambda: client.remove("k"))
    task = client.move("k", "m1")
    assert eventually(lambda: client.task(task).state == "failed")
    assert client.batch_get(["k"]) == [None]
    assert client.put("k", b"another") is Put.STORED
