"""Inserts: copies tensors from clients' staging areas into the arena.

Copies above COPY_INLINE_BYTES run on `lb-copy`, all else on the loop's thread. If another client or
a fetch is writing the same shared key, the insert waits: `exists` is answered only if readers can
have the item. A hand-off is admitted (`arrivals`), and answered once its ownership is confirmed
(`announcements`). Called by `desk` and `control`.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arrivals import Arrival, Arrivals
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.waiting import Waiting
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, InsertOutcome, error_reply
from lookup_buffer.shm.memory import Mapping

COPY_INLINE_BYTES = 512 << 10
"""Up to this size the copy on the loop's thread (15 to 100 µs measured) costs less than a change
of threads (about 100 µs), and delays the loop no longer than other requests do."""
LOOK_AGAIN_SECONDS = 0.02
"""The end of a fetch does not resume waiting inserts, so they check this often."""


@dataclass(slots=True)
class Intake:
    """`on_stored(address)` is called for each complete item, while it is pinned."""

    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    counters: Counters
    waiting: Waiting
    arrivals: Arrivals
    claims: Claims
    announcements: Announcements
    on_stored: Callable[[QualifiedKey], None]
    _busy: set[Connection] = field(default_factory=set)
    """Connections with an insert in flight: one at a time."""
    _copying: set[Mapping] = field(default_factory=set)
    _copiers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="lb-copy")
    )

    def insert(self, connection: Connection, session: Session, request: Insert) -> None:
        """Store the first bytes of the connection's staging area, or answer `exists`.

        Raises:
            LookupBufferError: the caller sends it as the reply.
        """
        if connection in self._busy:
            raise ProtocolError("an insert is already in flight on this connection")
        header = TensorHeader.from_fields(request.header)
        staging = session.stagings.get(connection)
        if header.nbytes and (staging is None or staging.nbytes < header.nbytes):
            raise ProtocolError("the staging area is smaller than the tensor")
        if is_handoff(request.key):
            self._hand_off(connection, session, request, header)
            return
        address = (request.namespace, request.key)
        try:
            item = self.shelf.reserve(
                address, header, origin="local", ttl_seconds=request.ttl_seconds
            )
        except LookupBufferError:
            self.counters.add("inserts_refused")
            raise
        if item is None:
            self._taken(connection, session, request)
        else:
            self._take_in(connection, session, request, item)

    def _hand_off(
        self, connection: Connection, session: Session, request: Insert, header: TensorHeader
    ) -> None:
        def admitted(item: Item) -> None:
            self._take_in(connection, session, request, item, arrival)

        def refused(error: LookupBufferError) -> None:
            self._busy.discard(connection)
            self.counters.add("inserts_refused")
            connection.send(error_reply(request.id, error))

        address = (request.namespace, request.key)
        until = self.loop.time() + request.wait_seconds
        arrival = Arrival(
            address, header, request.ttl_seconds, until, connection, admitted, refused
        )
        self._busy.add(connection)
        self.arrivals.come(arrival)

    def _take_in(
        self,
        connection: Connection,
        session: Session,
        request: Insert,
        item: Item,
        arrival: Arrival | None = None,
    ) -> None:
        """Copy the bytes into the reserved memory."""
        item.device = session.device
        staging = session.stagings.get(connection)
        written = functools.partial(self._written, connection, session, request, item, arrival)
        if staging is None or item.nbytes <= COPY_INLINE_BYTES:
            written(staging, self.shelf.fill(item, staging))
            return
        self._busy.add(connection)
        self._copying.add(staging)
        self._copiers.submit(self._copy, item, staging, written)

    def unstage(self, session: Session, connection: Connection) -> None:
        """Unmap the connection's staging area; if a copy reads it, after that copy."""
        if self.arrivals.leave(connection):
            self._busy.discard(connection)
        staging = session.stagings.pop(connection, None)
        if staging is not None and staging not in self._copying:
            staging.close()

    def close(self) -> None:
        self._copiers.shutdown(wait=True, cancel_futures=True)

    def _taken(self, connection: Connection, session: Session, request: Insert) -> None:
        address = (request.namespace, request.key)
        if self.shelf.holds(address):
            self.counters.add("inserts_exists")
            self.claims.inserted(session, address)
            connection.send({"id": request.id, "outcome": "exists"})
            return
        self._busy.add(connection)
        again = functools.partial(self._again, connection, session, request)
        self.waiting.sleep(address, LOOK_AGAIN_SECONDS, again)

    def _again(self, connection: Connection, session: Session, request: Insert) -> None:
        self._busy.discard(connection)
        if session.over or not connection.open:
            return
        try:
            self.insert(connection, session, request)
        except ProtocolError as error:
            connection.end(error)
        except LookupBufferError as error:
            connection.send(error_reply(request.id, error))

    def _copy(self, item: Item, staging: Mapping, written: Callable[[Any, int], None]) -> None:
        checksum = self.shelf.fill(item, staging)
        call_from_thread(self.loop, written, staging, checksum)

    def _written(
        self,
        connection: Connection,
        session: Session,
        request: Insert,
        item: Item,
        arrival: Arrival | None,
        staging: Mapping | None,
        checksum: int,
    ) -> None:
        self._busy.discard(connection)
        ticket = self.shelf.commit(item, checksum, session.id)
        if staging is not None:
            self._copying.discard(staging)
            if session.stagings.get(connection) is not staging:
                staging.close()  # its connection ended, or it was replaced, during the copy
        if arrival is None:
            self.claims.inserted(session, item.address)
            self._stored(item)
            self.shelf.release([ticket], session.id)
            _tell_stored(connection, request, item)
            return
        settled = functools.partial(self._settled, connection, session, request, arrival, ticket)
        self._busy.add(connection)
        self.announcements.announce(item, arrival.until, functools.partial(settled, item))

    def _settled(
        self,
        connection: Connection,
        session: Session,
        request: Insert,
        arrival: Arrival,
        ticket: int,
        item: Item,
        outcome: InsertOutcome | LookupBufferError,
    ) -> None:
        """The ownership of the hand-off is known."""
        self._busy.discard(connection)
        if outcome is InsertOutcome.STORED:
            self._stored(item)
        self.arrivals.landed(arrival)
        self.shelf.release([ticket], session.id)
        if isinstance(outcome, LookupBufferError):
            self.counters.add("inserts_refused")
            connection.send(error_reply(request.id, outcome))
            return
        if outcome is InsertOutcome.STORED:
            _tell_stored(connection, request, item)
            return
        self.counters.add("inserts_exists")
        connection.send({"id": request.id, "outcome": outcome.value})

    def _stored(self, item: Item) -> None:
        self.counters.add("inserts_stored")
        self.counters.add("bytes_inserted", item.nbytes)
        self.on_stored(item.address)


def _tell_stored(connection: Connection, request: Insert, item: Item) -> None:
    outcome = InsertOutcome.STORED.value
    connection.send({"id": request.id, "outcome": outcome, "checksum": item.checksum})
