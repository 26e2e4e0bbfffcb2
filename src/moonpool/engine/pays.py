"""Whether a plan's converted pages are worth taking. Pure; the prices come from `c2c.cost`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.c2c.cost import Decision, PairCost
from moonpool.engine.plan import Kind, PrefixPlan


@dataclass(frozen=True, slots=True)
class Offer:
    """A converted page that could be taken: made by the bundle with this digest, now (`on_load`) or before."""

    bundle: str
    on_load: bool


class Payoff:
    """The cost model of one target. Immutable."""

    def __init__(self, costs: Mapping[str, PairCost], page_size: int) -> None:
        """`costs` by bundle digest. Pages of a bundle that is missing here are always taken."""
        self._costs, self._page_size = dict(costs), page_size

    def judge(self, plan: PrefixPlan, offers: Sequence[Offer | None]) -> Decision | None:
        """Of all that the plan loads from its first converted page on, for without that page the rest is of no use: native
        pages behind it are a part of its price and of its worth. None: the model has no say.

        `offers[i]` describes page i where it is a converted one.
        """
        pages = plan.loaded_pages
        first = next((at for at, (_, kind) in enumerate(pages) if kind is Kind.CONVERTED), len(pages))
        taken = [offers[i] if kind is Kind.CONVERTED else None for i, kind in pages[first:]]
        costs = [self._costs.get(o.bundle) for o in taken if o is not None]
        if not costs or (cost := costs[0]) is None or None in costs:
            return None
        load = self._page_size * sum(self._token_s(cost, offer) for offer in taken)
        return cost.judge(pages[first][0] * self._page_size, (pages[-1][0] + 1) * self._page_size, load)

    def _token_s(self, native: PairCost, offer: Offer | None) -> float:
        if offer is None:
            return native.fetch_target_s
        cost = self._costs[offer.bundle]
        return cost.on_load_s if offer.on_load else cost.ahead_s
