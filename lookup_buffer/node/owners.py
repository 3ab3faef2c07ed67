"""Hand-offs between two nodes: both ends of the connection from a taker's node to the owner node.

Requests are multiplexed, since a taker may be queued for long. When the connection ends, its
pending requests get `unreached`, and the owner gives the leases on it back. A connection that ends
or cannot be made does not mean that the node is dead; only `membership` judges that.

`Owners` are queried by `takes` and `announcements`; `Askers` are the owner's side, admitted by
`peers`. All runs on the loop's thread.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs, Lease
from lookup_buffer.node.links import HANDOFFS, Link, dial
from lookup_buffer.node.membership import Directory
from lookup_buffer.protocol.fields import is_count, is_seconds
from lookup_buffer.protocol.messages import (
    Acknowledge,
    GiveBack,
    Holds,
    Leave,
    Request,
    Take,
    parse,
)
from lookup_buffer.times import CALL_SECONDS, NODE_SHARE, OWNER_IDLE_SECONDS
from store import Location

AGAIN_SECONDS: Final = 0.05
AGAIN_SECONDS_MAX: Final = 0.4
AGAIN_PART_MIN: Final = 0.25
"""Jitter: a pause is at least this fraction of its maximum."""
TAKES_MAX: Final = 4096
"""Bound on the queued takers of one other node."""


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


# -- the taker's side


@dataclass(slots=True, eq=False)
class Owner:
    """One boot of another node, and the connection to it.

    The connection is made for the first request. After its end, or a failed attempt, it is made
    again for the next request, after a pause.
    """

    location: Location
    endpoint: str
    loop: asyncio.AbstractEventLoop
    token: str | None
    _used_until: float = 0.0
    """The end of the last lease on it, or the time of the last message."""
    _connection: Connection | None = None
    _connecting: "asyncio.Task[None] | None" = None
    _failures: int = 0
    """Connections that failed or ended since the last reply."""
    _not_before: float = 0.0
    _transfers: int = 0
    """Of items that are leased on it."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _asked: dict[int, tuple[Request, "asyncio.Future[Answer]"]] = field(default_factory=dict)
    """Requests without a reply; without a connection they are sent once there is one."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests or leases, and has had none for OWNER_IDLE_SECONDS."""
        is_used = self._asked or self._transfers
        return not is_used and self.loop.time() > self._used_until + OWNER_IDLE_SECONDS

    async def take(self, address: QualifiedKey, until: float) -> Answer:
        """Take the item at `address`, or queue for it until `until`, by the loop's clock.

        At the deadline the owner is sent `Leave`, and answers that: only this shows that it did
        receive the Take. A lease that no one here gets is given back.
        """
        patience = max(0.0, until - self.loop.time())
        request = Take(next(self._numbers), *address, patience)
        asked = self._ask(request)
        leave = self.loop.call_at(until, self._leave, request.id) if patience else None
        try:
            async with asyncio.timeout_at(until + NODE_SHARE * CALL_SECONDS):
                return await asked
        except TimeoutError:
            if not asked.cancelled():
                return asked.result()
            self._leave(request.id)
            return UNREACHED
        except asyncio.CancelledError:
            if asked.cancelled():
                self._leave(request.id)
            elif asked.result().state == "leased":  # it came in the same turn
                self.give_back(asked.result().token)
            raise
        finally:
            if leave is not None:
                leave.cancel()

    @contextmanager
    def transferring(self, lease_seconds: float) -> Iterator[None]:
        """Keep the connection during a transfer, however long it takes, and for the lease that
        its taker has then: with the connection the lease would end."""
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1
            self._use(lease_seconds)

    def acknowledge(self, token: int) -> "asyncio.Future[Answer]":
        return self._ask(Acknowledge(next(self._numbers), token))

    def holds(self, address: QualifiedKey) -> "asyncio.Future[Answer]":
        """Whether it has the item: present or absent."""
        return self._ask(Holds(next(self._numbers), *address))

    def give_back(self, token: int) -> None:
        """Without a connection it is not needed: with its end the owner has the item back."""
        self._say(GiveBack(next(self._numbers), token))

    def end(self, answer: Answer) -> None:
        """Answer all pending requests with `answer`, and close the connection. Idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._answer_all(answer)
        if self._connection is not None:
            self._connection.end(None)

    def _ask(self, request: Request) -> "asyncio.Future[Answer]":
        """Send a request; the result is its answer, or its fate."""
        answer: asyncio.Future[Answer] = self.loop.create_future()
        self._asked[request.id] = request, answer
        self._use(0.0)
        if self._connection is not None:
            self._connection.send(request.to_wire())
        elif self._connecting is None or self._connecting.done():
            self._connecting = self.loop.create_task(self._connect())
        return answer

    def _say(self, request: Request) -> None:
        if self._connection is not None:
            self._use(0.0)
            self._connection.send(request.to_wire())

    def _leave(self, take: int) -> None:
        """The taker of `take`, the id of a `Take`, waits no longer. If it has been sent, it is
        still answered."""
        if self._connection is None:
            _, asked = self._asked.pop(take, (None, None))
            if asked is not None:
                _set(asked, UNREACHED)
        self._say(Leave(next(self._numbers), take))

    async def _connect(self) -> None:
        if (pause := self._not_before - self.loop.time()) > 0:
            await asyncio.sleep(pause)
        if not self._asked:
            return
        try:
            link = await dial(self.loop, self.location, self.endpoint, HANDOFFS, self.token)
        except (LookupBufferError, ValueError):  # the endpoint is no address
            self._unreached()
            return
        self._connection = connection = Connection(
            self.loop, link.stream, self._on_message, lambda *_: self._unreached(), link.macs
        )
        for request, _ in list(self._asked.values()):
            connection.send(request.to_wire())

    def _unreached(self) -> None:
        """The connection could not be made, or ended."""
        self._connection = None
        self._failures += 1
        self._not_before = self.loop.time() + again_seconds(self._failures)
        self._answer_all(UNREACHED)

    def _on_message(self, connection: Connection, message: Any) -> None:
        number, answer = Answer.parse(message)
        self._failures = 0
        self._use(answer.lease_seconds)
        _, asked = self._asked.pop(number, (None, None))
        if asked is None:
            return
        if asked.cancelled() and answer.state == "leased":
            self.give_back(answer.token)
        _set(asked, answer)

    def _answer_all(self, answer: Answer) -> None:
        all_asked, self._asked = self._asked, {}
        for _, asked in all_asked.values():
            _set(asked, answer)

    def _use(self, seconds: float) -> None:
        self._used_until = max(self._used_until, self.loop.time() + seconds)


def _set(asked: "asyncio.Future[Answer]", answer: Answer) -> None:
    if not asked.done():  # else its request was cancelled
        asked.set_result(answer)


@dataclass(slots=True)
class Owners:
    loop: asyncio.AbstractEventLoop
    directory: Directory
    token: str | None
    _owners: dict[tuple[str, str], Owner] = field(default_factory=dict)

    def at(self, location: Location, endpoint: str) -> Owner:
        """The owner of `location`. To be used at once: an idle one is replaced."""
        boot = (location.node, location.boot)
        owner = self._owners.get(boot)
        if owner is None:
            owner = self._owners[boot] = Owner(location, endpoint, self.loop, self.token)
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

    def _end(self, owner: Owner, answer: Answer) -> None:
        del self._owners[owner.location.node, owner.location.boot]
        owner.end(answer)


# -- the owner's side


@dataclass(slots=True)
class Askers:
    """The other nodes whose clients take hand-offs of this one."""

    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    counters: Counters
    _takes: dict[Connection, dict[int, "asyncio.Task[None]"]] = field(default_factory=dict)
    """The queued takers of each node, by the id of their `Take`."""

    def __len__(self) -> int:
        """The number of their connections."""
        return len(self._takes)

    def admit(self, link: Link) -> Connection:
        """Serve requests on `link` until it ends."""
        connection = Connection(self.loop, link.stream, self._on_message, self._ended, link.macs)
        self._takes[connection] = {}
        return connection

    def close(self) -> None:
        for connection in list(self._takes):
            connection.end(None)

    def _on_message(self, connection: Connection, message: Any) -> None:
        match parse(message):
            case Take() as request:
                self._take(connection, request)
            case Acknowledge() as request:
                won = self.handoffs.acknowledge(request.token)
                connection.send({"id": request.id, "state": "won" if won else "lost"})
            case GiveBack() as request:
                self.handoffs.give_back(request.token)
            case Holds() as request:
                held = self.handoffs.arena.holds((request.namespace, request.key))
                connection.send({"id": request.id, "state": "present" if held else "absent"})
            case Leave() as request:
                take = self._takes[connection].pop(request.take, None)
                if take is not None:
                    take.cancel()
                    connection.send({"id": request.take, "state": "absent"})
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    def _ended(self, connection: Connection, error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self.counters.add("protocol_errors")
        self._takes.pop(connection, None)
        self.handoffs.end(connection)

    def _take(self, connection: Connection, request: Take) -> None:
        takes = self._takes[connection]
        if len(takes) >= TAKES_MAX:
            raise ProtocolError(f"more than {TAKES_MAX} takers of one node are queued")
        lease = self.handoffs.take((request.namespace, request.key), connection)
        if lease is not None or not request.wait_seconds:
            connection.send(_reply(request, lease))
            return
        take = connection.start(self._queue(connection, request))
        if take is not None:
            takes[request.id] = take

    async def _queue(self, connection: Connection, request: Take) -> None:
        lease = await self.handoffs.queue((request.namespace, request.key), connection)
        self._takes[connection].pop(request.id, None)
        connection.send(_reply(request, lease))


def _reply(request: Take, lease: Lease | None) -> dict[str, Any]:
    if lease is None:
        return {"id": request.id, "state": "absent"}
    item = lease.held.item
    return {
        "id": request.id,
        "state": "leased",
        "token": lease.token,
        "lease_seconds": lease.seconds,
        "generation": item.generation,
        "checksum": item.checksum,
        "nbytes": item.nbytes,
    }
