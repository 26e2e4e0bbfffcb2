"""The peer's configuration, in the file, in the environment, and by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.integrations.mooncake_api import launch
from moonpool.integrations.mooncake_api.config import MooncakeConfig, parse_bool, parse_size

REQUIRED = {"local_hostname": "host", "metadata_server": "P2PHANDSHAKE", "master_server_address": "master:1"}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_TENANT_ID", "MOONCAKE_GLOBAL_SEGMENT_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "size"),
    [(5, 5), (1.9, 1), ("7", 7), ("4gb", 4 << 30), ("16 MB", 16 << 20), ("1.5K", 1536), ("2t", 2 << 40), ("9b", 9)],
)
def test_sizes(given: object, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", " ", "gb", "b", "50%", "4xb"])
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(ValueError):
        parse_size(given)


def test_booleans() -> None:
    assert [parse_bool(v) for v in (True, "Yes", 1, "enable")] == [True] * 4
    assert [parse_bool(v) for v in (False, "off", 0, "", None)] == [False] * 5
    with pytest.raises(ValueError):
        parse_bool("perhaps")


def test_a_file_and_the_environment_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({**REQUIRED, "global_segment_size": "1gb", "tenant_id": "t", "protocol": "TCP"}))
    by_file = MooncakeConfig.from_file(str(file))
    assert (by_file.global_segment_size, by_file.tenant_id, by_file.protocol) == (1 << 30, "t", "tcp")
    monkeypatch.setenv("MOONCAKE_MASTER", "master:1")
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "host")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1gb")
    monkeypatch.setenv("MOONCAKE_TENANT_ID", "t")
    assert MooncakeConfig.load_from_env() == by_file
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb")
    assert MooncakeConfig.load_from_env() == by_file


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({k: v for k, v in REQUIRED.items() if k != missing}))
    with pytest.raises(ValueError, match=missing):
        MooncakeConfig.from_file(str(file))


@pytest.mark.parametrize(
    "changed", [{"local_hostname": " "}, {"protocol": ""}, {"local_buffer_size": -1}, {"master_server_address": None}]
)
def test_nonsense_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({**REQUIRED, **changed}))
    with pytest.raises(ValueError, match=next(iter(changed))):
        MooncakeConfig.from_file(str(file))


def test_nothing_in_the_environment_is_said() -> None:
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()


_NAMES = """
BufferHandle BufferLease BufferLeaseView BufferPool COMPLETE Descriptor DiskDescriptor FAILED GENERAL INITIALIZED KVCACHE METADATA
MemoryDescriptor MooncakeDistributedStore MooncakeHostMemAllocator ObjectDataType PENDING PROCESSING ParallelAxis QueryTaskResponse
REMOVED REPLICA_COPY REPLICA_MOVE ReadTarget RegisteredBufferLease RegisteredBufferLeaseView RegisteredBufferPool ReplicaDescriptor
ReplicaStatus ReplicateConfig SUCCESS SoftPinAction TENSOR TaskStatus TaskType TensorParallelism UNDEFINED UNKNOWN WEIGHT
_deserialize_tensor _serialize_tensor _tensor_metadata_size bind_to_numa_node
"""


def test_the_stand_in_has_the_peers_names() -> None:
    code = f"import mooncake.store as s; print([n for n in {_NAMES.split()!r} if not hasattr(s, n)])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=launch.environment({}), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
