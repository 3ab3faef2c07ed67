"""The page `/metrics`, made with prometheus-client. Imported at its first request, since that takes
50 ms.

Called by `http_pages` on `lb-http`. The metrics of the process itself (memory, processor time,
files) are the library's own.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from lookup_buffer.environment import distribution_version
from lookup_buffer.node.counters import BOUNDS_SECONDS
from lookup_buffer.node.http_page import Page, Request
from lookup_buffer.node.metrics import BUILD_INFO, BUILD_LABELS, FAMILIES, HISTOGRAMS, PREFIX
from lookup_buffer.node.vitals import Vitals
from lookup_buffer.protocol.auth import PROTOCOL_VERSION

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
_UPPER_BOUNDS = (*(str(bound) for bound in BOUNDS_SECONDS), "+Inf")


class Exposition(Collector):
    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._build = (vitals.identity.node, distribution_version(), str(PROTOCOL_VERSION))
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self, request: Request) -> Page:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Page(200, encode(self._registry), content_type)

    def collect(self) -> Iterator[Metric]:
        counters = self._vitals.counters
        values = {**counters.totals(), **self._vitals.gauges()}
        for family in FAMILIES:
            metric = _KINDS[family.kind](PREFIX + family.name, family.text, labels=family.labels)
            for labels, name in family.series.items():
                metric.add_metric(labels, values.get(name, 0))
            yield metric
        for name, text in HISTOGRAMS.items():
            counts, sum_seconds = getattr(counters, name).read()
            histogram = HistogramMetricFamily(PREFIX + name, text)
            histogram.add_metric([], list(zip(_UPPER_BOUNDS, counts, strict=True)), sum_seconds)
            yield histogram
        name, text = BUILD_INFO
        build = GaugeMetricFamily(PREFIX + name, text, labels=BUILD_LABELS)
        build.add_metric(self._build, 1)
        yield build
