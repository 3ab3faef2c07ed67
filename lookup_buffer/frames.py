"""Frames: what a `Link` does, for those who do not mind whether a socket or something else does it.

`link.Link` is the one over a stream socket; `pipes.redis_link.RedisLink` goes by way of a database.
Threads, deadlines and errors are as `Link` says.
"""

from typing import Protocol

from lookup_buffer.protocol.framing import Frame, Header


class Frames(Protocol):
    """One may send while another receives; `close` and `abort` any thread, at any time."""

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        begun: int = 0,
    ) -> None:
        """`before` is the header of a frame without payload that goes out first, `begun` the number
        of bytes that have gone out already."""
        ...

    def recv_header(self, timeout: float) -> Frame: ...

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None: ...

    def wait_readable(self, timeout: float) -> bool: ...

    def begin(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        """Send what can be sent without waiting: so many bytes, None where that is all.

        The rest is to go out before anything else, by `send` of the same.
        """
        ...

    @property
    def failure(self) -> BaseException | None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...
