"""The taker's side of hand-offs on other nodes: one connection to each owner node.

Requests are multiplexed, since a taker may be queued for long. When the connection ends, its
pending requests get `unreached`, and the owner gives the leases on it back. A connection that ends
or cannot be made does not mean that the node is dead; only `membership` judges that. Called by
`takes` and `announcements` on the loop's thread.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.links import HANDOFFS, Link, dial
from lookup_buffer.node.membership import Directory
from lookup_buffer.protocol.fields import is_count, is_seconds
from lookup_buffer.protocol.messages import GiveBack, Leave, Request
from lookup_buffer.times import OWNER_IDLE_SECONDS
from store import Location

AGAIN_SECONDS: Final = 0.05
AGAIN_SECONDS_MAX: Final = 0.4
AGAIN_PART_MIN: Final = 0.25
"""Jitter: a pause is at least this fraction of its maximum."""


class Answer(NamedTuple):
    """An owner's reply: `leased` or `absent` to a Take, `won` or `lost` to an Acknowledge,
    `present` or `absent` to a Holds.

    Or the fate of the request: `gone`, another boot replaced the owner, so there will never be a
    reply; `unreached`, the owner may or may not have received it.
    """

    state: str
    token: int = 0
    lease_seconds: float = 0.0
    generation: int = 0
    checksum: int = 0
    nbytes: int = 0

    @classmethod
    def parse(cls, message: object) -> tuple[int, "Answer"]:
        """(number of the request, answer) from another node's message.

        Raises:
            ProtocolError: it is not a valid answer.
        """
        if isinstance(message, dict) and is_count(message.get("id")):
            fields = {name: message.get(name, 0) for name in cls._fields}
            if all(check(fields[name]) for name, check in _CHECKS.items()):
                return message["id"], cls(**fields)
        raise ProtocolError("the message is not an owner's answer")


def _is_checksum(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "state": ["leased", "absent", "present", "won", "lost"].__contains__,
    "token": is_count,
    "lease_seconds": is_seconds,
    "generation": is_count,
    "checksum": _is_checksum,
    "nbytes": is_count,
}


GONE: Final = Answer("gone")
UNREACHED: Final = Answer("unreached")


def again_seconds(failures: int) -> float:
    """The pause before the next attempt, in seconds, after so many failures in a row.

    With jitter. Attempts at even intervals can all meet the refusals of an owner that accepts
    connections in the same rhythm. An acknowledgement then stays unanswered until it expires.
    """
    longest = min(AGAIN_SECONDS_MAX, AGAIN_SECONDS * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(AGAIN_PART_MIN, 1.0)


@dataclass(slots=True, eq=False)
class Owner:
    """One boot of another node, and the connection to it.

    The connection is made for the first request. After its end, or a failed attempt, it is made
    again for the next request, after a pause.
    """

    location: Location
    endpoint: str
    loop: asyncio.AbstractEventLoop
    connect: Callable[["Owner"], None]
    """Connect in the background, then call `connected` or `unreached`."""
    over: bool = False
    _used_until: float = 0.0
    """The end of the last lease on it, or the time of the last message."""
    _connection: Connection | None = None
    _connecting: bool = False
    _pause: asyncio.TimerHandle | None = None
    _failures: int = 0
    """Connections that failed or ended since the last reply."""
    _not_before: float = 0.0
    _asked: dict[int, tuple[Request, "asyncio.Future[Answer]"]] = field(default_factory=dict)
    """Requests without a reply; without a connection they are sent once there is one."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests, and has had none for OWNER_IDLE_SECONDS."""
        return not self._asked and self.loop.time() > self._used_until + OWNER_IDLE_SECONDS

    def ask(self, request: Request) -> "asyncio.Future[Answer]":
        """Send a request; the result is its answer, or its fate.

        Who cancels the future of a `Take` calls `leave`; a lease that was granted nevertheless is
        given back.
        """
        answer: asyncio.Future[Answer] = self.loop.create_future()
        self._asked[request.id] = request, answer
        self._use(0.0)
        if self._connection is not None:
            self._connection.send(request.to_wire())
        elif not self._connecting and self._pause is None:
            self._pause = self.loop.call_at(self._not_before, self._connect)
        return answer

    def say(self, request: Request) -> None:
        """Send a one-way message about a lease of this connection; without a connection it is
        not needed."""
        if self._connection is not None:
            self._use(0.0)
            self._connection.send(request.to_wire())

    def leave(self, number: int, take: int) -> None:
        """The taker of `take`, the id of a `Take`, waits no longer. If it has been sent, it is
        still answered."""
        if self._connection is None:
            asked = self._asked.pop(take, None)
            if asked is not None:
                _set(asked[1], UNREACHED)
        self.say(Leave(number, take))

    def connected(self, link: Link) -> None:
        self._connecting = False
        if self.over:
            link.stream.close()
            return
        self._connection = connection = Connection(
            self.loop, link.stream, self._on_message, lambda *_: self.unreached(), link.macs
        )
        for request, _ in list(self._asked.values()):
            connection.send(request.to_wire())

    def unreached(self) -> None:
        """The connection could not be made, or ended."""
        if self.over:
            return
        self._connecting, self._connection = False, None
        self._failures += 1
        self._not_before = self.loop.time() + again_seconds(self._failures)
        self._answer_all(UNREACHED)

    def end(self, answer: Answer) -> None:
        """Answer all pending requests with `answer`; no more are accepted. Idempotent."""
        if self.over:
            return
        self.over = True
        if self._pause is not None:
            self._pause.cancel()
        self._answer_all(answer)
        if self._connection is not None:
            self._connection.end(None)

    def _connect(self) -> None:
        self._pause = None
        if self._asked:
            self._connecting = True
            self.connect(self)

    def _on_message(self, connection: Connection, message: Any) -> None:
        number, answer = Answer.parse(message)
        self._failures = 0
        self._use(answer.lease_seconds)
        _, asked = self._asked.pop(number, (None, None))
        if asked is None:
            return
        if asked.cancelled() and answer.state == "leased":
            self.say(GiveBack(number, answer.token))
        _set(asked, answer)

    def _answer_all(self, answer: Answer) -> None:
        all_asked, self._asked = self._asked, {}
        for _, asked in all_asked.values():
            _set(asked, answer)

    def _use(self, seconds: float) -> None:
        self._used_until = max(self._used_until, self.loop.time() + seconds)


@dataclass(slots=True)
class Owners:
    loop: asyncio.AbstractEventLoop
    directory: Directory
    token: str | None
    _owners: dict[tuple[str, str], Owner] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _dials: "set[asyncio.Task[None]]" = field(default_factory=set)

    def next_number(self) -> int:
        """The id of the next request to an owner."""
        return next(self._numbers)

    def at(self, location: Location, endpoint: str) -> Owner:
        """The owner of `location`."""
        boot = (location.node, location.boot)
        owner = self._owners.get(boot)
        if owner is None:
            owner = self._owners[boot] = Owner(location, endpoint, self.loop, self._connect)
        return owner

    def tick(self) -> None:
        """Close the connections to dead nodes, and idle ones. To be called a few times a second."""
        for owner in list(self._owners.values()):
            if self.directory.is_replaced(owner.location):
                self._end(owner, GONE)
            elif owner.is_idle or self.directory.is_dead(owner.location):
                self._end(owner, UNREACHED)

    def close(self) -> None:
        for owner in list(self._owners.values()):
            self._end(owner, UNREACHED)
        for dialling in self._dials:
            dialling.cancel()

    def _end(self, owner: Owner, answer: Answer) -> None:
        del self._owners[owner.location.node, owner.location.boot]
        owner.end(answer)

    def _connect(self, owner: Owner) -> None:
        task = self.loop.create_task(self._dial(owner))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, owner: Owner) -> None:
        try:
            link = await dial(self.loop, owner.location, owner.endpoint, HANDOFFS, self.token)
        except (LookupBufferError, ValueError):  # the endpoint is no address
            owner.unreached()
        else:
            owner.connected(link)


def _set(asked: "asyncio.Future[Answer]", answer: Answer) -> None:
    if not asked.done():  # else its request was cancelled
        asked.set_result(answer)
