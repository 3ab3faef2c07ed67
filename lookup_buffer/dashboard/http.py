"""The HTTP server: uvicorn, with bounds on what a client may hold.

uvicorn bounds neither the wait for a request nor that for a client that does not read. Here a
connection serves one request, and has EXCHANGE_SECONDS for the request to arrive, for its answer to
be read, and for each pause of a stream's reader. At the connection limit the oldest connection
without a request is closed; if there is none, the new one is.
"""

import asyncio
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from lookup_buffer.dashboard.app import HEADERS, REQUEST_BYTES_MAX

CONNECTIONS_MAX = 32
PIECE_BYTES = 1 << 10
UNREAD_BYTES_MAX = 64 << 10
"""After a request or a refusal, at most this much further input is read: closing a connection with
unread bytes would discard the answer."""
EXCHANGE_SECONDS = 5.0


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.began_at = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_left: int | None = None
        """Set after a request or a refusal."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._abort_after_exchange()
        self._make_room()

    def _make_room(self) -> None:
        others = (each for each in self.connections if isinstance(each, BoundedProtocol))
        open_ones = [each for each in others if not each.transport.is_closing()]
        if len(open_ones) > CONNECTIONS_MAX:
            idle = [each for each in open_ones if each is not self and each.is_idle]
            min(idle, key=lambda each: each.began_at, default=self).transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return self._answer is None or self._answer.response_complete

    @property
    def _answer(self) -> RequestResponseCycle | None:
        """To the request, once that is there."""
        return self.cycle

    def data_received(self, data: bytes) -> None:
        """No page has a body: what comes after a request is not looked at. Of what comes with it
        h11 would make an event for each chunk, of one byte."""
        while data and self._unread_left is None:
            super().data_received(data[:PIECE_BYTES])
            data = data[PIECE_BYTES:]
            if not self.is_idle:
                self._cancel_deadline()
                self._unread_left = UNREAD_BYTES_MAX
        if self._unread_left is not None:
            self._unread_left -= len(data)
            if self._unread_left < 0:
                self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may close its sending side before it has its answer."""
        if self._answer is None and self._unread_left is None:
            try:
                self.conn.receive_data(b"")
                self.conn.next_event()
            except h11.RemoteProtocolError:  # in the middle of a request
                self.send_400_response("")
        return not self.is_idle

    def send_400_response(self, msg: str) -> None:
        """The status that h11 suggests, with our headers; the client may still be sending."""
        if self._answer is not None:  # it came after a valid request, whose answer is under way
            self._answer.disconnected = True
            self.transport.abort()
            return
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        body = b"this is not a valid HTTP request\n"
        headers = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        events = (
            h11.Response(status_code=status, headers=list((headers | HEADERS).items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.write_eof()
        self._unread_left = UNREAD_BYTES_MAX

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._abort_after_exchange()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after_exchange()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.is_idle:
            self._cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _abort_after_exchange(self) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(EXCHANGE_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def server_of(app: Any) -> uvicorn.Server:
    """It logs by `logging` as it is configured, and writes no line for a request."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=REQUEST_BYTES_MAX,
            backlog=CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
        )
    )
