"""The other end of a `tcp` pipe by hand: says what it is told to, and beats meanwhile."""

import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from lookup_buffer.config import parse_tcp
from lookup_buffer.pipes import KVPipe
from lookup_buffer.protocol.auth import request_handshake
from lookup_buffer.protocol.header import TensorHeader

SECONDS = 5.0
BEAT_SECONDS = 0.3


def offer(number: int, key: bytes | None, nbytes: int) -> list[Any]:
    return ["offer", number, key, TensorHeader.for_tensor("uint8", (nbytes,)).to_fields()]


class RawEnd:
    """Of a listening `pipe`, or of what listens at an address and wants to `agree` on something."""

    def __init__(self, pipe: KVPipe | str, agree: list[Any] | None = None) -> None:
        uri = pipe if isinstance(pipe, str) else pipe.uri
        self._stream = socket.create_connection(parse_tcp(uri), SECONDS)
        self.link = request_handshake(self._stream, token=None, timeout=SECONDS)
        if agree is not None:
            self.link.send(agree, timeout=SECONDS)
            assert self.link.recv_header(SECONDS).header == agree
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat)
        self._beating.start()

    def say(self, header: list[Any], payload: bytes | None = None) -> None:
        with self._sending:
            self.link.send(header, memoryview(payload) if payload else None, timeout=SECONDS)

    def say_bytes(self, data: bytes) -> None:
        """Whatever they mean; it does not beat from then on."""
        self._ended.set()
        with self._sending:
            self._stream.sendall(data)

    def heard(self) -> list[Any]:
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
                self.say(["beat"])
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
