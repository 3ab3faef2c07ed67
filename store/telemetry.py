"""redis-py's OpenTelemetry metrics of a node's connections to its store.

redis-py records how many connections a pool has, how long they take to make, why they end, and
errors. It records the times of commands in its `Redis` clients only, which are not used here.
"""

from typing import TYPE_CHECKING, Final

from store.errors import StoreError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

SERVICE: Final = "lookup-buffer"
CLOSE_SECONDS: Final = 2.0
_MISSING: Final = "pip install 'lookup-buffer[otel]'"


class Telemetry:
    """Off until `start`, which starts a thread of OpenTelemetry's that exports.

    A meter provider that the process already has is used, as `opentelemetry-instrument` sets one.
    Otherwise metrics go to the OTLP collector that OpenTelemetry's variables name, such as
    OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self, node: str) -> None:
        """Raises StoreError: the packages are missing, or redis-py is too old."""
        try:
            import redis.observability
            from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: F401
            from opentelemetry.sdk import metrics  # noqa: F401
        except ImportError as error:
            raise StoreError(f"{error.name or error} is not installed: {_MISSING}") from error
        self._node = node
        self._redis = redis.observability
        self._own: MeterProvider | None = None

    def start(self) -> None:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider

        if not isinstance(metrics.get_meter_provider(), MeterProvider):
            self._own = self._make_provider()
            metrics.set_meter_provider(self._own)
        groups = self._redis.MetricGroup
        self._redis.get_observability_instance().init(
            self._redis.OTelConfig(
                metric_groups=[
                    groups.RESILIENCY,
                    groups.CONNECTION_BASIC,
                    groups.CONNECTION_ADVANCED,
                ]
            )
        )

    def close(self) -> None:
        """Export what was recorded last, in up to CLOSE_SECONDS. Idempotent."""
        own, self._own = self._own, None
        if own is not None:  # else it belongs to the process, which exports at its end
            own.shutdown(timeout_millis=CLOSE_SECONDS * 1000)
            self._redis.get_observability_instance().shutdown()  # it records nothing more

    def _make_provider(self) -> "MeterProvider":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        own = Resource({"service.name": SERVICE, "service.instance.id": self._node})
        resource = own.merge(OTELResourceDetector().detect())
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        return MeterProvider(metric_readers=[reader], resource=resource)
