"""The dashboard for tests: in a real browser, and as its stream by a bare socket."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from browser import Browser, Tab, chromium_executable
from nodes import NodeProcess
from observing import ANSWER_SECONDS, address_of

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


def number(text: str) -> int:
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
