"""Connects the ends of a pipe over TCP: one end listens, the others connect to it.

A listening end accepts on a thread of its own, and runs each handshake on another one. A connecting
end connects and does its handshake on the caller's thread. The scheme's module supplies what
happens to a new link (`Joined`); this module knows nothing of messages.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from lookup_buffer.config import guard_listener, parse_tcp
from lookup_buffer.errors import ConfigError, LookupBufferError, PipeBroken, PipeTimeout
from lookup_buffer.pipes.pipe import PipeLimits
from lookup_buffer.pipes.stream import Memory, StreamPipe
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS, Acceptor, listening_socket
from lookup_buffer.protocol.auth import accept_handshake, connect
from lookup_buffer.protocol.stream import FramedSocket, FrameStream

TRY_AGAIN_SECONDS: Final = 0.05


Joined = Callable[[FramedSocket, float], FrameStream]
"""Turns a new link into the frames of a peer, until a deadline (a monotonic time)."""


def as_it_is(link: FramedSocket, _: float) -> FrameStream:
    return link


class _Listening(StreamPipe):
    def __init__(
        self,
        scheme: str,
        host: str,
        port: int,
        token: str | None,
        limits: PipeLimits,
        joined: Joined,
        memory: Memory | None,
    ) -> None:
        try:
            self._listener, address = listening_socket(host, port)
        except OSError as error:
            raise PipeBroken(f"cannot listen at {host}:{port}: {error.strerror}") from error
        super().__init__(f"{scheme}://{address}", limits, memory)
        self._token = token
        self._joined = joined
        serving = (self._listener, self._greet)
        threading.Thread(
            target=Acceptor().serve, args=serving, name="lb-pipe-accept", daemon=True
        ).start()

    def close(self) -> None:
        self._stop_listening()
        super().close()

    def abort(self) -> None:
        self._stop_listening()
        super().abort()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def _greet(self, stream: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        with suppress(LookupBufferError):
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            self.meet(_join(link, self._joined, deadline))


def meet(
    uri: str,
    *,
    listen: bool,
    timeout: float,
    token: str | None,
    limits: PipeLimits,
    joined: Joined = as_it_is,
    memory: Memory | None = None,
) -> StreamPipe:
    """Open an end over TCP; see `open_pipe`. The caller has checked the scheme of `uri`.

    Args:
        joined: called for each new link, on both ends; the peer uses what it returns.
        memory: where the bytes of messages lie; None means host memory.

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
        guard_listener(f"a pipe of {scheme}", host, "token", token)
        return _Listening(scheme, host, port, token, limits, joined, memory)
    deadline = time.monotonic() + timeout
    refused: PipeBroken | None = None
    while True:
        try:
            link = connect(host, port, token=token, timeout=deadline - time.monotonic())
            break
        except PipeTimeout:
            if refused is None:
                raise
        except PipeBroken as error:
            refused = error
        if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
            raise PipeTimeout(f"nobody listens at {uri}: {refused}") from refused
        time.sleep(TRY_AGAIN_SECONDS)
    pipe = StreamPipe(uri, limits, memory)
    pipe.meet(_join(link, joined, deadline))
    return pipe


def _join(link: FramedSocket, joined: Joined, deadline: float) -> FrameStream:
    try:
        return joined(link, deadline)
    except BaseException:
        link.close()
        raise
