"""For instances that prefill and decode themselves: whoever prefills a request decodes it.

A fleet is disaggregated where some instance has one role alone; then the policy's own pair stands.
"""

from __future__ import annotations

from msgspec.structs import replace

from moonpool.conductor.cluster import Cluster
from moonpool.conductor.types import ClusterView, Plan, Policy, Refusal, Request


class Coupled:
    def __init__(self, policy: Policy, cluster: Cluster) -> None:
        self._policy, self._cluster = policy, cluster
        self.name = policy.name

    def plan(self, request: Request, view: ClusterView) -> Plan | Refusal:
        plan = self._policy.plan(request, view)
        if isinstance(plan, Refusal) or plan.prefill == plan.decode:
            return plan
        if any(m.prefill != m.decode for m in self._cluster.members.values()):
            return plan
        predicted = replace(plan.predicted, tbt_s=view.tbt_s(plan.prefill, request))
        return replace(plan, decode=plan.prefill, predicted=predicted)
