"""Frames: what a `Link` does, for those who do not mind whether a socket or something else does it.

`link.Link` is the one over a stream socket; `pipes.redis_link.RedisLink` goes by way of a database.
Threads, deadlines and errors are as `Link` says.
"""

from typing import Protocol

from lookup_buffer.wire import Frame, Header


class Frames(Protocol):
    """One may send while another receives; `close` and `abort` any thread, at any time."""

    def send(
        self, header: Header, payload: memoryview | None = None, *, timeout: float
    ) -> None: ...

    def recv_header(self, timeout: float) -> Frame: ...

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None: ...

    def wait_readable(self, timeout: float) -> bool: ...

    def writable(self) -> bool:
        """Whether a frame with few bytes can be sent without waiting for anything."""
        ...

    @property
    def failure(self) -> BaseException | None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...
