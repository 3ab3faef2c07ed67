"""TrackedConnection: a connection on which the server pushes changes of the keys read on it.

RESP3 client tracking in its default mode: the server remembers each key that this connection has
read, and reports once when the key changes, expires, is evicted or appears. Replies and pushes are
processed strictly in the order of the stream. Only this order shows whether a reply is older or
newer than a push.

A late answer is not a lost connection. What was read stays valid, since the server still sends its
pushes before any later reply. Requests fail at once from then until the server replies. Meanwhile a
second connection is dialled: if the server answers there and not here, this one is dead.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection

from store.errors import StoreError, StoreRefused, StoreUnavailable
from store.replies import (
    FAILURES,
    REFUSALS,
    Command,
    Reply,
    abort,
    pack,
    parser_of,
    read_replies,
    text_of,
    writer_of,
)
from store.server import Incarnation, Server

TRACK: Final[Command] = ("CLIENT", "TRACKING", "ON")
"""After it the server pushes changes of what is read on the connection."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 1.0
"""Pause after a loss, doubled each time; requests fail at once until it ends."""
RETRY_SECONDS = 60.0
"""How long after the last request a server that does not reply is retried."""

OnReply = Callable[[int, Reply], None]
"""Called with each reply and its index; a failed command has a refusal."""
OnDone = Callable[[StoreError | None], None]
"""Called at the end of a request with None, or with the reason why replies are missing."""
_PUSHED: Final = object()


@dataclass(slots=True, eq=False)
class _Request:
    deadline: float
    left: int
    on_reply: OnReply
    on_done: OnDone
    answered: int = 0
    is_late: bool = False
    """Its `on_done` was called. The replies still arrive and are processed in their order."""


class TrackedConnection:
    """Every method runs on the loop's thread.

    `invalidated` gets the connection and names of keys, or None for all keys. `lost` is called when
    the connection ended: what was read on it is no longer tracked.
    """

    def __init__(
        self,
        server: Server,
        *,
        invalidated: Callable[["TrackedConnection", Sequence[bytes] | None], None],
        lost: Callable[["TrackedConnection"], None],
    ) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._invalidated = invalidated
        self._lost = lost
        self._connection: AbstractConnection | None = None
        self._incarnation = server.incarnation
        """Of the server when this connection logged in."""
        self._unsent: list[bytes] = []
        """Until there is a connection, or until the next turn of the loop."""
        self._has_sent = False
        """In this turn of the loop: further requests are sent together in the next one."""
        self._requests: deque[_Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_down = False
        """Whether it did not answer in time, or was not reached, and has not answered since."""
        self._needs_dial = asyncio.Event()
        self._needs_dial.set()  # it takes several round trips, which no request should wait for
        self._last_request_at = self._loop.time()
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._paused_until = 0.0
        self._last_error: StoreError = StoreUnavailable(f"store {server.endpoint}: not connected")
        self._closed = False
        self._has_reported = False
        self._reading: asyncio.Task[None] | None = None
        """While connected."""
        self._dialling = self._loop.create_task(self._keep_dialling())
        self._dialling.add_done_callback(self._report)

    def request(self, commands: Sequence[Command], on_reply: OnReply, on_done: OnDone) -> None:
        """Send commands. If the server is known to be down, call `on_done` before returning.

        Ends within the server's call timeout in every case.
        """
        self._last_request_at = now = self._loop.time()
        if self._closed or self._is_down or now < self._paused_until:
            on_done(self._last_error)
            return
        deadline = now + self.server.access.call_timeout_seconds
        self._add(_Request(deadline, len(commands), on_reply, on_done), commands)
        if self._connection is None:
            self._needs_dial.set()

    def probe(self) -> None:
        """Send a PING, unless a request is in flight.

        Detects a connection that ended without notice, as after a firewall dropped its state: it
        would push nothing any more.
        """
        if self._connection is not None and self._incarnation != self.server.incarnation:
            self._disconnect(StoreUnavailable(f"store {self.server.endpoint}: it was replaced"))
            self._note_up()  # another connection reached it: no pause
        elif self._connection is not None and not self._requests:
            deadline = self._loop.time() + self.server.access.call_timeout_seconds
            self._add(_Request(deadline, 1, lambda _, __: None, lambda _: None), [("PING",)])

    def close(self, reason: StoreError) -> None:
        """End pending and later requests with `reason`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._dialling.cancel()
            self._disconnect(reason)

    # -- requests

    def _add(self, request: _Request, commands: Sequence[Command]) -> None:
        self._unsent.append(pack(commands))
        self._requests.append(request)
        self._check_at(request.deadline)
        if not self._has_sent:
            self._has_sent = True
            self._loop.call_soon(self._next_turn)
            self._send_unsent()

    def _next_turn(self) -> None:
        self._has_sent = False
        self._send_unsent()

    def _send_unsent(self) -> None:
        if self._unsent and self._connection is not None:
            unsent, self._unsent = self._unsent, []
            writer_of(self._connection).write(b"".join(unsent))

    def _answered(self, reply: Reply) -> None:
        if self._is_down:
            self._note_up()
        if not self._requests:
            raise StoreUnavailable(f"store {self.server.endpoint}: a reply without a request")
        request = self._requests[0]
        index = request.answered
        request.answered += 1
        request.left -= 1
        if not request.left:
            self._requests.popleft()
        try:
            request.on_reply(index, reply)
        finally:
            if not request.left and not request.is_late:
                request.on_done(None)

    def _check_at(self, deadline: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        """The deadline of the first request has passed, or that of an earlier one."""
        self._timer = None
        late = [one for one in self._requests if not one.is_late]
        if not late:
            return
        if late[0].deadline > self._loop.time():
            self._check_at(late[0].deadline)
            return
        self._is_down = True
        self._last_error = StoreUnavailable(f"store {self.server.endpoint}: no answer in time")
        self._needs_dial.set()
        if self._connection is None:
            self._drop_requests(self._last_error)
            return
        for one in late:
            one.is_late = True
        for one in late:
            one.on_done(self._last_error)

    # -- the connection

    async def _keep_dialling(self) -> None:
        """Connect at once, when a request needs it, and again while the server does not answer."""
        while True:
            await self._needs_dial.wait()
            self._needs_dial.clear()
            await asyncio.sleep(self._paused_until - self._loop.time())
            if self._connection is not None and not self._is_down:
                continue
            if self._loop.time() - self._last_request_at > RETRY_SECONDS:
                if self._connection is not None:  # what was read on it may be old by now
                    self._disconnect(self._last_error)
                self._is_down = False  # unused: the next request dials
                continue
            try:
                connection, incarnation = await dial_tracked(self.server)
            except StoreError as error:
                if self._connection is not None and not self._is_down:
                    continue  # it answered meanwhile
                self._is_down = True
                self._pause(error)
                if self._connection is None:
                    self._drop_requests(error)
                self._needs_dial.set()
                continue
            try:
                is_needed = self._connection is None or await self._is_dead()
            except BaseException:  # this connection has no other owner yet
                await connection.disconnect(nowait=True)
                raise
            if is_needed:
                self._use(connection, incarnation)
            else:
                await connection.disconnect(nowait=True)

    def _report(self, task: asyncio.Task[None]) -> None:
        """Of a fault of the code. What is not read any more is not kept, either."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log("a connection of the mirror failed", error)
            if task is self._reading:
                self._disconnect(self.server.unavailable(error))

    def _log(self, message: str, error: BaseException) -> None:
        """Once: who is between this process and the server could fill the disk with it."""
        if not self._has_reported:
            self._has_reported = True
            self._loop.call_exception_handler({"message": message, "exception": error})

    async def _is_dead(self) -> bool:
        """Whether nothing arrives on this connection, although the server answers on another."""
        if self._is_down:
            await asyncio.sleep(self.server.access.call_timeout_seconds / 2)
        return self._is_down

    def _use(self, connection: AbstractConnection, incarnation: Incarnation) -> None:
        if self._connection is not None:
            self._disconnect(self._last_error)
        self._connection = connection
        self._incarnation = incarnation
        self._note_up()
        parser_of(connection).set_invalidation_push_handler(self._pushed)
        self._reading = self._loop.create_task(self._read(connection))
        self._reading.add_done_callback(self._report)
        self._send_unsent()

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            parser = parser_of(connection)
            while True:
                try:
                    reply = await parser.read_response(push_request=True)
                except REFUSALS as error:
                    reply = error
                if isinstance(reply, StoreError):
                    raise reply
                if reply is not _PUSHED:
                    self._answered(reply)
        except (*FAILURES, StoreError) as error:
            if self._connection is connection:
                self._disconnect(self.server.unavailable(error))

    async def _pushed(self, push: Sequence[Any]) -> object:
        try:
            self._invalidated(self, push[1])
        except Exception as error:  # noqa: BLE001 -- redis-py would take it for a reply, and all later ones for the next
            self._log("a push failed", error)
            return StoreUnavailable(f"store {self.server.endpoint}: a garbled push")
        return _PUSHED

    def _disconnect(self, error: StoreError) -> None:
        """Close the connection, fail all requests, and pause."""
        connection, self._connection = self._connection, None
        reading, self._reading = self._reading, None
        if reading is not None and reading is not asyncio.current_task(self._loop):
            reading.cancel()
        if connection is not None:
            abort(connection)
            connection._close()
        self._pause(error)
        self._lost(self)
        self._drop_requests(error)

    def _note_up(self) -> None:
        self._is_down = False
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._paused_until = 0.0

    def _pause(self, error: StoreError) -> None:
        self._last_error = error
        self._paused_until = self._loop.time() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    def _drop_requests(self, error: StoreError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unsent.clear()
        requests, self._requests = self._requests, deque()
        for request in requests:
            if not request.is_late:
                request.on_done(error)


async def dial_tracked(server: Server) -> tuple[AbstractConnection, Incarnation]:
    """A connection with tracking on, and the incarnation of the server that it reached.

    Raises StoreUnavailable; StoreRefused if it is not allowed.
    """
    incarnation = server.incarnation

    def logged_in(run_id: str) -> None:
        nonlocal incarnation
        server.logged_in(run_id)
        # Without a run id, a reset since the dial began may concern this connection.
        incarnation = (server.incarnation[0], incarnation[1])

    try:
        connection = server.access.connection(server.endpoint, "mirror", logged_in, protocol=3)
        try:
            async with asyncio.timeout(server.access.connect_timeout_seconds):
                await connection.connect()
                await connection.send_packed_command(pack([TRACK]), check_health=False)
                (reply,) = await read_replies(connection, 1)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
    except (*FAILURES, TimeoutError) as error:
        raise server.unavailable(error) from error
    if isinstance(reply, REFUSALS):
        await connection.disconnect(nowait=True)
        raise StoreRefused(
            f"store {server.endpoint} refuses CLIENT TRACKING ON: {text_of(reply)}; allow "
            "it in the server's ACL, or switch the mirror off"
        ) from reply
    return connection, incarnation
