"""TrackedConnection: a connection on which the server pushes changes of the keys read on it.

RESP3 client tracking in its default mode: the server remembers each key that this connection has
read, and reports once when the key changes, expires, is evicted or appears. Replies and pushes are
processed strictly in the order of the stream. Only this order shows whether a reply is older or
newer than a push. Runs on one asyncio loop's thread; only connecting runs on another.

A server that hangs costs the pending requests their timeout. After that, requests fail at once, and
the connection is retried in the background until the server replies.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from store.connection import TRACK, Command, Connection, ErrorReply, Lost, Push, pack
from store.errors import StoreError, StoreUnavailable
from store.server import Server

if TYPE_CHECKING:
    import asyncio

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 1.0
"""Pause after a loss, doubled each time; requests fail at once until it ends."""
RETRY_SECONDS = 60.0
"""How long after the last request a server that does not reply is retried."""

OnReply = Callable[[int, Any], None]
"""Called with each reply and its index; a failed command has an ErrorReply."""
OnDone = Callable[[StoreError | None], None]
"""Called at the end of a request with None, or with the reason why replies are missing."""


@dataclass(slots=True)
class _Request:
    deadline: float
    left: int
    on_reply: OnReply
    on_done: OnDone
    answered: int = 0


class TrackedConnection:
    """Every method runs on the loop's thread.

    `invalidated` gets the connection and names of keys, or None for all keys. `lost` is called when
    the connection ended: what was read on it is no longer tracked.
    """

    def __init__(
        self,
        loop: "asyncio.AbstractEventLoop",
        dialler: Executor,
        server: Server,
        *,
        invalidated: Callable[["TrackedConnection", Sequence[bytes] | None], None],
        lost: Callable[["TrackedConnection"], None],
    ) -> None:
        self.server = server
        self._loop = loop
        self._dialler = dialler
        self._invalidated = invalidated
        self._lost = lost
        self._connection: Connection | None = None
        self._dialling = False
        self._unsent: list[bytes] = []
        self._requests: deque[_Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._retrying = False
        """Whether the server hung, or was not reached, and has not replied since."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._last_request_at = 0.0
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._paused_until = 0.0
        self._last_error: StoreError | None = None
        self._closed = False

    def request(self, commands: Sequence[Command], on_reply: OnReply, on_done: OnDone) -> None:
        """Send commands. If the server is known to be down, call `on_done` before returning.

        Ends within the server's call timeout in every case.
        """
        self._last_request_at = now = self._loop.time()
        if self._closed or self._retrying or now < self._paused_until:
            on_done(self._last_error)
            return
        deadline = now + self.server.access.call_timeout_seconds
        self._requests.append(_Request(deadline, len(commands), on_reply, on_done))
        self._check_at(deadline)
        self._unsent.append(pack(commands))
        if self._connection is None:
            self._dial()
        elif len(self._unsent) == 1:  # else it follows what did not fit into the socket
            self._send()

    def probe(self) -> None:
        """Send a PING, unless a request is in flight.

        Detects a connection that ended without notice, as after a firewall dropped its state: it
        would push nothing any more.
        """
        if self._connection is not None and not self._requests:
            self.request([("PING",)], lambda _, __: None, lambda _: None)

    def close(self, reason: StoreError) -> None:
        """End pending and later requests with `reason`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._disconnect(reason)

    # -- the connection

    def _retry(self) -> None:
        """Connect in the background while requests come in; otherwise the next request connects."""
        self._retry_timer = None
        if self._loop.time() - self._last_request_at > RETRY_SECONDS:
            self._retrying = False
        elif self._connection is None:
            self._dial()

    def _dial(self) -> None:
        if not self._dialling:
            self._dialling = True
            self._dialler.submit(self.server.dial).add_done_callback(self._connected_elsewhere)

    def _connected_elsewhere(self, connected: "Future[Connection]") -> None:
        try:
            self._loop.call_soon_threadsafe(self._connected, connected)
        except RuntimeError:  # the loop is closed
            if not connected.cancelled() and connected.exception() is None:
                connected.result().close()

    def _connected(self, connected: "Future[Connection]") -> None:
        self._dialling = False
        error = connected.exception()
        if error is not None:
            self._disconnect(error if isinstance(error, StoreUnavailable) else _unavailable(error))
            return
        connection = connected.result()
        if self._closed or not (self._requests or self._retrying):
            connection.close()  # all requests have timed out; the next one connects again
            self._unsent.clear()
            return
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._readable)
        deadline = self._loop.time() + self.server.access.call_timeout_seconds
        if self._requests:
            deadline = self._requests[0].deadline
        self._requests.appendleft(_Request(deadline, 1, self._tracked, lambda _: None))
        self._check_at(deadline)
        self._unsent.insert(0, pack([TRACK]))
        self._send()

    def _send(self) -> None:
        """Send what fits; the rest when the socket is writable again."""
        connection = self._connection
        assert connection is not None
        packed = b"".join(self._unsent)
        try:
            left = connection.send_available(packed)
        except StoreUnavailable as error:
            self._disconnect(error)
            return
        self._unsent = [left] if left else []
        if left:
            self._loop.add_writer(connection.fileno(), self._send)
        else:
            self._loop.remove_writer(connection.fileno())

    def _tracked(self, _: int, reply: Any) -> None:
        if isinstance(reply, ErrorReply):
            self._disconnect(
                StoreUnavailable(
                    f"store {self.server.endpoint} refuses CLIENT TRACKING ON: {reply}; allow it "
                    "in the server's ACL, or switch the mirror off"
                )
            )
        else:
            self._pause_seconds = PAUSE_SECONDS_MIN
            self._paused_until = 0.0
            self._retrying = False

    def _readable(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            replies = connection.receive_available()
        except StoreUnavailable as error:
            self._disconnect(error)
            return
        for reply in replies:
            if type(reply) is Push:
                if reply[0] == b"invalidate":
                    self._invalidated(self, reply[1])
            else:
                self._answered(reply)
            if self._connection is not connection:
                return  # a callback lost or closed it

    def _answered(self, reply: Any) -> None:
        if not self._requests:
            self._disconnect(
                StoreUnavailable(f"store {self.server.endpoint}: a reply without a request")
            )
            return
        request = self._requests[0]
        index = request.answered
        request.answered += 1
        request.left -= 1
        if not request.left:
            self._requests.popleft()
        request.on_reply(index, reply)
        if not request.left:
            request.on_done(None)

    def _check_at(self, deadline: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        """The deadline of the first request has passed, or that of an earlier one."""
        self._timer = None
        if not self._requests:
            return
        deadline = self._requests[0].deadline
        if deadline > self._loop.time():
            self._check_at(deadline)
        else:
            self._disconnect(StoreUnavailable(f"store {self.server.endpoint}: no answer in time"))

    def _disconnect(self, error: StoreError) -> None:
        """Close the connection, fail all requests, and pause."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            self._loop.remove_writer(connection.fileno())
            connection.close()
        for timer in (self._timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._retry_timer = None
        self._last_error = error
        self._paused_until = self._loop.time() + self._pause_seconds
        # A cut connection does not mean that the server is down: the next request connects.
        self._retrying = self._retrying or connection is None or not isinstance(error, Lost)
        if self._retrying and not self._closed:
            self._retry_timer = self._loop.call_at(self._paused_until, self._retry)
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        self._unsent.clear()
        requests, self._requests = self._requests, deque()
        self._lost(self)
        for request in requests:
            request.on_done(error)


def _unavailable(error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"connecting failed: {error}")
