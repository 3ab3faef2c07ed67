"""Connects the ends of a pipe over TCP: one end listens, the others connect to it.

A listening end accepts on a thread of its own, and runs each handshake on another one. A connecting
end connects and does its handshake on the caller's thread. A scheme with a communicator passes an
`Upgrade` for the new link.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from lookup_buffer.config import ARGUMENT_ADVICE, guard_listener, parse_tcp
from lookup_buffer.errors import ConfigError, LookupBufferError, PipeBroken, PipeTimeout
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.stream import Memory, StreamPipe
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS, Acceptor, listening_socket
from lookup_buffer.protocol.auth import PIPE, Purpose, accept_handshake, connect
from lookup_buffer.protocol.stream import FramedSocket, FrameStream

TRY_AGAIN_SECONDS: Final = 0.05


Upgrade = Callable[[FramedSocket, float], FrameStream]
"""Turns a new link into the stream of a remote end, by a deadline (a monotonic time)."""


def unchanged(link: FramedSocket, _: float) -> FrameStream:
    return link


def open_tcp_end(
    uri: str,
    *,
    listen: bool,
    timeout: float,
    token: str | None,
    limits: PipeLimits,
    upgrade: Upgrade = unchanged,
    memory: Memory | None = None,
    purpose: Purpose = PIPE,
) -> StreamPipe:
    """Open an end over TCP; see `open_pipe`. The caller has checked the scheme of `uri`.

    Args:
        upgrade: called for each new link, on both ends; the pipe uses the stream that it returns.
        memory: the memory of the messages' bytes; None means host memory.
        purpose: what a connecting end expects; a listening one accepts pipes.

    Raises:
        ConfigError: `uri` has no host and port, or listening there needs a token.
        PipeTimeout: no end listens there within `timeout` seconds.
        As `open_pipe`.
    """
    scheme, _, rest = uri.partition("://")
    try:
        host, port = parse_tcp(f"tcp://{rest}")
    except ValueError as error:
        raise ConfigError(f"{uri!r} is not an address of the form {scheme}://host:port") from error
    if listen:
        guard_listener(f"a pipe of {scheme}", host, ARGUMENT_ADVICE, token)
        return _ListeningPipe(scheme, host, port, token, limits, upgrade, memory)
    deadline = time.monotonic() + timeout
    refused: PipeBroken | None = None
    while True:
        try:
            left = deadline - time.monotonic()
            link = connect(host, port, token=token, timeout=left, purpose=purpose)
            break
        except PipeTimeout:
            if refused is None:
                raise
        except PipeBroken as error:
            refused = error
        if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
            raise PipeTimeout(f"no end listens at {uri}: {refused}") from refused
        time.sleep(TRY_AGAIN_SECONDS)
    pipe = StreamPipe(uri, limits, memory)
    pipe.add_remote_end(_upgrade(link, upgrade, deadline))
    return pipe


class _ListeningPipe(StreamPipe):
    def __init__(
        self,
        scheme: str,
        host: str,
        port: int,
        token: str | None,
        limits: PipeLimits,
        upgrade: Upgrade,
        memory: Memory | None,
    ) -> None:
        try:
            self._listener, address = listening_socket(host, port)
        except OSError as error:
            raise PipeBroken(f"cannot listen at {host}:{port}: {error.strerror}") from error
        super().__init__(f"{scheme}://{address}", limits, memory)
        self._token = token
        self._upgrade = upgrade
        Acceptor().start(self._listener, self._handshake, "lb-pipe-accept")

    def close(self) -> None:
        self._stop_listening()
        super().close()

    def abort(self) -> None:
        self._stop_listening()
        super().abort()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread

    def _handshake(self, stream: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        with suppress(LookupBufferError):
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            self.add_remote_end(_upgrade(link, self._upgrade, deadline))


def _upgrade(link: FramedSocket, upgrade: Upgrade, deadline: float) -> FrameStream:
    try:
        return upgrade(link, deadline)
    except BaseException:
        link.close()
        raise
