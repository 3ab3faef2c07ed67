"""redis-py's OpenTelemetry metrics of a node, as a collector gets them."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from command_line import assert_refused, run
from nodes import NodeProcess, StartNode, key, wait_until, with_store
from store import EmbeddedServer


class Collector:
    """An OTLP collector. `metrics` are the names of what it got, `resource` says of whom."""

    def __init__(self) -> None:
        self.metrics: set[str] = set()
        self.resource: dict[str, str] = {}
        self._server = HTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )

        request: Any = ExportMetricsServiceRequest.FromString(body)
        for one in request.resource_metrics:
            self.resource = {a.key: a.value.string_value for a in one.resource.attributes}
            self.metrics |= {metric.name for scope in one.scope_metrics for metric in scope.metrics}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/metrics"
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        return Handler


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def to_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Collector:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=of-the-test")
    return collector


def used(node: NodeProcess) -> None:
    with_store(node)
    with node.client() as client:
        assert client.has_caches([key()], timeout=10.0) == [False]


def test_a_node_exports_what_redis_py_records(
    to_collector: Collector, valkey_server: EmbeddedServer, start_node: StartNode
) -> None:
    node = start_node(store_opentelemetry=True)
    used(node)
    wait_until(lambda: "db.client.connection.count" in to_collector.metrics, 10.0)
    assert to_collector.resource["service.name"] == "lookup-buffer"
    assert to_collector.resource["service.instance.id"] == node.node_id
    assert to_collector.resource["host.name"] == "of-the-test"
    assert node.terminate() == 0
    assert to_collector.metrics >= {
        "db.client.connection.count",
        "db.client.connection.create_time",
        "redis.client.connection.closed",
    }
    assert "db.client.operation.duration" not in to_collector.metrics


def test_it_is_off_by_default(to_collector: Collector, start_node: StartNode) -> None:
    node = start_node()
    used(node)
    assert node.terminate() == 0
    assert not to_collector.metrics


def test_a_collector_that_is_down_delays_no_end(
    to_collector: Collector, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    node = start_node(store_opentelemetry=True)
    used(node)
    assert node.terminate() == 0, "later it would be killed"


@pytest.mark.processes
def test_without_the_packages_a_node_does_not_start(
    valkey_server: EmbeddedServer, tmp_path: Path
) -> None:
    hiding = tmp_path / "opentelemetry"  # a package, with nothing in it
    hiding.mkdir()
    (hiding / "__init__.py").touch()
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = run(
        *("serve", "--store-opentelemetry", "--store-url", valkey_server.url),
        *("--directory", str(tmp_path / "d")),
        PYTHONPATH=paths,
    )
    assert_refused(done, 2, "'store_opentelemetry'", "pip install 'lookup-buffer[otel]'")
