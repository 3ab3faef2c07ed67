"""Owners: other nodes, asked for the hand-offs that were inserted there.

One link to each, kept; questions and answers on it cross, because a taker may stand in line for
long. It belongs to the loop, where `Connection` reads and writes it without waiting; only
connecting has threads. Its end is told to all who wait for an answer on it, and tells the owner
that what was taken on it is to be had again.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import LookupBufferError, MissingTensor, ProtocolError
from lookup_buffer.fields import is_count, is_seconds
from lookup_buffer.handshake import connect
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.request import Request
from lookup_buffer.sockets import watch_over
from store import Location

CONNECT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 60.0
"""A link that nobody uses for so long, beyond its leases, is ended: an owner has few to give."""
THREADS: Final = 4


class Answer(NamedTuple):
    """What an owner says: `leased` or `absent` to a Take, `won` or `lost` to an Acknowledge,
    `present` or `absent` to a Holds.

    Or what became of the question: `gone`, that boot of the node is no more; `unreached`, it may
    or may not have been heard.
    """

    state: str
    token: int = 0
    lease_seconds: float = 0.0
    generation: int = 0
    checksum: int = 0
    nbytes: int = 0

    @classmethod
    def parse(cls, message: object) -> tuple[int, "Answer"]:
        """(number of the question, answer) of what another node sent.

        Raises:
            ProtocolError: it is no answer.
        """
        if isinstance(message, dict) and is_count(message.get("id")):
            fields = {name: message.get(name, 0) for name in cls._fields}
            if all(check(fields[name]) for name, check in _CHECKS.items()):
                return message["id"], cls(**fields)
        raise ProtocolError("not an owner's answer")


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

Tell = Callable[[Answer], None]


@dataclass(slots=True, eq=False)
class Owner:
    """One boot of another node. Ends with its link, and is then replaced by another."""

    location: Location
    on_end: Callable[["Owner"], None]
    clock: Callable[[], float]
    over: bool = False
    _used_until: float = 0.0
    """The end of the last lease on it, or when something was last said."""
    _connection: Connection | None = None
    _unsent: list[dict[str, Any]] = field(default_factory=list)
    """What was asked before there was a link."""
    _asked: dict[int, Tell] = field(default_factory=dict)

    def ask(self, request: Request, tell: Tell) -> None:
        """`tell` the answer, or how the question ended, once; maybe before this returns."""
        if self.over:
            tell(UNREACHED)
            return
        self._asked[request.id] = tell
        self.say(request)

    def say(self, request: Request) -> None:
        """One-way; lost where the link is."""
        self._use(0.0)
        if self._connection is not None:
            self._connection.send(request.to_wire())
        elif not self.over:
            self._unsent.append(request.to_wire())

    @property
    def is_idle(self) -> bool:
        """Whether nobody needs it, and nobody did for long."""
        rested = self.clock() > self._used_until + IDLE_SECONDS
        return rested and not self._asked and self._connection is not None

    def connected(self, loop: asyncio.AbstractEventLoop, stream: socket.socket) -> None:
        if self.over:
            stream.close()
            return
        watch_over(stream)
        self._connection = connection = Connection(
            loop, stream, self._on_message, lambda *_: self.end(UNREACHED)
        )
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.send(message)

    def end(self, answer: Answer) -> None:
        """Answer so what is not answered. Idempotent."""
        if self.over:
            return
        self.over = True
        self._unsent.clear()
        if self._connection is not None:
            self._connection.end(None)
        self.on_end(self)
        asked, self._asked = self._asked, {}
        for tell in asked.values():
            tell(answer)

    def _on_message(self, connection: Connection, message: Any) -> None:
        number, answer = Answer.parse(message)
        self._use(answer.lease_seconds)
        tell = self._asked.pop(number, None)
        if tell is not None:
            tell(answer)

    def _use(self, seconds: float) -> None:
        self._used_until = max(self._used_until, self.clock() + seconds)


@dataclass(slots=True)
class Owners:
    loop: asyncio.AbstractEventLoop
    directory: Directory
    token: str | None
    _owners: dict[tuple[str, str], Owner] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="lb-owner")
    )

    def next_number(self) -> int:
        """For a request to an owner."""
        return next(self._numbers)

    def at(self, location: Location, endpoint: str) -> Owner:
        """The owner that `location` names; connected to in the background where it was not yet."""
        owner = self._owners.get((location.node, location.boot))
        if owner is None:
            owner = Owner(location, self._ended, self.loop.time)
            self._owners[location.node, location.boot] = owner
            self._pool.submit(self._connect, owner, endpoint)
        return owner

    def tick(self) -> None:
        """End the links of nodes that have died, and those that nobody uses. To be called a few
        times a second."""
        for owner in list(self._owners.values()):
            if owner.is_idle or self.directory.is_dead(owner.location):
                owner.end(UNREACHED)

    def close(self) -> None:
        for owner in list(self._owners.values()):
            owner.end(UNREACHED)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, owner: Owner) -> None:
        self._owners.pop((owner.location.node, owner.location.boot), None)

    def _connect(self, owner: Owner, endpoint: str) -> None:
        try:
            stream = self._stream(owner.location.boot, endpoint)
        except MissingTensor:
            call_from_thread(self.loop, owner.end, GONE)
        except (LookupBufferError, ValueError) as error:  # the endpoint is no address
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            call_from_thread(self.loop, owner.end, GONE if refused else UNREACHED)
        else:
            call_from_thread(self.loop, partial(owner.connected, self.loop, stream))

    def _stream(self, boot: str, endpoint: str) -> socket.socket:
        host, port = parse_tcp(endpoint)
        link = connect(host, port, token=self.token, timeout=CONNECT_SECONDS)
        try:
            link.send({"op": "handoffs", "boot": boot}, timeout=ANSWER_SECONDS)
            answer, _ = link.recv_header(timeout=ANSWER_SECONDS)
            if answer == {"status": "stale"}:
                raise MissingTensor(f"boot {boot} is no more")
            if answer != {"status": "ok"}:
                raise ProtocolError("not an answer to who asks for hand-offs")
            return link.detach()
        except BaseException:
            link.abort()
            raise
