"""What Prometheus and probes do to a node, for tests: requests, samples."""

import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nodes import NodeProcess
from patience import scaled

ANSWER_SECONDS = scaled(10.0)


def address_of(node: NodeProcess) -> tuple[str, int]:
    url = node.settings.http_listen
    assert url is not None
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def get(
    node: NodeProcess, path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text."""
    url = f"{node.settings.http_listen}{path}"
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), refused.read().decode()


def families(node: NodeProcess, headers: Mapping[str, str] | None = None) -> dict[str, Metric]:
    """What the node's page says, by the name in its TYPE line."""
    status, _, text = get(node, "/metrics", headers)
    assert status == 200, text
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(node: NodeProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every number on the page, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families(node).values()
        for sample in family.samples
    }


def number(node: NodeProcess, name: str, **labels: str) -> float:
    return samples(node)[f"lookup_buffer_{name}", frozenset(labels.items())]
