"""`mooncake.engine` on Moonpool's registered memory and TCP transfers.

Names, argument order and return codes are the peer's (0 or a positive number is success, negative is not; asynchronous submits
return 0 on failure); every failure is logged with its cause. Differences, all on purpose:

* it listens on loopback unless there is a secret (MOONPOOL_SECRET_FILE); then where its name or MC_TCP_BIND_ADDRESS says;
* calls before `initialize` answer with an error instead of ending the process;
* `rdma` is accepted and said to run over TCP: no program has to change for a machine without RDMA;
* names are found by P2PHANDSHAKE or an HTTP metadata server; a killed engine's name is taken over at once.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from moonpool.errors import ConfigError, MoonpoolError, NotFound, NotRegistered, Overlap
from moonpool.integrations.mooncake_api.engine_names import directory_of
from moonpool.integrations.mooncake_api.engine_node import EngineNode, ops_of
from moonpool.integrations.mooncake_api.engine_types import Read, TransferNotify, TransferOpcode, Write, listen_address
from moonpool.integrations.mooncake_api.memory import MooncakeHostMemAllocator
from moonpool.wire.auth import security_from_environment

log = logging.getLogger(__name__)

_FAILED = -1
_NOT_REGISTERED = -3
_OVERLAPPED = -7
_NO_SOCKET = -102
_NO_METADATA = -200
_DONE, _RUNNING, _TIMED_OUT = 1, 0, -2
_ASYNC_THREADS = 8
_MAX_BATCHES = 65536
"""Asynchronous batches whose status nobody asked for yet."""
_GIB = 1 << 30


_Opcode: TypeAlias = TransferOpcode


class TransferEngine:
    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._node: EngineNode | None = None
        self._timeout_s = max(5, int(os.environ.get("MC_TRANSFER_TIMEOUT") or 30))
        self._memory = MooncakeHostMemAllocator()
        self._lock = threading.Lock()
        self._batches: dict[int, Future[int]] = {}
        self._ids = itertools.count(1)
        self._threads: ThreadPoolExecutor | None = None

    # -- life cycle

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int:
        """0, or -1: name or metadata server not usable."""
        return self._start(local_hostname, metadata_server, protocol)

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str, /
    ) -> int:
        with_type = "://" in metadata_server or metadata_server == "P2PHANDSHAKE" or not metadata_type
        server = metadata_server if with_type else f"{metadata_type}://{metadata_server}"
        return self._start(local_hostname, server, protocol)

    def _start(self, name: str, metadata_server: str, protocol: str) -> int:
        if self._node is not None:
            log.error("the engine is initialized already as %s", self._node.name)
            return _FAILED
        if protocol not in ("tcp", "rdma", ""):
            log.error("protocol %r is not offered here: tcp is", protocol)
            return _FAILED
        if protocol == "rdma":
            log.warning("bytes travel over TCP: Moonpool's engine has no RDMA of its own")
        try:
            security = security_from_environment()
            directory = directory_of(metadata_server, security)
            self._node = EngineNode(name, directory, listen_address(name, security), security)
        except MoonpoolError as e:
            log.error("cannot initialize: %s", str(e))
            return _FAILED
        self._threads = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="engine-async")
        weakref.finalize(self, _stop, self._node, self._threads)
        return 0

    def get_rpc_port(self) -> int:
        return self._node.address.port if self._node else _FAILED

    def get_engine(self) -> TransferEngine:
        """What `MooncakeDistributedStore.setup(engine=…)` takes."""
        return self

    def get_engine_ptr(self) -> int:
        raise NotImplementedError("there is no C++ engine behind this one that a pointer could lead to")

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON; empty, as on any machine without RDMA devices."""
        return "{}"

    def warmup_efa_segment(self, segment_name: str) -> int:
        return 0

    # -- memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """0; -7 overlaps a registered range; -1 empty or no address. The memory must stay until it is unregistered."""
        return self._try(lambda node: node.register(operator.index(buffer_addr), operator.index(capacity)))

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """0; -3 not registered. Transfers under way are over when it returns."""
        return self._try(lambda node: node.unregister(operator.index(buffer_addr)))

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """All of them, or none."""
        if len(buffer_addresses) != len(capacities):
            log.error("%d addresses and %d capacities", len(buffer_addresses), len(capacities))
            return _FAILED
        for i, (address, size) in enumerate(zip(buffer_addresses, capacities, strict=True)):
            if code := self.register_memory(address, size, location):
                for done in buffer_addresses[:i]:
                    self.unregister_memory(done)
                return code
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int], /) -> int:
        """Each of them; the first error's code if any was not registered."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), 0)

    def allocate_managed_buffer(self, length: int, /) -> int:
        """The address of `length` registered bytes; 0 if there are none."""
        address = self._memory.alloc(length) if self._node else 0
        if address and self.register_memory(address, length):
            self._memory.free(address)
            return 0
        return address

    def free_managed_buffer(self, buffer_addr: int, length: int, /) -> int:
        return self.unregister_memory(buffer_addr) or self._memory.free(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: int, src: bytes | str, length: int, /) -> int:
        """0; -1 if `src` has fewer bytes than `length`."""
        data = src.encode() if isinstance(src, str) else src
        if not 0 <= length <= len(data) or dest_address <= 0:
            log.error("cannot write %d of %d bytes at %#x", length, len(data), dest_address)
            return _FAILED
        ctypes.memmove(dest_address, data, length)
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int, /) -> bytes:
        return ctypes.string_at(source_address, length)

    def get_first_buffer_address(self, segment_name: str, /) -> int:
        """Of the region that `segment_name` registered first; 0 if it has none or does not answer."""
        try:
            regions = self._checked().describe(segment_name)
        except MoonpoolError as e:
            log.warning("%s", str(e))
            return 0
        return regions[0][0] if regions else 0

    # -- transfers

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], Read)

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """0 when every byte has arrived, else -1."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """An id for the status calls; 0 if the target cannot be reached."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def transfer_check_status(self, batch_id: int, /) -> int:
        """1 done, 0 running, -1 failed (or no such batch), -2 timed out. The id ends with any answer but 0."""
        with self._lock:
            future = self._batches.get(batch_id)
            if future is None:
                return _FAILED
            if not future.done():
                return _RUNNING
            del self._batches[batch_id]
        return future.result() or _DONE

    def get_batch_transfer_status(self, batch_ids: Sequence[int], /) -> int:
        """Wait for all. 0 if all are done, else -1. The ids end here."""
        with self._lock:
            futures = [self._batches.pop(id_, None) for id_ in batch_ids]
        codes = [_FAILED if future is None else future.result() for future in futures]
        return _FAILED if any(codes) else 0

    # -- peers

    def get_notifies(self) -> list[TransferNotify]:
        """What peers sent along with their transfers since the last call."""
        found: list[TransferNotify] = []
        while self._node and self._node.notes:
            found.append(TransferNotify(*self._node.notes.popleft()))
        return found

    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer answers; -200 if nobody knows it, -102 if it does not answer."""
        try:
            self._checked().describe(peer_server_name)
        except (NotFound, ConfigError) as e:
            log.warning("probe: %s", str(e))
            return _NO_METADATA
        except MoonpoolError as e:
            log.warning("probe: %s", str(e))
            return _NO_SOCKET
        return 0

    # -- how

    def _checked(self) -> EngineNode:
        if self._node is None:
            raise ConfigError("the engine is not initialized", fix="Call initialize first.")
        return self._node

    def _try(self, call: Callable[[EngineNode], None]) -> int:
        try:
            call(self._checked())
        except MoonpoolError as e:
            log.error("%s", str(e))
            return (
                _OVERLAPPED if isinstance(e, Overlap) else _NOT_REGISTERED if isinstance(e, NotRegistered) else _FAILED
            )
        return 0

    def _sync(
        self,
        target: str,
        buffers: Sequence[int],
        peers: Sequence[int],
        sizes: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
    ) -> int:
        try:
            node = self._checked()
        except MoonpoolError as e:
            log.error("%s", str(e))
            return _FAILED
        return _transfer(node, self._timeout_s, target, buffers, peers, sizes, opcode, notify)

    def _submit(
        self, target: str, buffers: Sequence[int], peers: Sequence[int], sizes: Sequence[int], opcode: _Opcode
    ) -> int:
        try:
            node = self._checked()
            if not node.knows(target):
                node.describe(target)  # who cannot be reached is said now
        except MoonpoolError as e:
            log.error("cannot submit to %s: %s", target, str(e))
            return 0
        assert self._threads is not None
        with self._lock:
            if len(self._batches) >= _MAX_BATCHES:
                log.error("%d batches wait for somebody to ask for their status", _MAX_BATCHES)
                return 0
            id_ = next(self._ids)
            self._batches[id_] = self._threads.submit(
                _transfer, node, self._timeout_s, target, buffers, peers, sizes, opcode, None
            )
        return id_


def _transfer(
    node: EngineNode,
    timeout_s: float,
    target: str,
    buffers: Sequence[int],
    peers: Sequence[int],
    sizes: Sequence[int],
    opcode: TransferOpcode,
    notify: TransferNotify | None,
) -> int:
    """Does not know the engine, which may end while this runs in a thread of its."""
    try:
        ops = ops_of("write" if opcode == Write else "read", buffers, peers, sizes)
        node.transfer(target, ops, timeout_s + sum(sizes) / _GIB)
        if notify is not None:
            node.notify(target, notify.name, notify.msg)
    except (MoonpoolError, ValueError) as e:
        log.error("transfer with %s failed: %s", target, str(e))
        return _FAILED
    return 0


def _stop(node: EngineNode, threads: ThreadPoolExecutor) -> None:
    node.close()
    threads.shutdown()
