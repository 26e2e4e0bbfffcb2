from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.c2c.signature import ModelSpec, load_spec
from moonpool.engine.instance import Instance
from moonpool.store.embedded import EmbeddedPool
from moonpool.transfer.copying import THREAD_NAME
from tests.engine.models import build

PAGE = 16


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and on a busy machine the threads' barriers make each step wait for a time slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / request.param, request.param, seed=3)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "tiny", "qwen3", seed=7)


@pytest.fixture(scope="session")
def spec(model: Path) -> ModelSpec:
    return load_spec(model)


@pytest.fixture
def pool() -> Iterator[EmbeddedPool]:
    with EmbeddedPool(capacity=32 << 20) as pool:
        yield pool


@pytest.fixture
def start() -> Iterator[Callable[..., Instance]]:
    """Instances that are closed at the end of the test, with a check that no engine thread is left."""
    made: list[Instance] = []

    def begin(model: Path, pool: Any = None, **options: Any) -> Instance:
        instance = Instance(model, load_spec(model), pool, page_size=PAGE, **{"compute": "float32", **options})
        made.append(instance)
        return instance

    yield begin
    for instance in made:
        instance.close()
    ours = {t.name for t in threading.enumerate() if t.name.startswith("moonpool-") and t.is_alive()}
    assert not {name for name in ours if not name.startswith(THREAD_NAME)}, "the process's own threads for copies stay"


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` pseudo-random token ids that are no special tokens."""
    return [4 + (i * 7919 + seed * 104729 + i * i * 31) % 250 for i in range(n)]


def stored_pages(pool: EmbeddedPool, instance: Instance, tokens: Sequence[int]) -> list[int]:
    """Indices of the native pages of `tokens` that the pool has."""
    keys = instance.spec.identity(PAGE).page_keys(tokens)
    return [k.index for k, there in zip(keys, pool.batch_is_exist([k.text for k in keys]), strict=True) if there]
