"""`doctor`: its findings on clocks and on the versions, ports and tokens of nodes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from command_line import beating, boot_of, run_json
from lookup_buffer import access
from lookup_buffer.access import user_token
from lookup_buffer.cli.check_host import host_checks
from lookup_buffer.cli.check_store import clock_check, store_checks
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.protocol.acceptor import Acceptor, listening_socket
from lookup_buffer.protocol.auth import accept_handshake
from servers import command
from store import BlockingStore, NodeInfo

HERE = socket.gethostname()
TOKEN = "that of the whole fleet"


def examine(
    url: str, directory: Path, *, code: int = 0, token: str | None = None
) -> dict[str, dict[str, Any]]:
    settings = {} if token is None else {"LOOKUP_BUFFER_TOKEN": token}
    arguments = ("doctor", "--store-url", url, "--directory", str(directory / "d"))
    checks = run_json(*arguments, code=code, **settings)["checks"]
    return {check["name"]: check for check in checks}


@contextmanager
def a_node(
    store: BlockingStore, node: str, endpoint: str, *, version: str = "0.1", host: str = HERE
) -> Iterator[None]:
    store.describe_node(NodeInfo(node, boot_of(node), endpoint, host, version, 1, 1, 1))
    with beating(store, node):
        yield


@contextmanager
def a_peer(token: str | None = None) -> Iterator[int]:
    """The port of a listener that greets as a node does."""
    known = token or user_token()

    def greet(stream: socket.socket) -> None:
        with suppress(LookupBufferError):
            accept_handshake(stream, token=known, timeout=5.0, accepts=lambda _: "").close()

    listener, shown = listening_socket("127.0.0.1", 0)
    thread = threading.Thread(target=Acceptor(8).serve, args=(listener, greet))
    thread.start()
    yield int(shown.rpartition(":")[2])
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    with a_peer() as port:
        yield port


def test_ports(store: BlockingStore, url: str, tmp_path: Path, port: int) -> None:
    with a_node(store, "n1", f"tcp://127.0.0.1:{port}"):
        assert examine(url, tmp_path)["ports"]["verdict"] == "ok"
        with (
            a_node(store, "n2", "tcp://127.0.0.1:1"),
            a_node(store, "n3", f"tcp://127.0.0.1:{port}", host="elsewhere"),
            a_node(store, "n4", "nonsense"),
        ):
            checks = examine(url, tmp_path, code=1)
    check = checks["ports"]
    assert check["verdict"] == "warn"
    assert "n2 at tcp://127.0.0.1:1 (Connection refused)" in check["found"]
    assert f"n3 at tcp://127.0.0.1:{port} (loopback, of another host)" in check["found"]
    assert "n4 at nonsense" in check["found"]
    assert "n1" not in check["found"]
    assert checks["address"]["verdict"] == "fail"  # these are the only ones that other hosts reach


def test_another_program_at_the_port(store: BlockingStore, url: str, tmp_path: Path) -> None:
    """A listener that accepts the connection and then sends nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        a_node(store, "n1", f"tcp://127.0.0.1:{silent.getsockname()[1]}"),
    ):
        checks = examine(url, tmp_path)
    assert checks["ports"]["verdict"] == "warn"
    assert "n1 at tcp://127.0.0.1:" in checks["ports"]["found"]
    assert checks["token"]["found"].endswith(": 0")


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (TOKEN, TOKEN, "ok"),
        (TOKEN, TOKEN[::-1], "fail"),
        (TOKEN, None, "fail"),
        (None, TOKEN, "warn"),
    ],
)
def test_tokens(
    store: BlockingStore,
    url: str,
    tmp_path: Path,
    ours: str | None,
    theirs: str | None,
    verdict: str,
) -> None:
    with (
        a_peer(ours) as like_us,
        a_peer(theirs) as other,
        a_node(store, "n1", f"tcp://127.0.0.1:{like_us}"),
        a_node(store, "n2", f"tcp://127.0.0.1:{other}"),
    ):
        checks = examine(url, tmp_path, code=int(verdict == "fail"), token=ours)
    assert checks["ports"]["verdict"] == "ok"
    assert checks["token"]["verdict"] == verdict
    if verdict != "ok":
        assert f"refused by n2 at tcp://127.0.0.1:{other} (" in checks["token"]["found"]
        assert "n1" not in checks["token"]["found"]


def test_a_token_file_that_cannot_be_read(
    store: BlockingStore, url: str, tmp_path: Path, port: int
) -> None:
    with a_node(store, "n1", f"tcp://127.0.0.1:{port}"):
        arguments = ("doctor", "--store-url", url, "--directory", str(tmp_path / "d"))
        settings = {"LOOKUP_BUFFER_TOKEN_FILE": str(tmp_path / "none")}
        checks = {one["name"]: one for one in run_json(*arguments, code=1, **settings)["checks"]}
    assert checks["token"]["verdict"] == "fail"
    assert "'token_file'" in checks["token"]["found"]
    assert checks["directory"]["verdict"] == "ok", "the checks go on"


def test_it_makes_no_file(
    store: BlockingStore, url: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_default_directory", lambda: tmp_path / "of-the-user")
    config = BufferConfig.of({"store_url": url, "directory": tmp_path / "d"})
    with a_node(store, "n1", f"tcp://127.0.0.1:{port}"):
        checks = {one.name: one for one in [*store_checks(config), *host_checks(config)]}
    assert "none is set here" in checks["token"].found
    assert "which the node makes" in checks["directory"].found
    assert list(tmp_path.iterdir()) == []


def test_versions(store: BlockingStore, url: str, tmp_path: Path, port: int) -> None:
    with a_node(store, "n1", f"tcp://127.0.0.1:{port}"):
        assert examine(url, tmp_path)["versions"]["verdict"] == "ok"
        with a_node(store, "n2", f"tcp://127.0.0.1:{port}", version="0.2"):
            checks = examine(url, tmp_path)
    assert checks["versions"]["verdict"] == "warn"
    assert "0.1, 0.2" in checks["versions"]["found"]
    assert checks["fleet"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.1, "ok"), (-1.9, "ok"), (2.1, "warn"), (-90.0, "warn")]
)
def test_clocks(seconds: float, verdict: str) -> None:
    (check,) = clock_check(seconds)
    assert check.verdict.value == verdict
    assert ("ahead" if seconds > 0 else "behind") in check.found


def test_without_the_right_to_TIME_nothing_is_reported_about_clocks(
    store: BlockingStore, url: str, tmp_path: Path
) -> None:
    assert examine(url, tmp_path)["store clock"]["verdict"] == "ok"
    try:
        assert command(url, "ACL", "SETUSER", "default", "-time") == b"+OK"
        checks = examine(url, tmp_path)
    finally:
        assert command(url, "ACL", "SETUSER", "default", "+time") == b"+OK"
    assert "store clock" not in checks
    assert checks["store rights"]["verdict"] == "ok"
