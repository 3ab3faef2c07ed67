"""Whoever listens at the socket that a client was told to use: what the client shows and maps."""

import array
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import NodeRefused, NodeUnavailable
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.shm.index import LocalIndex, RemoteIndex
from lookup_buffer.shm.memory import SEALS, SealedMemory
from nodes import MIB
from other_user import NOBODY, OtherUser
from patience import scaled

TOKEN = "the token of the whole fleet"
FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(arguments[0])
os.chmod(arguments[0], 0o777)
listener.listen()
send(True)
connection, _ = listener.accept()
send(connection.recv(65536))
receive()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """In a directory in which anyone may create files."""
    with tempfile.TemporaryDirectory(prefix="lbt-") as name:
        Path(name).chmod(0o1777)
        yield Path(name) / "node.sock"


def config(path: Path, **settings: Any) -> BufferConfig:
    return BufferConfig.of({"node_socket": path, "capacity_bytes": MIB, "token": TOKEN} | settings)


class Impostor:
    """Answers hellos as a node does, with the arena that it is told to show."""

    def __init__(self, path: Path, arena: int) -> None:
        self.hellos: list[dict[str, Any]] = []
        self._arena = arena
        self._local, self._remote = LocalIndex(MIB), RemoteIndex()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with ExitStack() as stack, suppress(OSError):
            while True:
                connection = stack.enter_context(self._listener.accept()[0])
                (frame,) = FrameDecoder().feed(connection.recv(65536))
                self.hellos.append(frame.header)
                welcome = {
                    "id": frame.header["id"], "session": 1, "node": "impostor", "boot": "boot",
                    "arena_bytes": MIB,
                }  # fmt: skip
                passed = array.array("i", [self._arena, self._local.fd, self._remote.fd])
                connection.sendmsg(
                    [encode_frame(welcome)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)]
                )

    def end(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(scaled(5.0))
        self._listener.close()
        self._local.close()
        self._remote.close()


@contextmanager
def impostor(path: Path, arena: int) -> Iterator[Impostor]:
    one = Impostor(path, arena)
    try:
        yield one
    finally:
        one.end()


def test_a_process_of_another_user_is_shown_nothing(path: Path) -> None:
    with OtherUser(LISTEN, str(path)) as other:
        assert other.receive()
        with pytest.raises(NodeRefused, match=f"user {NOBODY}.*'node_uid'"):
            LookupBuffer(config(path))
        assert other.receive() == b"", "the connection was closed before anything was said"


def test_another_user_may_be_allowed(path: Path) -> None:
    """The control; what he gets contains nothing of the token."""
    with OtherUser(LISTEN, str(path)) as other:
        assert other.receive()
        opening = threading.Thread(target=_open_in_vain, args=[config(path, node_uid=NOBODY)])
        opening.start()
        hello = FrameDecoder().feed(other.receive())[0].header
        other.send(True)
        opening.join(scaled(20.0))
        assert hello["op"] == "hello"
        assert hello["expects"].keys() == {"capacity_bytes", "store_url", "read_only"}


def _open_in_vain(config: BufferConfig) -> None:
    with suppress(NodeUnavailable):
        LookupBuffer(config).close()


def test_a_hello_says_nothing_of_secrets(path: Path) -> None:
    arena = SealedMemory("arena", MIB)
    with impostor(path, arena.fd) as node:
        secret = config(path, store_password="another secret, of the store")
        LookupBuffer(secret).close()  # the control: with these seals it is a node
        LookupBuffer(config(path, token="the token of another fleet")).close()
        first, second = ({**hello, "id": 0} for hello in node.hellos)
        assert first == second
    arena.close()


def _memfd(nbytes: int, seals: int) -> int:
    descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    "make",
    [
        lambda: _memfd(MIB, 0),
        lambda: _memfd(MIB, fcntl.F_SEAL_GROW),
        lambda: _memfd(MIB, FIXED_SIZE),
        lambda: _memfd(MIB // 2, SEALS),
        lambda: _memfd(2 * MIB, SEALS),
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open(__file__, os.O_RDONLY),
    ],
    ids=["no seals", "may shrink", "others may write", "smaller", "larger", "device", "file"],
)
def test_memory_that_could_vanish_or_change_is_not_mapped(
    path: Path, make: Callable[[], int]
) -> None:
    """An access beyond the end of a file that was truncated ends the engine by SIGBUS."""
    arena = make()
    with impostor(path, arena), pytest.raises(NodeUnavailable, match="no session"):
        LookupBuffer(config(path))
    os.close(arena)
