"""The Grafana dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from moonpool.conductor.config import ConductorConfig
from moonpool.conductor.metrics import ConductorMetrics
from moonpool.conductor.service import Conductor

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "conductor.json"


def test_every_metric_of_the_dashboard_is_one_of_ours() -> None:
    registry = CollectorRegistry()
    registry.register(ConductorMetrics(Conductor(ConductorConfig())))
    ours = set(re.findall(r"# TYPE (\w+)", generate_latest(registry).decode()))
    panels = json.loads(FILE.read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"moonpool_\w+", t["expr"])}
    assert asked
    assert asked <= ours
