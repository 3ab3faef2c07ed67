"""The dashboard's stream and queries, by bare sockets: what each client gets, and at what cost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lookup_buffer.node import http_exchange
from lookup_buffer.node import observer as node_observer
from lookup_buffer.node.http_dashboard import dashboard_pages
from lookup_buffer.node.http_exchange import EXCHANGE_SECONDS
from lookup_buffer.node.http_server import HttpServer
from lookup_buffer.node.observer import HISTORY_SECONDS, WATCHERS_MAX, Observer
from nodes import NodeProcess, StartNode, key, wait_until
from observing import Stream, get
from servers import alive, free_port

TOKEN = "nur-fuer-uns-und-niemanden"
TALKER = """
import json, sys, time
name, interval, length = json.loads(sys.stdin.readline())
number = 0
while True:
    number += 1
    print("point", json.dumps({"at": number}), flush=True)
    print("now", json.dumps({"at": number, "of": name, "long": "x" * length}), flush=True)
    time.sleep(interval)
"""


def children_of(pid: int) -> set[int]:
    """The processes that it has started, and that run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and alive(int(entry.name)):
            found.add(int(entry.name))
    return found


def watched(start_node: StartNode, **settings: str) -> NodeProcess:
    return start_node(http_listen=f"http://127.0.0.1:{free_port()}", **settings)


@contextmanager
def talking(interval: float = 0.02, length: int = 0) -> Iterator[str]:
    """The address of a listener whose observer sends messages all the time."""
    told = json.dumps(["talker", interval, length]).encode() + b"\n"
    observer = Observer(((sys.executable, "-c", TALKER), told))
    server = HttpServer(None)
    server.listen("http://127.0.0.1:0")
    server.start(dashboard_pages(observer, needs_token=False))
    try:
        yield server.address
    finally:
        server.close()


class Listener:
    """So that a `Stream` can be opened to what is no node."""

    def __init__(self, address: str) -> None:
        self.settings = type("Settings", (), {"http_listen": address})


def listener(address: str) -> NodeProcess:
    return Listener(address)  # type: ignore[return-value]


def stream_of(address: str) -> Stream:
    return Stream(listener(address))


def test_one_observer_for_all_pages_and_none_without_a_page(start_node: StartNode) -> None:
    node = watched(start_node)
    assert get(node, "/")[0] == get(node, "/metrics")[0] == 200
    assert children_of(node.pid) == set()
    with Stream(node) as one, Stream(node) as other:
        assert one.event() == []  # no history yet
        first, second = one.event("now"), other.event("now")
        assert first["node"] == second["node"] == node.node_id
        (pid,) = children_of(node.pid)
        later = one.event("now")
        assert later["point"]["seconds"] == pytest.approx(later["at"] - first["at"], abs=0.5)
    with Stream(node) as again:  # a page that is loaded again finds its history
        points = again.event("history")
        assert later["point"]["at"] in [point["at"] for point in points]
        assert children_of(node.pid) == {pid}
    assert node.terminate() == 0
    wait_until(lambda: not alive(pid), 10.0, "the observer ends with its node")


def test_an_observer_ends_with_its_node_however_that_ends(start_node: StartNode) -> None:
    node = watched(start_node)
    with Stream(node) as stream:
        stream.event("now")
        (pid,) = children_of(node.pid)
        node.kill()
        wait_until(lambda: not alive(pid), 10.0, "the observer ends")


def test_an_observer_that_dies_is_started_again(start_node: StartNode) -> None:
    node = watched(start_node)
    with Stream(node) as stream:
        stream.event("now")
        os.kill(children_of(node.pid).pop(), signal.SIGKILL)
        assert "is restarted" in stream.event("trouble")
        assert stream.event("now")["node"] == node.node_id


def test_any_number_of_queries_is_answered(start_node: StartNode) -> None:
    node = watched(start_node)
    status, headers, text = get(node, f"/dashboard/why?key={key('never').text}")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert [one["code"] for one in json.loads(text)["findings"]] == ["absent"]
    for wrong in (
        "",
        "?key=",
        "?key=" + "x" * 5000,
        "?key=a%7Bb%00&namespace=%ff",
        "?a=1" + 9 * "&a=1",
    ):
        status, _, text = get(node, f"/dashboard/why{wrong}")
        assert status == 200
        assert json.loads(text)["problem"]


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/dashboard/stream", (), 401),
        ("/dashboard/stream", (f"Authorization: Bearer {TOKEN}x",), 401),
        ("/dashboard/why?key=a", (), 401),
        (f"/dashboard/why?key=a&token={TOKEN}", (), 401),
        ("/", (), 200),
        ("/dashboard/main.js", (), 200),
        ("/dashboard/stream", (f"Authorization: Bearer {TOKEN}",), 200),
    ],
)
def test_a_token_guards_the_data_and_not_the_files(
    guarded: NodeProcess, path: str, headers: tuple[str, ...], status: int
) -> None:
    with Stream(guarded, *headers, path=path) as stream:
        assert stream.status == status
        assert TOKEN not in stream.head


@pytest.fixture
def guarded(start_node: StartNode) -> NodeProcess:
    return watched(start_node, http_token=TOKEN)


def test_other_sites_are_refused(start_node: StartNode) -> None:
    node = watched(start_node)
    for headers, status in (
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-site",), 403),
        (("Sec-Fetch-Site: same-origin",), 200),
    ):
        with Stream(node, *headers) as stream:
            assert stream.status == status, headers
    address = str(node.settings.http_listen).removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((address[0], int(address[1])), timeout=10.0) as bare:
        bare.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: rebound.example\r\n\r\n")
        assert bare.recv(100).startswith(b"HTTP/1.1 421 ")


def test_a_page_runs_only_scripts_of_the_node(start_node: StartNode) -> None:
    node = watched(start_node)
    _, headers, text = get(node, "/")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "http://" not in text
    assert "https://" not in text
    assert " on" not in text.partition("<body")[0]
    assert 'data-access="open"' in text
    assert headers["Referrer-Policy"] == "no-referrer"


def test_pages_are_bounded() -> None:
    with talking() as address, ExitStack() as stack:
        held = [stack.enter_context(stream_of(address)) for _ in range(WATCHERS_MAX)]
        for each in held:
            assert each.event("now")["of"] == "talker"
        with stream_of(address) as refused:
            assert refused.status == 503
        held.pop().socket.close()

        def is_taken() -> bool:
            with stream_of(address) as stream:
                return stream.status == 200

        wait_until(is_taken, 20.0, "a place is free")


def test_an_observer_whose_message_is_too_large_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_observer, "LINE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(node_observer, "AGAIN_SECONDS", 0.1)
    with talking(length=1 << 21) as address, stream_of(address) as stream:
        assert stream.event("history") == []
        for _ in range(3):
            assert "is restarted" in stream.event("trouble")


def test_an_observer_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_observer, "AGAIN_SECONDS", 0.5)
    before = children_of(os.getpid())
    with talking() as address, stream_of(address) as stream:
        stream.event("now")
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", no_process)
            os.kill((children_of(os.getpid()) - before).pop(), signal.SIGKILL)
            for _ in range(3):
                assert "is restarted" in stream.event("trouble")
        assert stream.event("now")["of"] == "talker"


def no_process(*_: object, **__: object) -> None:
    raise BlockingIOError("Resource temporarily unavailable")


def test_an_observer_that_reads_nothing_delays_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_exchange, "MAKE_SECONDS", 0.05)
    question = "/dashboard/why?key=" + "%00" * 2000  # which the talker never reads
    with talking() as address:
        for _ in range(20):  # until its pipe is full, and then some
            with Stream(listener(address), path=question) as asking:
                assert asking.status in (503, 504)
        assert asking.status == 503
        with Stream(listener(address), path="/") as page:
            assert page.status == 200


def test_history_is_bounded() -> None:
    with talking(interval=0.0005) as address, stream_of(address) as stream:
        while stream.event("now")["at"] < HISTORY_SECONDS + 100:
            pass
        with stream_of(address) as late:
            assert len(late.event("history")) == HISTORY_SECONDS


def test_a_slow_reader_is_disconnected_and_delays_no_other() -> None:
    with (
        talking(interval=0.005, length=1 << 20) as address,
        stream_of(address) as slow,
        stream_of(address) as quick,
    ):
        slow.event("now")
        until = time.monotonic() + EXCHANGE_SECONDS + 3.0  # he reads no more
        while time.monotonic() < until:
            assert quick.event("now")["of"] == "talker"
        with pytest.raises((ConnectionError, EOFError)):
            while True:
                slow.event("now")


def test_the_observer_ends_after_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_observer, "LINGER_SECONDS", 0.5)
    before = children_of(os.getpid())
    with talking() as address:
        with stream_of(address) as stream:
            stream.event("now")
            (pid,) = children_of(os.getpid()) - before
        wait_until(lambda: not alive(pid), 20.0, "the observer ends")
        with stream_of(address) as stream:
            assert stream.event("now")["of"] == "talker"
            assert children_of(os.getpid()) - before != {pid}
