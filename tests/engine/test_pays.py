"""Whether a plan's converted pages are worth taking, page by page."""

from __future__ import annotations

import msgspec

from moonpool.c2c.cost import PairCost
from moonpool.engine.pays import Offer, Payoff
from moonpool.engine.plan import Kind, plan_prefix
from tests.c2c.support import spec

N, C = Kind.NATIVE, Kind.CONVERTED
P = 4
TARGET = msgspec.structs.replace(spec("target"), intermediate=64)


def cost(*, ahead: float, on_load: float, overhead: float = 0.0, min_tokens: int = 0) -> PairCost:
    """Prices as a share of the target's own prefill of a token at the start."""
    base = PairCost(
        target=TARGET, prefill_rate=1e9, convert_s=0, fetch_source_s=0, fetch_target_s=0, overhead_s=0, min_tokens=min_tokens
    )  # fmt: skip
    token = base.prefill_s(0, 1)
    return PairCost(
        target=TARGET,
        prefill_rate=1e9,
        convert_s=on_load * token,
        fetch_source_s=0.0,
        fetch_target_s=ahead * token,
        overhead_s=overhead * token,
        min_tokens=min_tokens,
    )


def judge(payoff: Payoff, kinds: list[Kind | None], offers: list[Offer | None]) -> str:
    found = payoff.judge(plan_prefix(len(kinds) * P + 1, P, kinds), offers)
    return found.reason if found else ""


def test_only_converted_pages_are_judged() -> None:
    payoff = Payoff({"x": cost(ahead=9, on_load=9)}, P)
    assert judge(payoff, [N, N, N], [None] * 3) == ""
    assert judge(payoff, [None] * 3, [None] * 3) == ""
    assert judge(payoff, [N, C, C, N], [None, Offer("x", False), Offer("x", False), None]) == "too_slow"


def test_each_page_has_the_price_of_its_own_way() -> None:
    payoff = Payoff({"x": cost(ahead=0.1, on_load=2.0)}, P)
    ahead, now = Offer("x", False), Offer("x", True)
    assert judge(payoff, [N, C, C, N], [None, ahead, ahead, None]) == "pays"
    assert judge(payoff, [N, C, C, N], [None, now, now, None]) == "too_slow"
    mixed: list[Offer | None] = [None, *[ahead] * 6, now, None]
    assert judge(payoff, [N, *[C] * 7, N], mixed) == "pays", "six cheap pages carry a dear one"


def test_native_pages_behind_a_converted_one_count_on_both_sides() -> None:
    payoff = Payoff({"x": cost(ahead=0.1, on_load=2.0, min_tokens=5 * P)}, P)
    now = Offer("x", True)
    assert judge(payoff, [N, C, N, N, N, N], [None, now, *[None] * 4]) == "pays", (
        "without page 1 the others are lost too"
    )
    assert judge(payoff, [N, C, N, N], [None, now, None, None]) == "too_short"


def test_the_overhead_makes_short_prefixes_too_short() -> None:
    payoff = Payoff({"x": cost(ahead=0.1, on_load=0.1, overhead=8 * P)}, P)
    found = {n: judge(payoff, [N, *[C] * n, N], [None, *[Offer("x", False)] * n, None]) for n in (4, 40)}
    assert found == {4: "too_short", 40: "pays"}


def test_a_bundle_without_a_price_is_always_taken() -> None:
    payoff = Payoff({"x": cost(ahead=9, on_load=9)}, P)
    assert judge(payoff, [N, C, C, N], [None, Offer("y", False), Offer("y", False), None]) == ""
    assert judge(payoff, [N, C, C, N], [None, Offer("x", False), Offer("y", False), None]) == ""
