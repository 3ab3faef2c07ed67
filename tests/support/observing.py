"""What Prometheus, probes and people at the dashboard do to a node, for tests."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from browser import Browser, Tab, chromium_executable
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


LIVE = "document.getElementById('status').dataset.state == 'live'"


@pytest.fixture
def browser() -> Iterator[Browser]:
    browser = Browser(chromium_executable())
    yield browser
    browser.close()


@contextmanager
def dashboard(browser: Browser, node: NodeProcess, *, live: bool = True) -> Iterator[Tab]:
    """The node's page, once it shows something; nobody has complained in its console."""
    tab = browser.open(f"{node.settings.http_listen}/")
    if live:
        tab.wait_for(f"{LIVE} && document.getElementById('rate').textContent != '–' || {LIVE}")
    yield tab
    assert tab.errors() == []
    tab.close()


def number_shown(text: str) -> int:
    """Of `1,234` or `1,234 in all`."""
    return int(text.split()[0].replace(",", ""))


class Stream:
    """The events of a node's dashboard, as they come."""

    def __init__(self, node: NodeProcess, *headers: str, path: str = "/dashboard/stream") -> None:
        self.socket = socket.create_connection(address_of(node), timeout=3 * ANSWER_SECONDS)
        lines = (f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")
        self.socket.sendall("\r\n".join(lines).encode())
        self._unread = b""
        self.head = self._until(b"\r\n\r\n").decode()

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    def event(self, *kinds: str) -> Any:
        """The value of the next event, or the next of one of these kinds."""
        while True:
            kind, _, data = self._chunk().partition(b"\ndata: ")
            name = kind.removeprefix(b"event: ").decode()
            if data and (not kinds or name in kinds):
                return json.loads(data)

    def _chunk(self) -> bytes:
        length = int(self._until(b"\r\n"), 16)
        while len(self._unread) < length + 2:
            self._receive()
        chunk, self._unread = self._unread[:length], self._unread[length + 2 :]
        return chunk.rstrip(b"\n")

    def _until(self, end: bytes) -> bytes:
        while end not in self._unread:
            self._receive()
        found, _, self._unread = self._unread.partition(end)
        return found

    def _receive(self) -> None:
        part = self.socket.recv(65536)
        if not part:
            raise EOFError(self._unread)
        self._unread += part

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
