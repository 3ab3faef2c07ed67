"""A client's session: its connections, staging areas, engine rank, and the requests that wait.

A session begins with `Hello` on its main connection, the first one. It ends with `Goodbye`, or with
that connection. `Session.run` owns the tasks of its requests, and returns when all of them have
ended: only then the server gives back what the session holds. Created by `server`; used on the
loop's thread only.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from lookup_buffer.node.connection import Connection
from lookup_buffer.protocol.messages import Request
from lookup_buffer.shm.memory import Mapping

Fields = dict[str, Any]
"""What a reply says, without the request's id."""
Owner = str | int
"""An engine's id, or the session's number if the client belongs to no engine."""
P = ParamSpec("P")


class _Over(Exception):
    """Cancels what the session still waits for."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which engine a client is. `rank` None: the scheduler."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool
    """Whether a hit saves this client an encode."""
    device: str
    """The device on which it computes; empty if unknown."""


@dataclass(slots=True, eq=False)
class Session:
    id: int
    anchor: Connection
    seat: Seat | None
    connections: set[Connection] = field(default_factory=set)
    stagings: dict[Connection, Mapping] = field(default_factory=dict)
    _requests: asyncio.TaskGroup | None = None
    """None before `run`, and after `end`."""
    _says_goodbye: bool | None = None
    """None until `end`."""
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.connections.add(self.anchor)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._requests is not None

    @property
    def has_ended(self) -> bool:
        """Whether its requests are being cancelled: they pin nothing any more."""
        return self._says_goodbye is not None

    @property
    def owner(self) -> Owner:
        """The owner of its claims: all clients of an engine share them."""
        return self.id if self.seat is None else self.seat.engine_id

    @property
    def encodes(self) -> bool:
        return self.seat is not None and self.seat.encodes

    @property
    def device(self) -> str:
        return "" if self.seat is None else self.seat.device

    def ranks(self) -> range | None:
        """The ranks that must report done before a ticket of this session ends. None: the
        session releases its tickets itself."""
        return None if self.seat is None else range(self.seat.world_size)

    def tell(self, request: Request, event: Fields) -> None:
        """Send an event of `request` on the main connection."""
        self.anchor.send({"id": request.id, **event})

    async def run(self) -> bool:
        """Run requests until `end`; then cancel those that wait. Returns what `end` was called
        with."""
        try:
            if not self.has_ended:  # by what came with its Hello
                async with asyncio.TaskGroup() as self._requests:
                    await self._ending.wait()
                    raise _Over
        except* _Over:
            pass
        finally:  # also if the node ends
            self.end(says_goodbye=False)
        return self._says_goodbye is True

    def end(self, *, says_goodbye: bool) -> None:
        """Take no more requests, and close the connections. Idempotent."""
        self._requests = None
        if self._says_goodbye is None:
            self._says_goodbye = says_goodbye
        self._ending.set()
        for connection in list(self.connections):
            connection.end(None)

    def start(
        self,
        request: Callable[P, Coroutine[Any, Any, object]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> "asyncio.Task[None] | None":
        """Run a request that waits, until it ends or the session does."""
        return self.start_on(self.anchor, request, *arguments, **named)

    def start_on(
        self,
        connection: Connection,
        request: Callable[P, Coroutine[Any, Any, object]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> "asyncio.Task[None] | None":
        """As `start`; the end of that connection cancels it, too. It answers its own errors: one
        that it raises is a bug, which is reported. Returns None if the session has ended."""
        if self._requests is None:
            return None

        async def reported() -> None:
            try:
                await request(*arguments, **named)
            except Exception as error:  # noqa: BLE001 -- it must not end the session's others
                context = {"message": "a request failed; this is a bug", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

        return connection.own(self._requests.create_task(reported()))
