"""What a quota does to its tenant, and to nobody else."""

from __future__ import annotations

from pathlib import Path

from moonpool.errors import QuotaExceeded
from moonpool.testing.leaks import eventually
from moonpool.types import Pin, Put, PutOptions
from tests.ops.support import MIB, small_pool


def test_a_tenant_over_its_quota_loses_its_own_objects_only(tmp_path: Path) -> None:
    with small_pool(tmp_path, messengers=1) as small:
        pool, other = small.client(tenant="t"), small.client(tenant="o")
        other.batch_put(["a", "b"], [bytes(100_000)] * 2)
        pool.set_quota("t", 300_000)
        pool.put("probe", b"x")
        assert eventually(lambda: small.service.quotas()["t"] == (300_000, 1))
        assert eventually(lambda: small.hosts[0].service._state._quotas == {"t": 300_000})
        for i in range(6):
            assert pool.put(f"k{i}", bytes(100_000)) is Put.STORED
        assert sum(pool.batch_is_exist([f"k{i}" for i in range(6)])) in (2, 3)
        assert pool.is_exist("k5")
        assert other.batch_is_exist(["a", "b"]) == [True, True]
        assert small.hosts[0].service.used_by_tenant()["t"] <= 300_000


def test_pinned_objects_fill_a_quota_and_the_error_says_so(tmp_path: Path) -> None:
    with small_pool(tmp_path, messengers=1) as small:
        pool = small.client(tenant="t")
        pool.set_quota("t", MIB)
        assert eventually(lambda: small.hosts[0].service._state._quotas == {"t": MIB})
        pool.put("pinned", bytes(MIB - 1000), options=PutOptions(pin=Pin.HARD))
        [refused] = pool.batch_put(["more"], [bytes(2000)])
        assert isinstance(refused, QuotaExceeded)
        assert "tenant `t`" in str(refused)
        pool.set_quota("t", None)
        assert eventually(lambda: small.hosts[0].service._state._quotas == {})
        assert pool.put("more", bytes(2000)) is Put.STORED
