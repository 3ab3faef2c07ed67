"""Browsers, Prometheus and probes for tests: what they ask a node and its dashboard.

`Browser` is a real headless Chromium, driven by the DevTools protocol over a pipe. It needs no port
and no driver: requests go to its descriptor 3 as JSON that ends in a NUL, replies come from
descriptor 4. One thread writes and reads.
"""

import asyncio
import base64
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from lookup_buffer.dashboard.app import make_app
from lookup_buffer.dashboard.exposition import Exposition
from lookup_buffer.dashboard.feed import Feed
from lookup_buffer.dashboard.http import server_of
from lookup_buffer.dashboard.main import run
from lookup_buffer.dashboard.node import NodeView
from nodes import NodeProcess
from patience import scaled

CALL_SECONDS = scaled(30.0)
END_SECONDS = scaled(15.0)
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu",
    "--disable-breakpad", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--mute-audio",
    "--no-default-browser-check", "--no-proxy-server", "--hide-scrollbars",
)  # fmt: skip
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


def chromium_executable() -> str:
    """The path of a real Chromium; skips the test where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on the PATH (make system-packages installs one)")
    return found


class NoAnswer(Exception):
    """Of the browser, in time."""


class Browser:
    def __init__(self, executable: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="lbb-")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # The sandbox wants rights that containers do not give; pages are our own.
        command = [executable, *FLAGS, "--no-sandbox", f"--user-data-dir={self._profile}"]
        pipes = f"3</proc/self/fd/{theirs_in} 4>/proc/self/fd/{theirs_out}"
        self._process = subprocess.Popen(
            ["sh", "-c", f'exec "$0" "$@" {pipes}', *command, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, ours_in
        self._unread = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def call(
        self, method: str, session: str = "", seconds: float = CALL_SECONDS, **parameters: Any
    ) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if session:
            asked["sessionId"] = session
        data = json.dumps(asked).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + seconds
        while self._number not in self._answers:
            self._read(deadline - time.monotonic())
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, seconds: float) -> None:
        readable, _, _ = select.select([self._in], [], [], max(0.0, seconds))
        if not readable:
            raise NoAnswer("the browser does not answer")
        part = os.read(self._in, 1 << 20)
        assert part, "the browser ended"
        *messages, self._unread = (self._unread + part).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] in ERRORS:
                self.events.append(message)

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Tab":
        tab = self._new_tab()
        for domain in ("Page", "Runtime", "Log", "Performance", "HeapProfiler"):
            tab.call(f"{domain}.enable")
        tab.look(width, height, dark=dark)
        tab.go(url)
        return tab

    def _new_tab(self) -> "Tab":
        """Chromium sometimes makes one that never answers."""
        for seconds in (CALL_SECONDS / 6, CALL_SECONDS):
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            tab = Tab(self, target, attached["sessionId"])
            with suppress(NoAnswer):
                self.call("Runtime.enable", attached["sessionId"], seconds)
                break
        return tab

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(END_SECONDS)
        except (NoAnswer, AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)


class Tab:
    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("location.href != 'about:blank' && document.readyState == 'complete'")

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """As on a screen of that size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, expression: str) -> Any:
        """The value of an expression in the page, awaited where it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a person reads there; "" where there is nothing."""
        found = self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found).strip()

    def rows(self, body: str) -> dict[str, list[str]]:
        """The cells of the rows of a table's body, by the row's name."""
        found: dict[str, list[str]] = self.run(
            f"Object.fromEntries([...document.getElementById({json.dumps(body)}).children].map("
            "row => [row.dataset.name, [...row.children].map(cell => cell.innerText.trim())]))"
        )
        return found

    def wait_for(self, condition: str, seconds: float = 20.0) -> None:
        """Until the expression is true in the page."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {condition}: {self.text('body')}")
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        """As by hand, and the return key."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
                windowsVirtualKeyCode=13, text="\r",
            )  # fmt: skip

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def metrics(self) -> dict[str, float]:
        """Of the page, after its garbage was collected: Nodes, JSHeapUsedSize and others."""
        self.call("HeapProfiler.collectGarbage")
        listed = self.call("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in listed}

    def first_paint_seconds(self) -> float:
        self.wait_for("performance.getEntriesByName('first-contentful-paint').length")
        milliseconds: float = self.run(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        return milliseconds / 1000

    def errors(self) -> list[str]:
        """What stands in the console as an error or a warning, and what was thrown."""
        self.run("1")  # what was said before has come
        found = []
        for event in self._browser.events:
            told = event["params"]
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                if told["entry"]["level"] in ("error", "warning"):
                    found.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            elif told["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(told["args"]))
        return found

    def forgive(self) -> None:
        """What was complained of so far was meant to be."""
        self._browser.events.clear()

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


ANSWER_SECONDS = scaled(10.0)


def address_of(node: "NodeProcess | Listener") -> tuple[str, int]:
    url = node.settings.http_listen
    assert url is not None
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def get(
    node: "NodeProcess | Listener", path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, Message, str]:
    """Status, headers (in whatever case) and text."""
    url = f"{node.settings.http_listen}{path}"
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers, refused.read().decode()


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


class Listener:
    """A dashboard's server that is no node's, for `get` and `Stream`."""

    def __init__(self, address: str) -> None:
        self.settings = SimpleNamespace(http_listen=address)


@contextmanager
def serving_feed(feed: Feed) -> Iterator[Listener]:
    """A server in this process, on a thread, that shows this feed."""
    listener = socket.create_server(("127.0.0.1", 0))
    node = NodeView(Path("/nowhere"))
    server = server_of(make_app(node, Exposition("nobody", os.getpid()), feed, None))
    serving = run(server, feed, listener)
    thread = threading.Thread(target=asyncio.run, args=(serving,), daemon=True)
    thread.start()
    yield Listener(f"http://127.0.0.1:{listener.getsockname()[1]}")
    server.should_exit = server.force_exit = True
    thread.join(END_SECONDS)


class Stream:
    """The events of a node's dashboard, as they come."""

    def __init__(
        self, node: NodeProcess | Listener, *headers: str, path: str = "/dashboard/stream"
    ) -> None:
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
