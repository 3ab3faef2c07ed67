"""Ends of connections that a test drives itself: of `tcp` pipes, framed sockets, foreign clients.

Hostile input is kept as files: `hostile/FOLDER/NAME.hex`, hexadecimal with a comment. `frames`
are refused by every reader of frames, `node` by a node, `pipe` by the ends of pipes, of any scheme.
Each file is everything that is sent after the handshake, on a connection of its own.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from lookup_buffer.config import parse_tcp
from lookup_buffer.pipes import KVPipe
from lookup_buffer.protocol.auth import LANE, PIPE, request_handshake
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.stream import FramedSocket

SECONDS = 5.0
BEAT_SECONDS = 0.3


def offer(number: int, key: bytes | None, nbytes: int) -> list[Any]:
    return ["offer", number, key, TensorHeader.for_tensor("uint8", (nbytes,)).to_fields()]


class RawEnd:
    """Of a listening `pipe`, or of a pool that listens at an address and wants to `agree` on
    something."""

    def __init__(self, pipe: KVPipe | str, agree: list[Any] | None = None) -> None:
        uri, purpose = (pipe, LANE) if isinstance(pipe, str) else (pipe.uri, PIPE)
        self._stream = socket.create_connection(parse_tcp(uri), SECONDS)
        self.link = request_handshake(self._stream, token=None, timeout=SECONDS, purpose=purpose)
        if agree is not None:
            self.link.send(agree, timeout=SECONDS)
            assert self.link.recv_header(SECONDS).header == agree
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat)
        self._beating.start()

    def send(self, header: list[Any], payload: bytes | None = None) -> None:
        with self._sending:
            self.link.send(header, memoryview(payload) if payload else None, timeout=SECONDS)

    def send_bytes(self, data: bytes) -> None:
        """Whatever they mean; it does not beat from then on."""
        self._ended.set()
        with self._sending:
            self._stream.sendall(data)

    def receive(self) -> list[Any]:
        """The next frame that is not a beat; none of those that come here has bytes."""
        while (header := self.link.recv_header(SECONDS).header) == ["beat"]:
            pass
        assert isinstance(header, list)
        return header

    def hung_up(self) -> bool:
        """Whether the pipe ends this connection, whatever it still says."""
        deadline = time.monotonic() + 2 * SECONDS
        self._stream.settimeout(SECONDS)
        try:
            while self._stream.recv(65536):
                if time.monotonic() > deadline:
                    return False
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and not self.link.closed:
            try:
                self.send(["beat"])
            except Exception:  # the pipe under test ended; what that means the test says
                return

    def end(self) -> None:
        self._ended.set()
        self._beating.join()
        self.link.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


MIB = 1 << 20
TIMEOUT = 20.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), timeout=TIMEOUT)
        other, _ = listener.accept()
    return one, other


PAIRS: dict[str, Callable[[], tuple[socket.socket, socket.socket]]] = {
    "tcp": tcp_pair,
    "unix": socket.socketpair,
}


@pytest.fixture(params=sorted(PAIRS))
def links(request: pytest.FixtureRequest) -> Iterator[tuple[FramedSocket, FramedSocket]]:
    one, other = map(FramedSocket, PAIRS[request.param]())
    yield one, other
    one.abort()
    other.abort()


@pytest.fixture
def raw() -> Iterator[tuple[FramedSocket, socket.socket]]:
    """A link, and the other end as a bare socket that can misbehave."""
    one, other = tcp_pair()
    link = FramedSocket(one)
    yield link, other
    link.abort()
    other.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def pattern(nbytes: int) -> memoryview:
    return memoryview((b"0123456789abcde" * (nbytes // 15 + 1))[:nbytes])


_ROOT = Path(__file__).parent / "hostile"


def hostile(*folders: str) -> dict[str, bytes]:
    """The bytes of these folders' files, by `FOLDER/NAME`."""
    return {
        f"{folder}/{path.stem}": _bytes_of(path)
        for folder in folders
        for path in sorted((_ROOT / folder).glob("*.hex"))
    }


def _bytes_of(path: Path) -> bytes:
    lines = path.read_text().splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))
