"""Lane: one connection on which a server tells, unasked, what has changed of what was read on it.

RESP3 client tracking in its default mode: the server remembers each key that this connection read
and says once when it changes, expires, is evicted, or appears. Replies and pushes are handed on
strictly in the order of the stream, for only so is what was read known to be older or newer than
a push. Lives on one asyncio loop's thread; only dialling happens on another.

A server that hangs costs one caller its time-out: from then on the lane dials and tries in the
background, and questions fail at once, until the server has answered it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from store.connection import TRACK, Command, Connection, Lost, Push, Refusal, pack
from store.errors import StoreError, StoreUnavailable
from store.server import Server

if TYPE_CHECKING:
    import asyncio

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 1.0
"""After a loss the lane is not dialled again at once; questions asked meanwhile fail at once."""
WANTED_SECONDS = 60.0
"""After the last question a server that does not answer is tried for so long."""

Each = Callable[[int, Any], None]
"""Told each reply as it comes, with its index; a refused command has its Refusal."""
Done = Callable[[StoreError | None], None]
"""Told at the end of a question: None, or why replies are missing."""


@dataclass(slots=True)
class _Question:
    deadline: float
    left: int
    each: Each
    done: Done
    asked: int = 0


class Lane:
    """Every method on the loop's thread.

    `invalidated` gets the lane and the names of keys, or None for all of them. `lost` is called
    when the connection ended: nothing that was read on it is known any more.
    """

    def __init__(
        self,
        loop: "asyncio.AbstractEventLoop",
        dialler: Executor,
        server: Server,
        *,
        invalidated: Callable[["Lane", Sequence[bytes] | None], None],
        lost: Callable[["Lane"], None],
    ) -> None:
        self.server = server
        self._loop = loop
        self._dialler = dialler
        self._invalidated = invalidated
        self._lost = lost
        self._connection: Connection | None = None
        self._dialling = False
        self._unsent: list[bytes] = []
        self._questions: deque[_Question] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._trying = False
        """Whether the server hung, or was not reached, and has not answered since."""
        self._try_timer: asyncio.TimerHandle | None = None
        self._asked_at = 0.0
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._paused_until = 0.0
        self._trouble: StoreError | None = None
        self._closed = False

    def ask(self, commands: Sequence[Command], each: Each, done: Done) -> None:
        """Send commands; may call `done` before it returns, where the server is known to be down.

        Ends within the server's call timeout, whatever the server does.
        """
        self._asked_at = now = self._loop.time()
        if self._closed or self._trying or now < self._paused_until:
            done(self._trouble)
            return
        deadline = now + self.server.access.call_timeout_seconds
        self._questions.append(_Question(deadline, len(commands), each, done))
        self._check_at(deadline)
        self._unsent.append(pack(commands))
        if self._connection is None:
            self._dial()
        elif len(self._unsent) == 1:  # else it goes out after what does not fit yet
            self._send()

    def probe(self) -> None:
        """Ask for a sign of life, unless something is asked anyway.

        For a connection that ends unnoticed, as a firewall's memory does, pushes nothing any more.
        """
        if self._connection is not None and not self._questions:
            self.ask([("PING",)], lambda _, __: None, lambda _: None)

    def close(self, reason: StoreError) -> None:
        """Idempotent. What was asked, or is asked later, ends in `reason`."""
        if not self._closed:
            self._closed = True
            self._lose(reason)

    # -- the connection

    def _try(self) -> None:
        """Dial in the background, as long as somebody wants to know; else the next one dials."""
        self._try_timer = None
        if self._loop.time() - self._asked_at > WANTED_SECONDS:
            self._trying = False
        elif self._connection is None:
            self._dial()

    def _dial(self) -> None:
        if not self._dialling:
            self._dialling = True
            self._dialler.submit(self.server.dial).add_done_callback(self._dialled_elsewhere)

    def _dialled_elsewhere(self, dialled: "Future[Connection]") -> None:
        try:
            self._loop.call_soon_threadsafe(self._dialled, dialled)
        except RuntimeError:  # the loop is gone, and so are we
            if not dialled.cancelled() and dialled.exception() is None:
                dialled.result().close()

    def _dialled(self, dialled: "Future[Connection]") -> None:
        self._dialling = False
        error = dialled.exception()
        if error is not None:
            self._lose(error if isinstance(error, StoreUnavailable) else _unavailable(error))
            return
        connection = dialled.result()
        if self._closed or not (self._questions or self._trying):
            connection.close()  # whoever asked has given up; the next one dials anew
            self._unsent.clear()
            return
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._readable)
        deadline = self._loop.time() + self.server.access.call_timeout_seconds
        if self._questions:
            deadline = self._questions[0].deadline
        self._questions.appendleft(_Question(deadline, 1, self._tracked, lambda _: None))
        self._check_at(deadline)
        self._unsent.insert(0, pack([TRACK]))
        self._send()

    def _send(self) -> None:
        """Send what fits; the rest when there is room again."""
        connection = self._connection
        assert connection is not None
        packed = b"".join(self._unsent)
        try:
            left = connection.send_available(packed)
        except StoreUnavailable as error:
            self._lose(error)
            return
        self._unsent = [left] if left else []
        if left:
            self._loop.add_writer(connection.fileno(), self._send)
        else:
            self._loop.remove_writer(connection.fileno())

    def _tracked(self, _: int, reply: Any) -> None:
        if isinstance(reply, Refusal):
            self._lose(
                StoreUnavailable(
                    f"store {self.server.endpoint} refuses CLIENT TRACKING ON: {reply}; allow it, "
                    "or switch the mirror off"
                )
            )
        else:
            self._pause_seconds = PAUSE_SECONDS_MIN
            self._paused_until = 0.0
            self._trying = False

    def _readable(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            replies = connection.receive_available()
        except StoreUnavailable as error:
            self._lose(error)
            return
        for reply in replies:
            if type(reply) is Push:
                if reply[0] == b"invalidate":
                    self._invalidated(self, reply[1])
            else:
                self._answered(reply)
            if self._connection is not connection:
                return  # lost, or closed, by what was just called

    def _answered(self, reply: Any) -> None:
        if not self._questions:
            self._lose(StoreUnavailable(f"store {self.server.endpoint}: a reply nobody asked for"))
            return
        question = self._questions[0]
        index = question.asked
        question.asked += 1
        question.left -= 1
        if not question.left:
            self._questions.popleft()
        question.each(index, reply)
        if not question.left:
            question.done(None)

    def _check_at(self, deadline: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        """The first question's time is up, or was; later ones have later deadlines."""
        self._timer = None
        if not self._questions:
            return
        deadline = self._questions[0].deadline
        if deadline > self._loop.time():
            self._check_at(deadline)
        else:
            self._lose(StoreUnavailable(f"store {self.server.endpoint}: no answer in time"))

    def _lose(self, error: StoreError) -> None:
        """End the connection, tell everybody, and stay away for a while."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            self._loop.remove_writer(connection.fileno())
            connection.close()
        for timer in (self._timer, self._try_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._try_timer = None
        self._trouble = error
        self._paused_until = self._loop.time() + self._pause_seconds
        # A connection that was cut says nothing bad of the server: the next question dials.
        self._trying = self._trying or connection is None or not isinstance(error, Lost)
        if self._trying and not self._closed:
            self._try_timer = self._loop.call_at(self._paused_until, self._try)
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        self._unsent.clear()
        questions, self._questions = self._questions, deque()
        self._lost(self)
        for question in questions:
            question.done(error)


def _unavailable(error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"dialling failed: {error}")
