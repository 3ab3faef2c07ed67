"""A node's HTTP: its settings, its process, and any bytes from any client."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import pytest

from lookup_buffer.config import BufferConfig
from lookup_buffer.dashboard.app import HEALTH_SECONDS, REQUEST_BYTES_MAX
from lookup_buffer.dashboard.http import CONNECTIONS_MAX, EXCHANGE_SECONDS, PIECE_BYTES, server_of
from lookup_buffer.errors import ConfigError
from lookup_buffer.node import http as node_http
from lookup_buffer.node.http import HttpProcess
from nodes import NodeProcess, StartNode, wait_until
from observing import ANSWER_SECONDS, address_of, get
from patience import scaled
from servers import alive, children_of, free_port

TOKEN = "nur-fuer-uns-und-niemanden"


@pytest.fixture(scope="module")
def node(module_nodes: StartNode) -> NodeProcess:
    node = module_nodes(http_listen=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    return node


@pytest.fixture(scope="module")
def guarded(module_nodes: StartNode) -> NodeProcess:
    node = module_nodes(http_listen=f"http://127.0.0.1:{free_port()}", http_token=TOKEN)
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    return node


def test_the_process_does_not_inherit_the_token(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKUP_BUFFER_TOKEN", "t" * 16)
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    (pid,) = children_of(node.pid)
    inherited = Path(f"/proc/{pid}/environ").read_text()
    assert "PATH=" in inherited
    assert "t" * 16 not in inherited


def test_the_process_is_told_no_secret_of_nodes(tmp_path: Path) -> None:
    config = BufferConfig.of(
        {
            "listen": "tcp://0.0.0.0:0", "advertise": "tcp://10.0.0.1:7000", "token": "t" * 16,
            "http_listen": "http://0.0.0.0:0", "http_token": TOKEN, "directory": tmp_path,
        }
    )  # fmt: skip
    told = node_http._told(config)
    assert "t" * 16 not in str(told)
    assert BufferConfig.of(told).read_http_token() == TOKEN


@contextmanager
def connected(node: NodeProcess) -> Iterator[socket.socket]:
    with socket.create_connection(address_of(node), timeout=ANSWER_SECONDS) as bare:
        yield bare


def exchange(node: NodeProcess, data: bytes, *, more: bool = False) -> bytes:
    """The whole reply to `data`; the sending side is shut down afterwards, unless `more`."""
    with connected(node) as bare:
        with suppress(OSError):  # the server may have closed the connection already
            bare.sendall(data)
            if not more:
                bare.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            while part := bare.recv(65536):
                answer += part
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_scrape_is_one_request_and_the_end(node: NodeProcess) -> None:
    status, headers, text = get(node, "/metrics?x=1")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert headers["Connection"] == "close"
    assert int(headers["Content-Length"]) == len(text.encode())
    accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    status, headers, text = get(node, "/metrics", accept)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /nothing HTTP/1.1", 404),
        (b"GET /dashboard/../http_page.py HTTP/1.1", 404),
        (b"GET /metrics/.. HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"HEAD /metrics HTTP/1.1", 405),
        (b"DELETE /healthz HTTP/1.1", 405),
        (b"GET /healthz HTTP/1.0", 200),
        (b"GET http://127.0.0.1/metrics HTTP/1.1", 404),
    ],
)
def test_only_get_of_existing_paths(node: NodeProcess, request_line: bytes, status: int) -> None:
    answer = exchange(node, request_line + b"\r\nHost: localhost\r\n\r\n")
    assert status_of(answer) == status
    assert (b"\r\nallow: get\r\n" in answer.lower()) == (status == 405)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # a TLS client
        b"LB01" + bytes(60),  # a node's handshake
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",  # no host
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"\r\n" * 100 + b"\0\r\n\r\n",
    ],
)
def test_garbage_is_refused(node: NodeProcess, data: bytes) -> None:
    assert status_of(exchange(node, data)) == 400
    assert get(node, "/healthz")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * (4 * REQUEST_BYTES_MAX),
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * REQUEST_BYTES_MAX,
        b"GET /metrics?" + b"x" * REQUEST_BYTES_MAX + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_the_wait_for_the_end_of_a_request_is_bounded(node: NodeProcess, data: bytes) -> None:
    before = time.monotonic()
    assert status_of(exchange(node, data, more=True)) == 431
    assert time.monotonic() - before < scaled(2 * EXCHANGE_SECONDS)
    assert get(node, "/healthz")[0] == 200


def test_a_slow_client_loses_only_its_own_connection(node: NodeProcess) -> None:
    """As many as may be at once, a byte now and then, until the deadline ends each of them."""
    (pid,) = children_of(node.pid)
    files, threads = f"/proc/{pid}/fd", f"/proc/{pid}/task"
    assert get(node, "/metrics")[0] == 200
    before = (len(os.listdir(files)), len(os.listdir(threads)))
    slow = [socket.create_connection(address_of(node)) for _ in range(2 * CONNECTIONS_MAX)]
    try:
        began = time.monotonic()
        for each in slow:
            with suppress(OSError):
                each.sendall(b"GET /metrics HTTP/1.1\r\n")
        with node.client() as client:  # meanwhile the node has time for its clients
            assert client.stats()["sessions_opened"] >= 1
        for each in slow:
            each.settimeout(scaled(3 * EXCHANGE_SECONDS))
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
        assert time.monotonic() - began < scaled(3 * EXCHANGE_SECONDS)
    finally:
        for each in slow:
            each.close()
    assert get(node, "/metrics")[0] == 200
    wait_until(lambda: len(os.listdir(files)) <= before[0] + 3, 10.0, "its files are closed")
    assert len(os.listdir(threads)) <= before[1]


def test_at_the_connection_limit_a_new_connection_is_still_served(guarded: NodeProcess) -> None:
    """Clients without the token send nothing, a part of a request or all of it, and stay."""
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as held:
        for said in (b"", request[:9], request):
            for _ in range(CONNECTIONS_MAX):
                client = held.enter_context(connected(guarded))
                client.sendall(said)
                assert said != request or client.recv(1), "it is answered, and idle from then on"
            assert get(guarded, "/metrics", {"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_a_burst_of_connections_is_bounded_as_well(node: NodeProcess) -> None:
    """Many are accepted in one turn of the loop."""
    (pid,) = children_of(node.pid)
    assert get(node, "/metrics")[0] == 200
    files = f"/proc/{pid}/fd"
    before = len(os.listdir(files))
    with ExitStack() as held:
        for _ in range(10 * CONNECTIONS_MAX):
            with suppress(OSError):
                held.enter_context(connected(node))
        wait_until(lambda: len(os.listdir(files)) <= before + CONNECTIONS_MAX + 5, 2.0)


def test_garbage_after_a_request_is_no_bug_of_ours(start_node: StartNode) -> None:
    """It is not looked at."""
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange(node, head % b"/healthz" + b"ZZ\r\n")
    with connected(node) as bare:
        bare.sendall(head % b"/healthz")
        bare.recv(1)
        bare.sendall(b"ZZ\r\n")
        with suppress(ConnectionResetError):
            while bare.recv(65536):
                pass
    with connected(node) as bare:
        bare.sendall(head % b"/dashboard/stream")
        assert bare.recv(1)
        bare.sendall(b"ZZ\r\n")
        assert bare.recv(1)
    assert "bug" not in node.log_text()
    assert "Fatal" not in node.log_text()


def test_a_body_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """h11 makes an event for each chunk: 43,000 for what asyncio hands over at once."""
    fed: list[int] = []
    receive = h11.Connection.receive_data

    def counting(connection: h11.Connection, data: bytes) -> None:
        fed.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(h11.Connection, "receive_data", counting)
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answered"})

    async def test() -> bytes:
        server = server_of(app)
        server.config.port = 0
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head + b"1\r\nx\r\n" * 10_000)
        answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return answer

    assert b"answered" in asyncio.run(test())
    assert sum(fed) <= PIECE_BYTES


def test_a_client_that_does_not_read_its_reply_is_disconnected(node: NodeProcess) -> None:
    """It has sent a request, and neither reads nor disconnects."""
    with connected(node) as bare:
        bare.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        bare.settimeout(scaled(3 * EXCHANGE_SECONDS))
        with suppress(ConnectionResetError):
            while bare.recv(65536):
                pass
            bare.settimeout(scaled(3 * EXCHANGE_SECONDS))
        assert time.monotonic() - began < scaled(3 * EXCHANGE_SECONDS)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("LOCALHOST:7731", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200),
        ("rebound.example", 421), ("127.0.0.1.rebound.example:7731", 421), ("", 421),
    ],
)  # fmt: skip
def test_without_a_token_only_names_of_loopback_are_answered(
    node: NodeProcess, host: str, status: int
) -> None:
    """A page of the web could have its own name resolved to 127.0.0.1."""
    answer = exchange(node, b"GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode())
    assert status_of(answer) == status


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        ("", 401),
        ("Bearer", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer \xfc\xdf", 401),
    ],
)
def test_the_token_opens_the_metrics(guarded: NodeProcess, said: str, status: int) -> None:
    header = b"Authorization: %s\r\n" % said.encode("latin-1")
    answer = exchange(guarded, b"GET /metrics HTTP/1.1\r\nHost: any.where\r\n%s\r\n" % header)
    assert status_of(answer) == status
    assert (b"lookup_buffer_hits_total" in answer) == (status == 200)
    assert (b"www-authenticate: bearer" in answer.lower()) == (status == 401)
    assert TOKEN.encode() not in answer


def test_a_probe_needs_no_token_and_gets_one_line(guarded: NodeProcess) -> None:
    wait_until(lambda: get(guarded, "/healthz")[0] == 200, 10.0, "the node joins")
    assert get(guarded, "/healthz")[2] == "ok\n"


def test_a_node_ends_while_a_client_is_connected(start_node: StartNode) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    assert get(node, "/metrics")[0] == 200
    with connected(node) as idle, connected(node) as halfway:
        halfway.sendall(b"GET /metr")
        assert node.terminate() == 0
        with suppress(ConnectionResetError):  # it may not have been accepted yet
            assert idle.recv(1) == b""


def test_a_node_whose_loop_stands_still_is_unhealthy(start_node: StartNode) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "the node joins")
    with node.frozen():
        time.sleep(2 * HEALTH_SECONDS)
        assert get(node, "/healthz")[::2] == (503, "the node does not answer its clients\n")
        assert get(node, "/metrics")[0] == 503
    wait_until(lambda: get(node, "/healthz")[0] == 200, 10.0, "it goes on")


@pytest.mark.parametrize("end", [NodeProcess.kill, NodeProcess.terminate])
def test_the_process_ends_with_its_node_however_that_ends(
    start_node: StartNode, end: Callable[[NodeProcess], object]
) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    assert get(node, "/metrics")[0] == 200
    (pid,) = children_of(node.pid)
    end(node)
    wait_until(lambda: not alive(pid), 10.0, "the process ends")


def test_a_process_that_dies_is_started_again(start_node: StartNode) -> None:
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    assert get(node, "/metrics")[0] == 200
    os.kill(children_of(node.pid).pop(), signal.SIGKILL)
    with node.client() as client:  # the node itself goes on
        assert client.stats()["sessions_opened"] >= 1
    with suppress(OSError):  # the first may have been accepted by the one that died
        get(node, "/metrics")
    assert get(node, "/metrics")[0] == 200, "who asks meanwhile waits"
    assert "is started again" in node.log_text()


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[object] = []

    def no_process(*_: object, **__: object) -> None:
        attempts.append(None)
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(node_http, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    process = HttpProcess("http://127.0.0.1:0")

    async def test() -> None:
        running = asyncio.create_task(process.run("node", Path("/nowhere"), BufferConfig.of({})))
        while len(attempts) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(test())
    assert "cannot be started; retried" in caplog.text


def test_probes_keep_no_node_alive(start_node: StartNode) -> None:
    """A node that an engine started ends when it is idle, though it is scraped."""
    node = start_node(http_listen=f"http://127.0.0.1:{free_port()}")
    with node.client("stats") as client:
        before = client.stats()["sessions_opened"]
        for _ in range(10):
            assert get(node, "/metrics")[0] == 200
        assert client.stats()["sessions_opened"] == before


def test_the_process_takes_little_memory(node: NodeProcess) -> None:
    assert get(node, "/metrics")[0] == 200
    (pid,) = children_of(node.pid)
    status = Path(f"/proc/{pid}/status").read_text()
    megabytes = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    print(f"{megabytes:.0f} MiB")
    assert megabytes <= 60


def test_a_port_that_is_taken_ends_the_start_and_names_the_setting(start_node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AssertionError, match=r"'http_listen' is .*allowed: a free address"):
            start_node(http_listen=address)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"http_listen": "127.0.0.1:7731"}, ["http_listen", "http://host:port"]),
        ({"http_listen": "tcp://127.0.0.1:7731"}, ["http_listen", "http://host:port"]),
        ({"http_listen": "http://127.0.0.1"}, ["http_listen", "http://host:port"]),
        ({"http_listen": "http://127.0.0.1:7731/metrics"}, ["http_listen", "http://host:port"]),
        ({"http_listen": "http://0.0.0.0:7731"}, ["http_token", "http_listen", "loopback"]),
        ({"http_listen": "http://10.0.0.1:7731"}, ["http_token", "not loopback"]),
        ({"http_token": "zwei Worte"}, ["http_token", "hidden"]),
        ({"http_token": ""}, ["http_token", "hidden"]),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        BufferConfig.of(settings)
    for word in words:
        assert word in str(raised.value)
    assert "Worte" not in str(raised.value)


def test_without_the_setting_no_port_is_opened() -> None:
    assert BufferConfig.of({}).http_listen is None


def test_beyond_loopback_with_a_token_is_allowed() -> None:
    config = BufferConfig.of({"http_listen": "http://0.0.0.0:7731", "http_token": TOKEN})
    assert TOKEN not in repr(config)
