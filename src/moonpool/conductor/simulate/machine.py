"""What the simulated machines can do. Table 1 of the Mooncake paper: LLaMA3-70B on nodes of 8 A800, prefill at 60 % of peak."""

from __future__ import annotations

import msgspec

_LAYERS, _HIDDEN, _GQA, _BYTES = 80, 8192, 8, 2
_ATTENTION, _LINEAR = 4, 22
"""FLOPs: layers · (attention · n² · hidden + linear · n · hidden²)."""
_NODE_FLOPS = 8 * 312e12


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node, be it for prefill or for decode."""

    cache_tokens: int = 3_000_000
    """That a prefill node's cache holds."""
    nic_bytes_s: float = 40e9
    mfu: float = 0.6
    step_s: float = 0.0125
    """Of a decode step besides what follows."""
    step_request_s: float = 0.00015
    memory_bytes_s: float = 9.6e12
    """At which a decode step reads the KV of its batch."""
    decode_tokens: int = 1_500_000
    """KV that a decode node holds: what the weights leave of 640 GB."""
    event_delay_s: float = 0.0
    """Until the conductor knows what a cache took in or let go."""

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return _LAYERS * 2 * _HIDDEN // _GQA * _BYTES

    def prefill_s(self, tokens: int, cached: int) -> float:
        """Of a prompt whose first `cached` tokens are there."""
        new, square = tokens - cached, tokens**2 - cached**2
        flops = _LAYERS * (_ATTENTION * _HIDDEN * square + _LINEAR * _HIDDEN**2 * new)
        return flops / (_NODE_FLOPS * self.mfu)

    def transfer_s(self, tokens: int) -> float:
        """Of the KV of `tokens` on an idle NIC."""
        return tokens * self.kv_bytes / self.nic_bytes_s

    def decode_step_s(self, batch: int, tokens: float) -> float:
        """`tokens`: context of all requests of the batch."""
        return self.step_s + self.step_request_s * batch + tokens * self.kv_bytes / self.memory_bytes_s
