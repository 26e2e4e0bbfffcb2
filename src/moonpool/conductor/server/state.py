"""The whole picture at one moment, for the dashboard and for scripts: `GET /debug/state`."""

from __future__ import annotations

from typing import Any

from moonpool.conductor.service import Conductor


def state(c: Conductor) -> dict[str, Any]:
    now = c.clock()
    ttfts = sorted(t for _, t in c.ttfts[-1000:])
    return {
        "policy": c.config.policy,
        "admission": f"{c.config.admission.gate} · {c.config.admission.test}",
        "slo": {"ttft_s": c.config.slo.ttft_s, "tbt_s": c.config.slo.tbt_s},
        "instances": [_instance(c, i, now) for i in c.registry],
        "models": {name: _model(m) for name, m in c.models.items()},
        "outcomes": dict(c.outcomes),
        "hit_rate": c.cached_tokens / c.prompt_tokens if c.prompt_tokens else None,
        "converted_rate": c.converted_tokens / c.prompt_tokens if c.prompt_tokens else None,
        "saved_prefill_s": c.saved_prefill_s,
        "ttft": {
            "count": len(ttfts),
            "p50_s": _at(ttfts, 0.5),
            "p90_s": _at(ttfts, 0.9),
            "p99_s": _at(ttfts, 0.99),
            "within_slo": sum(t <= c.config.slo.ttft_s for t in ttfts) / len(ttfts) if ttfts else None,
            "last": [round(t, 4) for _, t in c.ttfts[-120:]],
        },
        "decisions": [_decision(d) for d in reversed(c.decisions(last=15))],
    }


def _instance(c: Conductor, i: Any, now: float) -> dict[str, Any]:
    model = c.model(i.entry.model)
    ledger, feed = model.cluster.ledger, c.feeds.get(i.id)
    member = model.cluster.members.get(i.id)
    return {
        "id": i.id,
        "model": i.entry.model,
        "roles": list(i.entry.roles),
        "state": i.state,
        "why": i.why,
        "breaker": i.breaker.state(now),
        "in_flight": i.in_flight,
        "queue_s": ledger.queue_s(i.id, now),
        "queued": ledger.queued(i.id),
        "batch": ledger.batch(i.id),
        "context": ledger.context(i.id),
        "capacity": i.entry.decode_tokens,
        "correction": member.correction.factor if member else None,
        "events": ("exact" if feed.exact else "not exact") if feed else "none: what is sent there counts",
        "alarm": feed.alarm if feed else "",
    }


def _model(m: Any) -> dict[str, Any]:
    index = m.cluster.index
    return {
        "leases": len(m.cluster.ledger),
        "blocks": index.blocks,
        "index_bytes": index.nbytes,
        "executor": type(m.executor).__name__,
    }


def _decision(d: Any) -> dict[str, Any]:
    if d.plan is None:
        return {"id": d.id, "tokens": d.tokens, "refused": d.refusal.why if d.refusal else ""}
    p = d.plan
    return {
        "id": d.id,
        "tokens": d.tokens,
        "prefill": p.prefill,
        "decode": p.decode,
        "cached": p.cached_tokens,
        "ttft_s": p.predicted.ttft_s,
        "why": p.why,
    }


def _at(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
