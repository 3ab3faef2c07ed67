"""The counters as vLLM's Prometheus metrics: complete, bounded, and named by the conventions."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

pytest.importorskip("vllm")

from connectors.counters import REASONS_MAX
from connectors.ec.connector import LookupBufferECConnector
from connectors.ec.stats import FAMILIES, EcPromMetrics
from connectors.kv.stats import FAMILIES as KV_FAMILIES

CONNECTORS = Path(__file__).resolve().parents[2] / "connectors"
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}


class Metrics:
    """The metrics as vLLM's API server makes them, on a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)
        }
        made = LookupBufferECConnector.build_prom_metrics(
            SimpleNamespace(ec_transfer_config=None), types, ["model_name", "engine"], ENGINES
        )
        assert isinstance(made, EcPromMetrics)
        self.metrics = made

    def value(self, name: str, engine: str = "0", **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"vllm:lookup_buffer_ec_{name}_total",
            {"model_name": "model", "engine": engine, **labels},
        )


def test_counts_are_added_to_their_engine() -> None:
    metrics = Metrics()
    metrics.metrics.observe({"load_remote": 2, "loaded_remote_bytes": 1 << 20, "miss:absent": 3}, 1)
    metrics.metrics.observe({"load_remote": 1, "over_budget": 4, "saved": 5}, 1)
    metrics.metrics.observe({"unavailable:claimed": 6}, 1)
    assert metrics.value("loads", "1", source="remote") == 3
    assert metrics.value("loaded_bytes", "1", source="remote") == 1 << 20
    assert metrics.value("misses", "1", reason="absent") == 3
    assert metrics.value("prefetches_over_budget", "1") == 4
    assert metrics.value("saves", "1", outcome="stored") == 5
    assert metrics.value("unavailable_requests", "1", reason="claimed") == 6
    assert metrics.value("loads", "0", source="remote") == 0


def test_series_with_known_labels_begin_at_zero() -> None:
    metrics = Metrics()
    assert metrics.value("loads", source="local") == 0
    assert metrics.value("encodes_skipped") == 0
    assert metrics.value("broken_promises", outcome="lost") == 0
    assert metrics.value("misses", reason="absent") is None, "reasons are not known in advance"


def test_the_number_of_series_per_reason_is_bounded() -> None:
    metrics = Metrics()
    for number in range(10 * REASONS_MAX):
        metrics.metrics.observe({f"miss:reason{number}": 1})
    assert generate_latest(metrics.registry).count(b"misses_total{") == REASONS_MAX + 1
    assert metrics.value("misses", reason="other") == 9 * REASONS_MAX
    assert metrics.value("misses", reason="reason0") == 1


def test_an_unknown_event_is_ignored() -> None:
    metrics = Metrics()
    before = generate_latest(metrics.registry)
    metrics.metrics.observe({"from_the_future": 1, "from_the_future:reason": 1})
    assert generate_latest(metrics.registry) == before


@pytest.mark.parametrize("ours", [("kv", KV_FAMILIES), ("ec", FAMILIES)])
def test_every_counted_event_has_a_metric(ours: tuple[str, Any]) -> None:
    """Events of the connector's own modules, and of the modules that both connectors use."""
    folder, families = ours
    paths = [*CONNECTORS.glob("*.py"), *CONNECTORS.glob(f"{folder}/*.py")]
    text = "".join(path.read_text() for path in paths)
    counted = {
        re.sub(r"{\w+(\.\w+)?}", where, name.partition(":")[0])
        for name in re.findall(r'counters\.add\(\s*f?"([^"]+)"', text)
        for where in ("local", "remote")
    }
    counted |= set(re.findall(r'counters\.add\(\s*"(\w+)" if .* else', text))
    counted |= set(re.findall(r'counters\.add\(\s*"\w+" if .* else "(\w+)"', text))
    assert len(counted) > 10
    assert counted - {event for family in families for event in family.events} == set()


def test_names_follow_the_conventions() -> None:
    for family in (*FAMILIES, *KV_FAMILIES):
        assert re.fullmatch(r"vllm:lookup_buffer_(ec|kv)_[a-z_]+", family.name)
        assert not family.name.endswith("_total"), "the client library appends it"
        assert family.text.endswith(".")
        assert family.label or len(family.events) == 1
