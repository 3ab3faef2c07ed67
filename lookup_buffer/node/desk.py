"""The dispatch of clients' requests: one method call for each type of message.

Called by `control` on the loop's thread. What can be answered at once is; a read that needs the
store or a transfer is a coroutine, which the end of its connection cancels.
"""

import asyncio
import functools
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lookup_buffer.errors import (
    BufferFull,
    LookupBufferError,
    MissReason,
    ProtocolError,
)
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Lanes
from lookup_buffer.node.insert import Inserts
from lookup_buffer.node.prefetch import Prefetches, miss, tell
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.node.takes import Taken, Takes
from lookup_buffer.node.transfer import Fetched
from lookup_buffer.protocol.messages import (
    Acknowledge,
    Claim,
    ClaimAll,
    Contains,
    Describe,
    Done,
    Encoding,
    GiveBack,
    Insert,
    Offer,
    OpenPool,
    Prefetch,
    Prepare,
    Received,
    Release,
    ReleaseClaim,
    Request,
    Retract,
    Select,
    Stats,
    Take,
    Touch,
    Unclaim,
    error_reply,
)

R = TypeVar("R", bound=Request)


def _answers_errors(
    request: Callable[["Desk", Connection, Session, R], Awaitable[None]],
) -> Callable[["Desk", Connection, Session, R], Coroutine[Any, Any, None]]:
    """A request that waits, and whose errors the client raises."""

    @functools.wraps(request)
    async def answered(desk: "Desk", connection: Connection, session: Session, asked: R) -> None:
        try:
            await request(desk, connection, session, asked)
        except LookupBufferError as error:
            connection.send(error_reply(asked.id, error))

    return answered


@dataclass(slots=True)
class Desk:
    loop: asyncio.AbstractEventLoop
    boot: str
    shelf: Shelf
    reads: Reads
    takes: Takes
    registrar: Registrar
    claims: Claims
    counters: Counters
    inserts: Inserts
    lanes: Lanes
    prefetches: Prefetches = field(init=False)
    _attached: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Engine → session → rank, of its workers that have mapped the arena. By session: a worker
    may attach again before the end of its previous session was detected."""

    def __post_init__(self) -> None:
        self.prefetches = Prefetches(
            self.loop, self.reads, self.lanes, self.claims, self.counters, self._try_hold
        )  # fmt: skip

    # -- sessions

    def attach(self, session: Session) -> None:
        if session.seat is not None and session.seat.rank is not None:
            self._attached[session.seat.engine_id][session.id] = session.seat.rank

    def detach(self, session: Session) -> None:
        if session.seat is not None and session.seat.rank is not None:
            sessions = self._attached[session.seat.engine_id]
            sessions.pop(session.id, None)
            if not sessions:
                del self._attached[session.seat.engine_id]
        self.lanes.close(session)
        self.takes.end(session)
        self.claims.end(session)

    def holds_pins(self, session: Session) -> bool:
        return self.shelf.holds_pins(session.id) or self.lanes.holds(session)

    def release_all(self, session: Session) -> None:
        self.shelf.release_all(session.id)
        self.lanes.release_all(session)

    # -- requests

    def handle(  # noqa: C901, PLR0912, PLR0915 -- a case for each message, a call or two each
        self, connection: Connection, session: Session, request: Request
    ) -> None:
        """Answer `request`, now or later.

        Raises:
            LookupBufferError: the caller sends it as the reply.
        """
        match request:
            case Select():
                self._select(connection, session, request)
            case Take():
                self._take(connection, session, request)
            case Acknowledge():
                self._acknowledge(connection, session, request)
            case GiveBack():
                self.takes.give_back(session, request.token)
            case Prefetch():
                self.prefetches.prefetch(session, request)
            case Release():
                self.shelf.release(request.tickets, session.id)
                self.lanes.release(request.tickets, session)
            case Touch():
                self._touch(session, request)
            case Done():
                self.shelf.done(request.tickets, request.rank)
                self.lanes.done(request.tickets, request.rank)
            case Contains():
                self._contains(connection, request)
            case Insert():
                self.inserts.insert(connection, session, request)
            case Claim():
                connection.start(self._claim(connection, session, request))
            case ReleaseClaim():
                released = self.claims.release(session, request)
                connection.start(self._tell_released(connection, request, released))
            case ClaimAll():
                self.claims.claim_all(session, request, functools.partial(tell, session, request))
            case Encoding():
                self.claims.encoding(session, request)
            case Unclaim():
                self.claims.unclaim(session, request)
            case OpenPool():
                self.lanes.open(session, request)
            case Prepare():
                self.lanes.pools.prepare(session, request)
            case Offer():
                self.lanes.pools.offer(session, request)
            case Retract():
                self.lanes.pools.retract(session, request)
            case Received():
                self.lanes.received(session, request)
            case Describe():
                self.registrar.describe(request.namespace, request.parts)
            case Stats():
                _reply(connection, request, {"stats": self.stats()})
            case _:
                raise ProtocolError(f"{request.op} out of turn")

    def stats(self) -> dict[str, int]:
        """Gauges and counters."""
        return {
            **asdict(self.shelf.gauges()),
            "lane_tickets": self.lanes.count_tickets(),
            "unpublished": self.registrar.pending(),
            "store_up": int(self.registrar.store_up),
            "open_files": len(os.listdir("/proc/self/fd")),
            **self.counters.totals(),
        }

    # -- reads

    def _touch(self, session: Session, request: Touch) -> None:
        for key, count in request.reads.items():
            address = (request.namespace, key)
            item = self.shelf.touch(address)
            if item is not None:
                self.counters.hit(item, count)
                self.counters.spare(session.encodes * count)

    def _contains(self, connection: Connection, request: Contains) -> None:
        present, unknown = self.reads.contains(request)
        if unknown:
            connection.start(self._look_up(connection, request, present, unknown))
        else:
            _reply(connection, request, {"present": present})

    async def _look_up(
        self, connection: Connection, request: Contains, present: list[bool], unknown: list[int]
    ) -> None:
        await self.reads.look_up(request, present, unknown)
        _reply(connection, request, {"present": present})

    def _select(self, connection: Connection, session: Session, request: Select) -> None:
        address = (request.namespace, request.key)
        held = self.reads.hold(session, address)
        reason = "" if held is not None or request.wait_seconds else self.reads.missing(address)
        if held is not None:
            self._hand_over(connection, session, request, held)
        elif reason:
            self._tell_missing(connection, request, reason)
        else:
            connection.start(self._bring(connection, session, request))

    @_answers_errors
    async def _bring(self, connection: Connection, session: Session, request: Select) -> None:
        """Fetch an item that is absent here; wait for it if the request says so."""
        address = (request.namespace, request.key)

        def fetching(nbytes: int) -> None:
            _reply(connection, request, {"fetching": nbytes})

        hold = functools.partial(self.reads.hold_fetched, session, address)
        found = await self.reads.bring(address, request.wait_seconds, hold, fetching)
        if isinstance(found, Held):
            self._hand_over(connection, session, request, found)
        else:
            self._tell_missing(connection, request, found)

    def _tell_missing(
        self, connection: Connection, request: Select | Take, reason: MissReason
    ) -> None:
        is_final = isinstance(request, Take) and reason is MissReason.OWNER_DEAD
        waited = request.wait_seconds and not is_final
        self.counters.add(miss(MissReason.TIMEOUT if waited else reason))
        _reply(connection, request, {"state": "missing", "reason": reason})

    def _hand_over(
        self, connection: Connection, session: Session, request: Select, held: Held
    ) -> None:
        _reply(connection, request, self._resident(held))
        if not connection.open:  # the client is gone: it will never release this pin
            self.shelf.release([held.ticket], session.id)

    def _try_hold(
        self, session: Session, address: QualifiedKey, fetched: Fetched
    ) -> dict[str, Any] | None:
        """Pin `address` for this session and return its fields, or why that failed; None if
        absent here."""
        seat = session.seat
        if seat is not None:
            ranks = set(self._attached.get(seat.engine_id, {}).values())
            if len(ranks) < seat.world_size:
                return {"state": "failed", "reason": MissReason.RANKS_NOT_ATTACHED}
        try:
            held = self.reads.hold_fetched(session, address, fetched)
        except BufferFull:
            self.counters.add(miss(MissReason.NO_ROOM))
            return {"state": "failed", "reason": MissReason.NO_ROOM}
        return None if held is None else self._resident(held)

    def _resident(self, held: Held) -> dict[str, Any]:
        item = held.item
        return {
            "state": "resident",
            "boot": self.boot,
            "ticket": held.ticket,
            "offset": item.offset,
            "generation": item.generation,
            "header": item.header.to_fields(),
            "source": item.origin,
        }

    # -- hand-offs

    def _take(self, connection: Connection, session: Session, request: Take) -> None:
        taken = self.takes.take_here(session, request)
        if taken is not None:
            self._hand_over_taken(connection, session, request, taken)
        else:
            connection.start(self._take_later(connection, session, request))

    @_answers_errors
    async def _take_later(self, connection: Connection, session: Session, request: Take) -> None:
        def fetching(nbytes: int) -> None:
            _reply(connection, request, {"fetching": nbytes})

        found = await self.takes.take(session, request, fetching)
        if isinstance(found, Taken):
            self._hand_over_taken(connection, session, request, found)
            return
        self._tell_missing(connection, request, found)

    def _hand_over_taken(
        self, connection: Connection, session: Session, request: Take, taken: Taken
    ) -> None:
        self.counters.hit_handoff(taken.held.item)
        lease = {"token": taken.token, "lease_seconds": taken.lease_seconds}
        _reply(connection, request, self._resident(taken.held) | lease)
        if not connection.open:  # the client will never use that token
            self.shelf.release([taken.held.ticket], session.id)
            self.takes.give_back(session, taken.token)

    def _acknowledge(self, connection: Connection, session: Session, request: Acknowledge) -> None:
        won = self.takes.acknowledge(session, request.token)
        if won.done():
            _reply(connection, request, {"won": won.result()})
        else:
            connection.start(self._tell_won(connection, request, won))

    async def _tell_won(
        self, connection: Connection, request: Acknowledge, won: "asyncio.Future[bool]"
    ) -> None:
        _reply(connection, request, {"won": await asyncio.shield(won)})

    # -- claims

    @_answers_errors
    async def _claim(self, connection: Connection, session: Session, request: Claim) -> None:
        _reply(connection, request, (await self.claims.claim(session, request)).to_fields())

    async def _tell_released(
        self, connection: Connection, request: ReleaseClaim, released: "asyncio.Future[bool]"
    ) -> None:
        _reply(connection, request, {"released": await released})


def _reply(connection: Connection, request: Request, fields: dict[str, Any]) -> None:
    connection.send({"id": request.id, **fields})
