"""`mooncake_master`: Moonpool's master at the peer's ports, with the peer's HTTP pages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from moonpool.integrations.mooncake_api import dummy, flags, http_pages
from moonpool.integrations.mooncake_api.commands.running import run
from moonpool.integrations.mooncake_api.http_front import HttpThread
from moonpool.integrations.mooncake_api.joining import Joined, messengers_of
from moonpool.store.base import KVPool
from moonpool.store.client import PoolClient
from moonpool.store.metadata.server import MetadataServer
from moonpool.store.processes import MasterConfig, run_master
from moonpool.wire.address import TcpAddress
from moonpool.wire.auth import Security, security_from_environment

DEFAULT_PORT = 50051
FLAGS = {
    "rpc_port": flags.number(0),
    "port": flags.number(DEFAULT_PORT),
    "rpc_address": flags.Flag("127.0.0.1"),
    "metrics_port": flags.number(9003),
    "metrics_host": flags.Flag("127.0.0.1"),
    "enable_metric_reporting": flags.switch(True),
    "enable_http_metadata_server": flags.switch(),
    "http_metadata_server_port": flags.number(8080),
    "http_metadata_server_host": flags.Flag("127.0.0.1"),
    "client_ttl": flags.Flag(10.0, flags.duration),
}
_IDLE = """
max_threads rpc_interface rpc_thread_num rpc_conn_timeout_seconds rpc_enable_tcp_no_delay
enable_metadata_cleanup_on_timeout default_kv_lease_ttl default_kv_soft_pin_ttl max_kv_soft_pin_ttl
allow_evict_soft_pinned_objects eviction_ratio eviction_high_watermark_ratio nof_eviction_ratio
nof_eviction_high_watermark_ratio put_start_discard_timeout_sec put_start_release_timeout_sec memory_allocator
allocation_strategy enable_multi_tenants tenant_quota_connector_type tenant_quota_connector_uri enable_ha
ha_backend_type ha_backend_connstring etcd_endpoints cluster_id enable_oplog oplog_poll_interval_ms
oplog_batch_max_entries batch_oplog_retry_timeout_sec enable_snapshot enable_snapshot_restore snapshot_interval_seconds
snapshot_child_timeout_seconds snapshot_retention_count snapshot_object_store_type snapshot_payload_store_type
snapshot_payload_backend_type snapshot_catalog_store_type snapshot_catalog_backend_type
snapshot_catalog_store_connstring snapshot_catalog_backend_connstring snapshot_backup_dir enable_offload
offload_on_evict offload_force_evict offloading_queue_limit offload_cap_ratio promotion_on_hit
promotion_admission_threshold promotion_queue_limit promotion_max_per_heartbeat root_fs_dir global_file_segment_size
enable_disk_eviction quota_bytes dynamic_replication_mode dynamic_replication_heat_window_seconds
max_total_finished_tasks max_total_pending_tasks max_total_processing_tasks pending_task_timeout_sec
processing_task_timeout_sec max_retry_attempts enable_kv_events kv_events_bind_endpoint kv_events_model_name
kv_events_backend_id kv_events_tenant_id kv_events_additional_salt kv_events_lora_name kv_events_block_size
kv_events_dp_rank kv_events_emit_legacy_compat kv_events_emit_object_key kv_events_queue_capacity enable_cxl cxl_path
cxl_size pod_name pod_namespace logtostderr alsologtostderr log_dir v minloglevel
"""
IDLE = frozenset(_IDLE.split())
"""The peer's flags for what Moonpool does otherwise: `docs/mooncake-api.md` says how."""


def main(arguments: Sequence[str]) -> None:
    given = flags.parse(arguments, FLAGS, IDLE)
    port = given["rpc_port"] or given["port"]
    address = str(TcpAddress(given["rpc_address"], port))
    reach = str(TcpAddress("127.0.0.1" if given["rpc_address"] == "0.0.0.0" else given["rpc_address"], port))  # noqa: S104
    config = MasterConfig(
        socket=str(dummy.folder() / f"mooncake_master_{port}.sock"), listen=address, expiry_s=given["client_ttl"]
    )
    with contextlib.ExitStack() as stack:
        if given["enable_metric_reporting"]:
            security = security_from_environment()
            members = lambda: messengers_of(config.socket, security)  # noqa: E731
            app = http_pages.admin_app(_pool(config.socket, security, stack), members, reach)
            stack.callback(HttpThread(app, given["metrics_host"], given["metrics_port"], "metrics").close)
        if given["enable_http_metadata_server"]:
            host, port = given["http_metadata_server_host"], given["http_metadata_server_port"]
            stack.callback(MetadataServer(host, port).close)
        run_master(config)


def _pool(master: str, security: Security, stack: contextlib.ExitStack) -> http_pages.Pool:
    """The pool of this master, joined when a page first needs it."""
    joined: list[Joined] = []

    def connect() -> KVPool | None:
        return PoolClient.connect(master, security=security) if messengers_of(master, security) else None

    def pool() -> KVPool:
        if not joined:
            joined.append(Joined("admin", 0, connect, owned=True))
            stack.callback(joined[0].close)
        return joined[0].pool

    return pool


if __name__ == "__main__":
    sys.exit(run("mooncake_master", main))
