"""The page `/metrics`, made with prometheus-client of what the node answers.

The metrics of the node's process (memory, processor time, files) are the library's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from lookup_buffer.dashboard.metrics import BUILD_INFO, BUILD_LABELS, FAMILIES, HISTOGRAMS, PREFIX
from lookup_buffer.dashboard.node import NodeState
from lookup_buffer.environment import distribution_version
from lookup_buffer.node.counters import BOUNDS_SECONDS
from lookup_buffer.protocol.auth import PROTOCOL_VERSION

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
_UPPER_BOUNDS = (*(str(bound) for bound in BOUNDS_SECONDS), "+Inf")


class Exposition:
    """Of one node; `node_pid` is its process."""

    def __init__(self, node: str, node_pid: int) -> None:
        self._build = (node, distribution_version(), str(PROTOCOL_VERSION))
        self._process = ProcessCollector(pid=lambda: node_pid, registry=None)

    def text(self, state: NodeState, accept: str) -> tuple[bytes, str]:
        """The page and its content type, for the header `Accept`."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version in it that the library cannot compare
            encode, content_type = choose_encoder("")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Metrics([*self._metrics(state), *self._process.collect()]))
        return encode(registry), content_type

    def _metrics(self, state: NodeState) -> Iterator[Metric]:
        for family in FAMILIES:
            metric = _KINDS[family.kind](PREFIX + family.name, family.text, labels=family.labels)
            for labels, name in family.series.items():
                metric.add_metric(labels, state.values.get(name, 0))
            yield metric
        for name, text in HISTOGRAMS.items():
            counts, sum_seconds = state.histograms[name]
            histogram = HistogramMetricFamily(PREFIX + name, text)
            histogram.add_metric([], list(zip(_UPPER_BOUNDS, counts, strict=True)), sum_seconds)
            yield histogram
        name, text = BUILD_INFO
        build = GaugeMetricFamily(PREFIX + name, text, labels=BUILD_LABELS)
        build.add_metric(self._build, 1)
        yield build


@dataclass(frozen=True, eq=False)
class _Metrics(Collector):
    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics
