"""`shm:///PATH`: between processes of a host, whose payload goes through memory that both see.

A unix socket at PATH carries what a `tcp` pipe's connection carries, but for the bytes: each end
copies them into a memfd of its own, and the other end out of it. The two descriptors are passed
once the ends have met. So containers need to share the socket's directory and nothing else.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from lookup_buffer.errors import (
    ConfigError,
    LookupBufferError,
    PipeBroken,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.greeting import HANDSHAKE_SECONDS, Greetings
from lookup_buffer.pipes.carrier import SharedMemory
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.socket_file import SocketFile, checked_path, connect_to
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.auth import accept_handshake, request_handshake
from lookup_buffer.protocol.stream import Link

SCHEME: Final = "shm://"
_MEMORY: Final = b"M"
"""Goes with a descriptor, because some byte has to."""


class _Listening(StreamPipe):
    def __init__(self, path: Path, token: str | None, limits: PipeLimits) -> None:
        super().__init__(f"{SCHEME}{path}", limits)
        self._memory_bytes = limits.buffer_bytes
        self._token = token
        self._file = SocketFile(path)
        serving = (self._file.listener, self._greet)
        threading.Thread(
            target=Greetings().serve, args=serving, name="lb-pipe-accept", daemon=True
        ).start()

    def close(self) -> None:
        self._file.close()
        super().close()

    def abort(self) -> None:
        self._file.close()
        super().abort()

    def _greet(self, stream: socket.socket) -> None:
        with suppress(LookupBufferError):
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            self.meet(link, _shared(stream, link, self._memory_bytes, accepted=True))


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    path = checked_path(uri.removeprefix(SCHEME))
    if listen:
        return _Listening(path, token, limits)
    deadline = time.monotonic() + timeout
    stream = connect_to(path, deadline)
    left = max(deadline - time.monotonic(), 0.0)
    link = request_handshake(stream, token=token, timeout=left)
    pipe = StreamPipe(uri, limits)
    pipe.meet(link, _shared(stream, link, limits.buffer_bytes, accepted=False))
    return pipe


def _shared(stream: socket.socket, link: Link, nbytes: int, *, accepted: bool) -> SharedMemory:
    """The memory of both ends, right after the handshake over `stream`.

    Who connected speaks first, and the other one only then: nothing else can be on its way, which
    the link would have read, and lost the descriptor.

    Raises:
        PipeError, ProtocolError: the other end left, or has sent no memory that can be read.
        ConfigError: the system has not so much memory to give. The link is ended.
    """
    try:
        memory = SharedMemory(nbytes)
    except OSError as error:
        link.abort()
        raise ConfigError(f"no {nbytes} bytes to share: {error.strerror}") from error
    try:
        stream.settimeout(HANDSHAKE_SECONDS)
        if not accepted:
            socket.send_fds(stream, [_MEMORY], [memory.descriptor])
        _adopt(stream, memory)
        if accepted:
            socket.send_fds(stream, [_MEMORY], [memory.descriptor])
        stream.settimeout(None)
    except TimeoutError as error:
        _end(link, memory)
        raise PipeTimeout("the other end says nothing") from error
    except OSError as error:
        _end(link, memory)
        raise PipeBroken(f"the other end left before it was met: {error}") from error
    except BaseException:
        _end(link, memory)
        raise
    return memory


def _adopt(stream: socket.socket, memory: SharedMemory) -> None:
    flags = socket.MSG_CMSG_CLOEXEC
    said, descriptors, _, _ = socket.recv_fds(stream, len(_MEMORY), 1, flags)
    try:
        if said != _MEMORY or len(descriptors) != 1:
            raise ProtocolError("the other end sent no memory")
        memory.adopt(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _end(link: Link, memory: SharedMemory) -> None:
    link.abort()
    memory.close()
