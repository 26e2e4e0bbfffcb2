"""Figures of the Mooncake papers that the published traces allow to compare with. F: FAST 2025, A: arXiv 2407.00079.

Curves and bars were read from the papers' drawings, to about one percent of the axis.
"""

from __future__ import annotations

CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)
"""Of table 1 (A), in blocks; None has no end."""
TABLE_1 = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length_aware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}
"""A, on a trace of its own."""

FIG_9_TOKENS = (
    10_000,
    100_000,
    1_000_000,
    2_000_000,
    4_000_000,
    5_000_000,
    8_000_000,
    10_000_000,
    50_000_000,
    100_000_000,
)
FIG_9 = {
    "conversation": (0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401),
    "synthetic": (0.0005, 0.012, 0.146, 0.235, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658),
}

FIG_5 = {
    "random": (19.65, 3.53, 13.73, 29.29),
    "least_requests": (5.27, 1.05, 3.55, 7.40),
    "local": (3.58, 0.56, 2.16, 5.12),
    "kvcache": (3.07, 0.39, 1.72, 4.14),
}
"""F, conversation: mean, first quartile, median, third quartile of TTFT in s."""

FIG_10 = {
    "conversation": {"local": (0.1693, 1.380), "kvcache": (0.3748, 1.051)},
    "synthetic": {"local": (0.2640, 1.498), "kvcache": (0.6219, 0.783)},
}
"""F, 10 prefill nodes: hit rate, node seconds of prefill for each request."""

FIG_8 = {
    "conversation": {"mooncake": 1.062, "vllm": 1.656},
    "synthetic": {"mooncake": 0.732, "vllm": 2.017},
}

TBT_WITHIN = {
    "conversation": {50: 0.033, 100: 0.966, 200: 0.999, 300: 1.0, 500: 1.0, 1000: 1.0},
    "synthetic": {50: 0.830, 100: 0.996, 200: 1.0, 300: 1.0, 500: 1.0, 1000: 1.0},
}
"""F, figures 1 and 7: share of requests within so many ms."""

FIG_11_RANKS = (10, 100, 1000)
FIG_11 = {"conversation": (8, 7, 6), "synthetic": (5, 5, 5)}
"""Most replicas of the block of that rank on 8 nodes."""

FIG_13 = {
    24: (4.80, 3.656),
    40: (2.11, 1.140),
    80: (1.44, 0.517),
    100: (1.31, 0.410),
    160: (1.12, 0.257),
    320: (0.96, 0.132),
    463: (0.94, 0.099),
}
"""F, synthetic, by NIC rate in Gb/s: mean TTFT and transfer time in s."""

FIG_15 = {(8, 8): 0.985, (5, 11): 0.77, (11, 5): 0.85}
"""F, synthetic, prefill and decode nodes: share of requests within TTFT 10 s and TBT 100 ms."""

TABLE_3 = {"baseline": 4183, "early": 3771, "predict": 3589}
"""A: refused requests of about 23 000 on 8+8 nodes at twice the speed, on a trace that was published apart."""
