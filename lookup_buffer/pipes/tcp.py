"""`tcp://HOST:PORT`: between hosts. One end listens, the others connect to it."""

import socket
import threading
import time
from contextlib import suppress
from typing import Final

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import ConfigError, LookupBufferError, PipeBroken, PipeTimeout
from lookup_buffer.link import accept_handshake, connect
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.stream import StreamPipe

TRY_AGAIN_SECONDS: Final = 0.05
HANDSHAKE_SECONDS: Final = 5.0


class _Listening(StreamPipe):
    def __init__(self, host: str, port: int, token: str | None, limits: PipeLimits) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise PipeBroken(f"cannot listen at {host}:{port}: {error.strerror}") from error
        port = self._listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        super().__init__(f"tcp://{shown}:{port}", limits)
        self._token = token
        threading.Thread(target=self._accept, name="lb-pipe-accept", daemon=True).start()

    def close(self) -> None:
        self._stop_listening()
        super().close()

    def abort(self) -> None:
        self._stop_listening()
        super().abort()

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    stream, _ = self._listener.accept()
                except OSError:
                    return
                # On a thread of its own: who says nothing must not keep others out.
                threading.Thread(target=self._greet, args=(stream,), daemon=True).start()

    def _greet(self, stream: socket.socket) -> None:
        with suppress(LookupBufferError):
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            self.meet(link)


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    try:
        host, port = parse_tcp(uri)
    except ValueError as error:
        raise ConfigError(f"{uri!r} is not {error}") from error
    if listen:
        return _Listening(host, port, token, limits)
    deadline = time.monotonic() + timeout
    while True:
        try:
            link = connect(host, port, token=token, timeout=deadline - time.monotonic())
            break
        except PipeTimeout:
            raise
        except PipeBroken as error:
            if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
                raise PipeTimeout(f"nobody listens at {uri}: {error}") from error
            time.sleep(TRY_AGAIN_SECONDS)
    pipe = StreamPipe(uri, limits)
    pipe.meet(link)
    return pipe
