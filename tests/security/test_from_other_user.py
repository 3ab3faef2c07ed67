"""Another user of the node's host: what he places, listens at, and asks for."""

import fcntl
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import run
from lookup_buffer.access import runtime_directory
from lookup_buffer.cli.certificates import Authority
from lookup_buffer.dashboard.feed import WATCHERS_MAX
from lookup_buffer.errors import ConfigError, NodeRefused, PipeError
from lookup_buffer.pipes import PipeLimits, gloo, open_pipe
from nodes import NodeProcess, StartNode, wait_until
from observing import Stream
from other_user import NOBODY, OtherUser
from servers import free_port
from store import StoreUnavailable, open_store


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which anyone may create files, as /tmp."""
    with tempfile.TemporaryDirectory(prefix="lbt-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


# -- files


def test_a_link_at_the_runtime_directory_is_not_followed(shared: Path) -> None:
    """To a directory of the victim, in which files would be written."""
    target = shared / "target"
    target.mkdir(mode=0o700)
    link = shared / "lookup-buffer-0"
    with OtherUser("os.symlink(*arguments); send(True)", str(target), str(link)) as other:
        assert other.receive()
    with pytest.raises(ConfigError, match="symbolic link"):
        runtime_directory(link)
    assert list(target.iterdir()) == []
    assert runtime_directory(target) == target  # the control


def test_a_link_of_ones_own_is_not_followed_either(shared: Path) -> None:
    (shared / "target").mkdir(mode=0o700)
    (shared / "link").symlink_to("target")
    with pytest.raises(ConfigError, match="symbolic link"):
        runtime_directory(shared / "link")


@contextmanager
def node_at(path: Path) -> Iterator[NodeProcess]:
    """A node whose socket is to be there; not started yet."""
    node = NodeProcess(path.parent / "node", store_url="redis://127.0.0.1:1")
    node.settings = node.settings.model_copy(update={"node_socket": path})
    node.socket_path = path
    try:
        yield node
    finally:
        node.end()


def _identity(path: Path) -> tuple[int, ...]:
    """What reading leaves as it is."""
    entry = path.lstat()
    return entry.st_ino, entry.st_mode, entry.st_size, entry.st_mtime_ns


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_node_replaces_only_a_socket(shared: Path, kind: str) -> None:
    path, precious = shared / "node.sock", shared / "precious"
    precious.write_text("of great value")
    if kind == "file":
        precious.rename(path)
    elif kind == "link":
        path.symlink_to(precious)
    else:
        path.mkdir()
    before = _identity(path)
    with node_at(path) as node:
        with pytest.raises(AssertionError, match="the node ended"):
            node.start()
        assert node.wait() == 2
        assert "another kind of file" in node.log_text()
    assert _identity(path) == before
    if kind != "directory":
        assert path.read_text() == "of great value"


def test_a_node_takes_no_socket_from_a_process_that_listens(shared: Path) -> None:
    path = shared / "node.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with node_at(path) as node:
            with suppress(AssertionError):  # whether it starts is seen by who listens there
                node.start()
            assert node.wait() == 2
            assert "another process listens" in node.log_text()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_pipe_speaks_with_no_other_user_who_listens_at_its_path(shared: Path) -> None:
    """He was first there, and the file of his socket may be used by everybody."""
    path = shared / "pipe"
    listening = "s = socket.socket(socket.AF_UNIX); s.bind(*arguments); os.chmod(*arguments, 0o777)"
    with OtherUser(f"{listening}; s.listen(); send(True); receive()", str(path)) as other:
        assert other.receive()
        with pytest.raises(NodeRefused, match=f"user {NOBODY}"):
            open_pipe(f"shm://{path}", listen=False, timeout=5.0)
        other.send(None)


def test_a_node_replaces_a_socket_and_removes_only_its_own(shared: Path) -> None:
    path = shared / "node.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with node_at(path) as node:
        node.start()
        assert stat.S_ISSOCK(path.lstat().st_mode)
        path.unlink()
        path.write_text("of great value")
        assert node.terminate() == 0
    assert path.read_text() == "of great value"


CONNECT = """
stream = socket.socket(socket.AF_UNIX)
stream.connect(arguments[0])
send(stream.recv(100))
"""


def test_who_was_refused_at_the_socket_is_in_the_log(shared: Path) -> None:
    """Once; 65534 is what a node sees of all users whom its user namespace does not map."""
    path = shared / "node.sock"
    with node_at(path) as node:
        node.start()
        path.chmod(0o777)
        for _ in range(2):
            with OtherUser(CONNECT, str(path)) as other:
                assert other.receive() == b""
        assert node.log_text().count(f"a process of user {NOBODY} was refused: this node") == 1
        assert "map that user, and never set it as 'node_uid'" in node.log_text()


# -- an authority that he has left where the user makes his

LEAVE = """
folder, files = arguments
if not os.path.exists(folder):
    os.mkdir(folder)
for name, content in files.items():
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)
send(True)
receive()
"""


@pytest.mark.parametrize("is_there", [False, True], ids=["his folder", "a folder for all"])
def test_an_authority_of_another_user_is_not_used(
    shared: Path, tmp_path: Path, *, is_there: bool
) -> None:
    Authority.of(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = shared if is_there else shared / "certificates"
    with OtherUser(LEAVE, str(folder), files) as other:
        assert other.receive()
        done = run("certificates", str(folder), "node-a")
        assert (done.returncode, done.stdout) == (1, "")
        assert "belongs to another user" in done.stderr
    assert not (folder / "node-a.pem").exists()
    assert run("certificates", str(tmp_path), "node-a").returncode == 0  # the control


def test_no_authority_is_made_where_others_could_place_theirs_meanwhile(shared: Path) -> None:
    done = run("certificates", str(shared), "node-a")
    assert (done.returncode, done.stdout) == (1, "")
    assert "all users may write" in done.stderr
    assert not list(shared.iterdir())


# -- the dashboard

WATCH = """
streams = []
for _ in range(2 * arguments[1]):
    stream = socket.create_connection(("127.0.0.1", arguments[0]))
    stream.sendall(b"GET /dashboard/stream HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    streams.append((stream, stream.recv(12)))
send([status for _, status in streams])
receive()
"""


def test_pages_of_another_user_lock_nobody_out(start_node: StartNode) -> None:
    port = free_port()
    node = start_node(http_listen=f"http://127.0.0.1:{port}")
    with OtherUser(WATCH, port, WATCHERS_MAX) as other:
        assert other.receive().count(b"HTTP/1.1 200") == WATCHERS_MAX
        with ExitStack() as stack:
            for _ in range(WATCHERS_MAX // 2):
                stream = stack.enter_context(Stream(node))
                assert stream.status == 200
                assert stream.event("now")["node"] == node.node_id
            with Stream(node) as more:
                assert more.status == 503  # of two users each has half of the places
        with OtherUser(WATCH, port, WATCHERS_MAX) as again:
            again.receive()
            wait_until(lambda: _is_open(node), 10.0)


AS_OF_IPV6 = """
streams = []
for number in range(arguments[1]):
    stream = socket.socket(socket.AF_INET6)
    stream.bind((f"::ffff:127.0.0.{number + 1}", 0))
    stream.connect(("::ffff:127.0.0.1", arguments[0]))
    stream.sendall(b"GET /dashboard/stream HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    streams.append((stream, stream.recv(12)))
send([status for _, status in streams])
receive()
"""


def test_nor_do_those_of_one_who_connects_from_many_addresses(start_node: StartNode) -> None:
    """By sockets for IPv6, which the kernel lists apart: each address was a user."""
    port = free_port()
    node = start_node(http_listen=f"http://127.0.0.1:{port}")
    with OtherUser(AS_OF_IPV6, port, WATCHERS_MAX) as other:
        assert other.receive().count(b"HTTP/1.1 200") == WATCHERS_MAX
        with ExitStack() as stack:
            for _ in range(WATCHERS_MAX // 2):
                assert stack.enter_context(Stream(node)).status == 200


def _is_open(node: NodeProcess) -> bool:
    with Stream(node) as stream:
        return stream.status == 200


# -- localhost


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is ::1 and 127.0.0.1, in this order, as on most hosts."""
    ask = socket.getaddrinfo

    def as_usual(host: str | bytes, port: int, *args: Any, **options: Any) -> list[Any]:
        if host not in ("localhost", b"localhost"):
            return ask(host, port, *args, **options)
        return [found for at in ("::1", "127.0.0.1") for found in ask(at, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", as_usual)


@pytest.mark.usefixtures("two_addresses")
def test_who_listens_at_the_other_address_of_localhost_gets_nothing() -> None:
    """He would pass on the handshake, read the messages and send others."""
    with closing(open_pipe("tcp://localhost:0", listen=True, token="t" * 32)) as listening:
        port = int(listening.uri.rpartition(":")[2])
        with socket.create_server(("::1", port), family=socket.AF_INET6) as stranger:
            with closing(open_pipe(f"tcp://localhost:{port}", token="t" * 32)) as dialling:
                dialling.send_tensor(torch.ones(3))
                assert listening.recv_tensor(timeout=10.0) is not None
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.accept()


@pytest.mark.usefixtures("two_addresses")
@pytest.mark.parametrize("who", ["store", "pipe"])
def test_nor_does_he_get_the_password_of_a_server_at_localhost(who: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_server(("::1", port), family=socket.AF_INET6) as stranger:
            url = f"redis://:secret@localhost:{port}"
            with pytest.raises((StoreUnavailable, PipeError)):
                if who == "store":
                    with open_store(url, call_timeout_seconds=0.2) as store:
                        store.beats()
                else:
                    open_pipe(f"{url}?pipe=p", timeout=0.2)
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.accept()
        server.settimeout(2.0)
        with server.accept()[0] as asked:
            assert b"secret" in asked.recv(1000)


# -- Gloo's port


class Stranger:
    """He is the first at Gloo's ports, which he sees in /proc/net/tcp, and says what Gloo says: he
    forges each message that is requested of him, and requests each that is announced."""

    TOLD, REQUESTED, SENT = 2, 3, 1

    def __init__(self) -> None:
        self.got = bytearray()
        self.is_heard = False

    def connect(self, port: int) -> None:
        link = socket.create_connection(("127.0.0.1", port))
        link.sendall(bytes(8))  # the number of the first connection
        threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def _talk(self, link: socket.socket) -> None:
        with suppress(OSError, struct.error), link, link.makefile("rb") as heard:
            while True:
                nbytes, kind, tag, _, length, _ = struct.unpack("=6Q", heard.read(48))
                self.is_heard = True
                if kind == self.REQUESTED:
                    self._say(link, self.SENT, tag, length, b"B" * length)
                elif kind == self.TOLD:
                    self._say(link, self.REQUESTED, tag, length)
                else:
                    self.got += heard.read(nbytes - 48)

    def _say(
        self, link: socket.socket, kind: int, tag: int, length: int, payload: bytes = b""
    ) -> None:
        link.sendall(struct.pack("=6Q", 48 + len(payload), kind, tag, 0, length, 0) + payload)


@pytest.mark.parametrize("from_listener", [True, False])
def test_who_is_first_at_the_port_of_gloo_gets_and_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, *, from_listener: bool
) -> None:
    """He knows no token."""
    stranger, set_address = Stranger(), gloo._ExchangeStore.set

    def set_late(store: gloo._ExchangeStore, key: str, value: bytes) -> None:
        host = int.from_bytes(value[:8], sys.byteorder)
        stranger.connect(int.from_bytes(value[18 + host : 20 + host], "big"))
        time.sleep(0.05)
        set_address(store, key, value)

    monkeypatch.setattr(gloo._ExchangeStore, "set", set_late)
    sent = torch.full((1 << 18,), ord("A"), dtype=torch.uint8)
    for _ in range(10):
        received = _received_over_gloo(sent, from_listener=from_listener)
        assert b"A" * 1000 not in stranger.got
        assert received is None or torch.equal(received, sent)
        if stranger.is_heard:
            return
    pytest.fail("he was never the first")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_comes_to_the_port_of_gloo_later_takes_no_descriptors(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Gloo would keep each of his connections, also once he has left."""
    ports, set_address = set(), gloo._ExchangeStore.set

    def set_noted(store: gloo._ExchangeStore, key: str, value: bytes) -> None:
        ports.add(int.from_bytes(value[18 + value[0] : 20 + value[0]], "big"))
        set_address(store, key, value)

    monkeypatch.setattr(gloo._ExchangeStore, "set", set_noted)
    tensor = torch.ones(1 << 18)
    with ExitStack() as closing:
        shown = f"[{host}]" if ":" in host else host
        listening = open_pipe(f"gloo://{shown}:0", listen=True)
        closing.callback(listening.abort)
        dialling = open_pipe(listening.uri)
        closing.callback(dialling.abort)
        for sender, receiver in ((listening, dialling), (dialling, listening)):
            sender.send_tensor(tensor)
            assert receiver.recv_tensor(timeout=10.0) is not None
            for port in ports:
                with pytest.raises(TimeoutError):
                    socket.create_connection((host, port), timeout=0.2)
    assert len(ports) == 2


def test_only_the_listeners_of_gloo_are_closed(tmp_path: Path) -> None:
    """Not one of the program at the same port of another address; and its locks on files stay."""
    file = (tmp_path / "file").open("w")
    with file, socket.create_server(("127.0.0.2", 0)) as own:
        fcntl.lockf(file, fcntl.LOCK_EX)
        port = own.getsockname()[1]
        at = bytes([2, 0]) + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
        gloo._close_listeners([at])
        socket.create_connection(own.getsockname(), timeout=2.0).close()
        probe = (
            f"import fcntl; fcntl.lockf(open({file.name!r}, 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        )
        assert subprocess.run([sys.executable, "-c", probe], check=False).returncode
        gloo._close_listeners([at[:4] + bytes([127, 0, 0, 2])])
        with pytest.raises(TimeoutError):
            socket.create_connection(own.getsockname(), timeout=0.2)


def _received_over_gloo(sent: torch.Tensor, *, from_listener: bool) -> torch.Tensor | None:
    options: dict[str, Any] = {"token": "t" * 32, "limits": PipeLimits(silence_seconds=2.0)}
    with ExitStack() as closing:
        listening = open_pipe("gloo://127.0.0.1:0", listen=True, **options)
        closing.callback(listening.abort)
        dialling = open_pipe(listening.uri, **options)
        closing.callback(dialling.abort)
        ends = (listening, dialling) if from_listener else (dialling, listening)
        ends[0].send_tensor(sent, "k")
        with suppress(PipeError):
            return ends[1].recv_tensor("k", timeout=10.0)
    return None
