"""The dashboard's stream and queries, by bare sockets: what each client gets, and at what cost."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lookup_buffer.dashboard import app, feed, users
from lookup_buffer.dashboard.feed import (
    HISTORY_SECONDS,
    QUESTIONS_MAX,
    WATCHERS_MAX,
    Feed,
)
from lookup_buffer.dashboard.fleet import PageUpdate
from lookup_buffer.dashboard.http import EXCHANGE_SECONDS
from memory_store import InMemoryStore
from nodes import NodeProcess, StartNode, key, wait_until
from observing import Listener, Stream, address_of, get, serving_feed
from servers import children_of, command, free_port

TOKEN = "nur-fuer-uns-und-niemanden"


def watched(start_node: StartNode, **settings: str) -> NodeProcess:
    return start_node(http_listen=f"http://127.0.0.1:{free_port()}", **settings)


class Talker:
    """Instead of `FleetSampler`: what it says is of a known size."""

    made = 0
    samples = 0
    long = ""

    def __init__(self, *_: object) -> None:
        Talker.made += 1

    def close(self) -> None:
        pass

    async def sample(self) -> PageUpdate:
        Talker.samples += 1
        at = {"at": Talker.samples}
        return PageUpdate(at | {"of": "talker", "long": Talker.long}, at)


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Listener]]:
    """talking(interval, length): a server whose samples have that many characters."""
    with ExitStack() as stack:

        def start(interval: float = 0.02, length: int = 0) -> Listener:
            monkeypatch.setattr(feed, "INTERVAL_SECONDS", interval)
            monkeypatch.setattr(feed, "FleetSampler", Talker)
            monkeypatch.setattr(Talker, "made", 0)
            monkeypatch.setattr(Talker, "samples", 0)
            monkeypatch.setattr(Talker, "long", "x" * length)
            return stack.enter_context(serving_feed(Feed("talker", InMemoryStore)))

        yield start


def test_the_fleet_is_sampled_once_for_all_pages_and_not_without_a_page(
    start_node: StartNode,
) -> None:
    node = watched(start_node)
    name = f"{node.node_id}:dashboard".encode()
    assert get(node, "/")[0] == get(node, "/metrics")[0] == 200
    assert name not in command(node.settings.store_url, "CLIENT", "LIST")
    with Stream(node) as one, Stream(node) as other:
        assert one.event() == []  # no history yet
        first, second = one.event("now"), other.event("now")
        assert first["node"] == second["node"] == node.node_id
        later = one.event("now")
        assert later["point"]["seconds"] == pytest.approx(later["at"] - first["at"], abs=0.5)
        assert name in command(node.settings.store_url, "CLIENT", "LIST")
    with Stream(node) as again:  # a page that is loaded again finds its history
        points = again.event("history")
        assert later["point"]["at"] in [point["at"] for point in points]


def test_the_process_needs_no_thread_for_the_store(start_node: StartNode) -> None:
    node = watched(start_node)
    with Stream(node) as page:
        page.event("now")
        (pid,) = children_of(node.pid)
        assert get(node, f"/dashboard/why?key={key('never').text}")[0] == 200
        assert get(node, "/metrics")[0] == 200
        page.event("now")
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        assert len(tasks) == 1, [(task / "comm").read_text() for task in tasks]


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


def test_pages_are_bounded(talking: Callable[..., Listener]) -> None:
    server = talking()
    with ExitStack() as stack:
        held = [stack.enter_context(Stream(server)) for _ in range(WATCHERS_MAX)]
        for each in held:
            assert each.event("now")["of"] == "talker"
        with Stream(server) as refused:
            assert refused.status == 503
        held.pop().socket.close()

        def is_taken() -> bool:
            with Stream(server) as stream:
                return stream.status == 200

        wait_until(is_taken, 20.0, "a place is free")


def test_a_sample_is_for_all_pages(talking: Callable[..., Listener]) -> None:
    server = talking()
    with ExitStack() as stack:
        for page in [stack.enter_context(Stream(server)) for _ in range(8)]:
            page.event("now")
    assert Talker.made == 1


def test_pages_that_are_opened_at_once_are_bounded(
    talking: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "ASK_SECONDS", 60.0)  # so all are of one user
    monkeypatch.setattr(users, "WAITING_MAX", 60)
    server = talking()
    with ExitStack() as stack:
        opened = []
        for _ in range(WATCHERS_MAX + 8):
            opened.append(stack.enter_context(socket.create_connection(address_of(server))))
        for one in opened:
            one.sendall(b"GET /dashboard/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = [one.recv(12) for one in opened]
    assert found.count(b"HTTP/1.1 200") == WATCHERS_MAX
    assert found.count(b"HTTP/1.1 503") == 8


def has_a_bug(_: Talker) -> PageUpdate:
    raise KeyError("a bug")


def test_a_bug_in_a_sample_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, talking: Callable[..., Listener]
) -> None:
    monkeypatch.setattr(feed, "AGAIN_SECONDS", 0.1)
    with Stream(talking()) as stream:
        stream.event("now")
        with monkeypatch.context() as patched:
            patched.setattr(Talker, "sample", has_a_bug)
            for _ in range(3):
                assert "in the node's log" in stream.event("trouble")
        assert stream.event("now")["of"] == "talker"


def test_questions_that_take_long_delay_nothing_else(
    monkeypatch: pytest.MonkeyPatch, talking: Callable[..., Listener]
) -> None:
    released = threading.Event()

    async def explain(*_: object) -> dict[str, object]:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return {}

    monkeypatch.setattr(app, "MAKE_SECONDS", 3.0)
    monkeypatch.setattr(feed, "explain", explain)
    server = talking()

    def ask(_: object) -> int:
        with Stream(server, path="/dashboard/why?key=k") as asking:
            return asking.status

    with ThreadPoolExecutor(2 * QUESTIONS_MAX) as askers:
        try:
            asked = [askers.submit(ask, number) for number in range(2 * QUESTIONS_MAX)]
            wait_until(lambda: sum(one.done() for one in asked) == QUESTIONS_MAX, 10.0)
            with Stream(server, path="/") as page:
                assert page.status == 200
        finally:
            found = Counter(one.result() for one in asked)
            released.set()
    assert found == {503: QUESTIONS_MAX, 504: QUESTIONS_MAX}
    wait_until(lambda: get(server, "/dashboard/why?key=k")[0] == 200, 10.0, "it is free again")


def test_history_is_bounded(talking: Callable[..., Listener]) -> None:
    server = talking(interval=0.0005)
    with Stream(server) as stream:
        while stream.event("now")["at"] < HISTORY_SECONDS + 100:
            pass
        with Stream(server) as late:
            assert len(late.event("history")) == HISTORY_SECONDS


def test_a_slow_reader_is_disconnected_and_delays_no_other(
    talking: Callable[..., Listener],
) -> None:
    server = talking(interval=0.005, length=1 << 20)
    with Stream(server, "Content-Length: 100") as slow, Stream(server) as quick:
        slow.event("now")
        until = time.monotonic() + EXCHANGE_SECONDS + 3.0  # he reads no more, and says a little
        while time.monotonic() < until:
            assert quick.event("now")["of"] == "talker"
            if int(time.monotonic() * 200) % 200 == 0:
                with suppress(OSError):
                    slow.socket.send(b"x")
        with pytest.raises((ConnectionError, EOFError)):
            while True:
                slow.event("now")


def test_sampling_ends_after_the_last_page(
    monkeypatch: pytest.MonkeyPatch, talking: Callable[..., Listener]
) -> None:
    monkeypatch.setattr(feed, "LINGER_SECONDS", 0.5)
    server = talking()
    with Stream(server) as stream:
        stream.event("now")

    def stands_still() -> bool:
        before = Talker.samples
        time.sleep(0.5)
        return Talker.samples == before

    wait_until(stands_still, 20.0, "sampling ends")
    before = Talker.samples
    with Stream(server) as stream:
        assert stream.event("now")["at"] > before, "a new page is not shown the last one's sample"
