"""Makes `sample_trace.jsonl`: a small trace in the published format, of dialogues that somebody might have had."""

from __future__ import annotations

import json
import random
from pathlib import Path

BLOCK = 512
DIALOGUES = 40
_SECONDS = 600


def sample(seed: int = 7) -> list[dict[str, object]]:
    """Dialogues that share a first block; each turn has all that was said before."""
    rng = random.Random(seed)
    requests: list[dict[str, object]] = []
    fresh = iter(range(1, 1_000_000))
    for _ in range(DIALOGUES):
        at = rng.uniform(0, _SECONDS)
        tokens = int(rng.lognormvariate(8, 1)) + 600
        ids = [0]
        for _ in range(1 + int(rng.expovariate(0.7))):
            full = tokens // BLOCK
            ids = [*ids[:full], *(next(fresh) for _ in range(full - len(ids)))]
            partial = [next(fresh)] if tokens % BLOCK else []
            output = rng.randint(20, 600)
            line = {"timestamp": int(at * 1000) // 3000 * 3000, "input_length": tokens, "output_length": output}
            requests.append({**line, "hash_ids": [*ids, *partial]})
            tokens += output + rng.randint(10, 300)
            at += rng.uniform(30, 120)
    requests.sort(key=lambda r: int(str(r["timestamp"])))
    return requests


if __name__ == "__main__":
    target = Path(__file__).with_name("sample_trace.jsonl")
    target.write_text("".join(json.dumps(line) + "\n" for line in sample()))
