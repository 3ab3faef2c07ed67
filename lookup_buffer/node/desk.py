"""The dispatch of clients' requests: one method call for each type of message.

Called by `control` on the loop's thread. A request that needs the store or a transfer is passed on,
and its reply follows from a callback.
"""

import asyncio
import functools
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from lookup_buffer.errors import (
    BufferFull,
    LookupBufferError,
    MaybeMissed,
    MissReason,
    ProtocolError,
)
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.claim_sets import ClaimSets
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.intake import Intake
from lookup_buffer.node.lanes import Lanes
from lookup_buffer.node.loans import Loans
from lookup_buffer.node.prefetches import Prefetches, miss, tell
from lookup_buffer.node.presence import Presence
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.resolver import Resolver
from lookup_buffer.node.selection import Selection
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.node.takings import Takings
from lookup_buffer.node.waiting import Waiting
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


@dataclass(slots=True)
class Desk:
    loop: asyncio.AbstractEventLoop
    boot: str
    shelf: Shelf
    resolver: Resolver
    loans: Loans
    takings: Takings
    presence: Presence
    registrar: Registrar
    claims: Claims
    claim_sets: ClaimSets
    counters: Counters
    waiting: Waiting
    intake: Intake
    lanes: Lanes
    prefetches: Prefetches = field(init=False)
    _attached: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """Engine → session → rank, of its workers that have mapped the arena. By session: a worker
    may attach again before the end of its previous session was detected."""

    def __post_init__(self) -> None:
        self.prefetches = Prefetches(
            self.loop, self.resolver, self.loans, self.lanes, self.claims, self.claim_sets,
            self.counters, self.waiting, self._try_hold,
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
        self.takings.end(session)
        self.claim_sets.end(session)
        self.claims.release_all(session)

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
                self.takings.grants.give_back(session, request.token)
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
                self.presence.tell(request, functools.partial(_reply, connection, request))
            case Insert():
                self.intake.insert(connection, session, request)
            case Claim():
                self._claim(connection, session, request)
            case ReleaseClaim():
                self.claims.release(
                    session, request, functools.partial(_reply, connection, request)
                )
            case ClaimAll():
                self.claim_sets.ask(session, request, functools.partial(tell, session, request))
            case Encoding():
                self.claim_sets.encoding(session, request)
            case Unclaim():
                self.claim_sets.unclaim(session, request)
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

    # -- select

    def _hold(self, session: Session, address: QualifiedKey) -> Held | None:
        held = self.shelf.hold(address, session.id, session.ranks())
        if held is None and is_handoff(address[1]):
            held = self.loans.hold(address, session.id, session.ranks())
        if held is not None:
            self.counters.hit(held.item)
            self.counters.spare(session.encodes)
        return held

    def _touch(self, session: Session, request: Touch) -> None:
        for key, count in request.reads.items():
            address = (request.namespace, key)
            item = self.shelf.touch(address)
            if item is not None:
                self.counters.hit(item, count)
                self.counters.spare(session.encodes * count)

    def _select(self, connection: Connection, session: Session, request: Select) -> None:
        address = (request.namespace, request.key)
        held = self._hold(session, address)
        if held is not None:
            self._hand_over(connection, session, request, held)
        else:
            self._select_later(connection, session, request, address)

    def _select_later(
        self, connection: Connection, session: Session, request: Select, address: QualifiedKey
    ) -> None:
        """Locate and fetch an item that is absent here; wait for it if the request says so."""

        def look(reason: MaybeMissed, last: bool) -> bool:
            if session.over or not connection.open:
                return True
            try:
                held = self._hold(session, address)
            except LookupBufferError as error:
                connection.send(error_reply(request.id, error))
                return True
            if held is not None:
                self._hand_over(connection, session, request, held)
            elif last:
                self.counters.add(miss(MissReason.TIMEOUT if request.wait_seconds else reason))
                _reply(
                    connection, request, {"state": "missing", "reason": reason or MissReason.ABSENT}
                )
            return last or held is not None

        def fetching(nbytes: int) -> None:
            _reply(connection, request, {"fetching": nbytes})

        until = self.loop.time() + request.wait_seconds
        bring = self.loans if is_handoff(request.key) else self.resolver
        Selection(self.loop, bring, self.waiting, address, until, look, fetching).begin()

    def _hand_over(
        self, connection: Connection, session: Session, request: Select, held: Held
    ) -> None:
        _reply(connection, request, self._resident(held))
        if not connection.open:  # the client is gone: it will never release this pin
            self.shelf.release([held.ticket], session.id)

    def _try_hold(self, session: Session, address: QualifiedKey) -> dict[str, Any] | None:
        """Pin `address` for this session and return its fields, or why that failed; None if
        absent here."""
        seat = session.seat
        if seat is not None:
            ranks = set(self._attached.get(seat.engine_id, {}).values())
            if len(ranks) < seat.world_size:
                return {"state": "failed", "reason": MissReason.RANKS_NOT_ATTACHED}
        try:
            held = self._hold(session, address)
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
        def answer(held: Held, token: int, lease_seconds: float) -> None:
            self.counters.hit_handoff(held.item)
            taken = {"token": token, "lease_seconds": lease_seconds}
            _reply(connection, request, self._resident(held) | taken)

        def missing(reason: MissReason) -> None:
            waited = request.wait_seconds and reason != MissReason.OWNER_DEAD
            self.counters.add(miss(MissReason.TIMEOUT if waited else reason))
            _reply(connection, request, {"state": "missing", "reason": reason})

        def fetching(nbytes: int) -> None:
            _reply(connection, request, {"fetching": nbytes})

        self.takings.take(connection, session, request, answer, missing, fetching)

    def _acknowledge(self, connection: Connection, session: Session, request: Acknowledge) -> None:
        def answer(won: bool) -> None:
            _reply(connection, request, {"won": won})

        self.takings.grants.acknowledge(session, request.token, answer)

    # -- claims

    def _claim(self, connection: Connection, session: Session, request: Claim) -> None:
        def wanted() -> bool:
            return not session.over and connection.open

        self.claims.claim(session, request, wanted, functools.partial(_reply, connection, request))


def _reply(connection: Connection, request: Request, fields: dict[str, Any]) -> None:
    connection.send({"id": request.id, **fields})
