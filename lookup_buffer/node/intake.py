"""Inserts: copies tensors from clients' staging areas into the arena.

Copies above COPY_INLINE_BYTES run on `lb-copy`, all else on the loop's thread. If another client or
a fetch is writing the same shared key, the insert waits: `exists` is answered only if readers can
have the item. A hand-off is admitted (`arrivals`), and answered once its ownership is confirmed
(`announcements`). An insert that was admitted is finished also if its client leaves. Called by
`desk` and `control`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arrivals import Arrival, Arrivals
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.inventory import Item
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
    _inserts: dict[Connection, "asyncio.Task[None]"] = field(default_factory=dict)
    """One at a time for each connection."""
    _waiting: set[Connection] = field(default_factory=set)
    """Those whose insert is not admitted yet."""
    _copying: set[Mapping] = field(default_factory=set)
    _copiers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="lb-copy")
    )

    def insert(self, connection: Connection, session: Session, request: Insert) -> None:
        """Store the first bytes of the connection's staging area, or answer `exists`.

        Raises:
            LookupBufferError: the caller sends it as the reply.
        """
        if connection in self._inserts:
            raise ProtocolError("an insert is already in flight on this connection")
        header = TensorHeader.from_fields(request.header)
        staging = session.stagings.get(connection)
        if header.nbytes and (staging is None or staging.nbytes < header.nbytes):
            raise ProtocolError("the staging area is smaller than the tensor")
        if is_handoff(request.key):
            insert = partial(self._hand_off, connection, session, request, header)
            self._start_waiting(connection, request, insert)
            return
        item = self._reserve(request, header)
        if item is not None:
            self._take_in(connection, session, request, item)
        elif self.shelf.holds((request.namespace, request.key)):
            self._answer_exists(connection, session, request)
        else:
            retry = partial(self._retry, connection, session, request, header)
            self._start_waiting(connection, request, retry)

    def unstage(self, session: Session, connection: Connection) -> None:
        """Unmap the connection's staging area; if a copy reads it, after that copy. An insert that
        waits for it is dropped."""
        if connection in self._waiting:
            self._inserts[connection].cancel()
        staging = session.stagings.pop(connection, None)
        if staging is not None and staging not in self._copying:
            staging.close()

    def close(self) -> None:
        self._copiers.shutdown(wait=True, cancel_futures=True)

    def _start_waiting(
        self, connection: Connection, request: Insert, insert: Callable[[], Awaitable[None]]
    ) -> None:
        self._waiting.add(connection)
        self._start(connection, request, insert)

    def _start(
        self, connection: Connection, request: Insert, insert: Callable[[], Awaitable[None]]
    ) -> None:
        """Run an insert that waits, and send its error."""

        async def run() -> None:
            try:
                await insert()
            except LookupBufferError as error:
                connection.send(error_reply(request.id, error))

        def ended(_: object) -> None:
            self._waiting.discard(connection)
            del self._inserts[connection]

        task = self._inserts[connection] = self.loop.create_task(run())
        task.add_done_callback(ended)

    # -- shared items

    def _reserve(self, request: Insert, header: TensorHeader) -> Item | None:
        address = (request.namespace, request.key)
        try:
            return self.shelf.reserve(
                address, header, origin="local", ttl_seconds=request.ttl_seconds
            )
        except LookupBufferError:
            self.counters.add("inserts_refused")
            raise

    async def _retry(
        self, connection: Connection, session: Session, request: Insert, header: TensorHeader
    ) -> None:
        """Another one is writing the key: insert it if that fails."""
        address = (request.namespace, request.key)
        while (item := self._reserve(request, header)) is None:
            if self.shelf.holds(address):
                self._answer_exists(connection, session, request)
                return
            await self.waiting.pause(address, LOOK_AGAIN_SECONDS)
        self._waiting.discard(connection)
        copied = self._copy(connection, session, item)
        self._store(connection, session, request, item, await asyncio.shield(copied))

    def _take_in(
        self, connection: Connection, session: Session, request: Insert, item: Item
    ) -> None:
        copied = self._copy(connection, session, item)
        if copied.done():
            self._store(connection, session, request, item, copied.result())
            return

        async def store() -> None:
            self._store(connection, session, request, item, await asyncio.shield(copied))

        self._start(connection, request, store)

    def _store(
        self, connection: Connection, session: Session, request: Insert, item: Item, checksum: int
    ) -> None:
        ticket = self.shelf.commit(item, checksum, session.id)
        self.claims.inserted(session, item.address)
        self._stored(item)
        self.shelf.release([ticket], session.id)
        _tell_stored(connection, request, item)

    def _answer_exists(self, connection: Connection, session: Session, request: Insert) -> None:
        self.counters.add("inserts_exists")
        self.claims.inserted(session, (request.namespace, request.key))
        connection.send({"id": request.id, "outcome": "exists"})

    # -- hand-offs

    async def _hand_off(
        self, connection: Connection, session: Session, request: Insert, header: TensorHeader
    ) -> None:
        until = self.loop.time() + request.wait_seconds
        arrival = Arrival((request.namespace, request.key), header, request.ttl_seconds, until)
        try:
            async with self.arrivals.admitted(arrival) as item:
                self._waiting.discard(connection)
                checksum = await asyncio.shield(self._copy(connection, session, item))
                ticket = self.shelf.commit(item, checksum, session.id)
                try:
                    outcome = await self.announcements.confirm(item, until)
                    if outcome is InsertOutcome.STORED:
                        self._stored(item)
                finally:
                    self.shelf.release([ticket], session.id)
        except LookupBufferError:
            self.counters.add("inserts_refused")
            raise
        if outcome is InsertOutcome.STORED:
            _tell_stored(connection, request, item)
        else:
            self.counters.add("inserts_exists")
            connection.send({"id": request.id, "outcome": outcome.value})

    # -- the copy

    def _copy(self, connection: Connection, session: Session, item: Item) -> "asyncio.Future[int]":
        """Copy the bytes into the reserved memory, which no end of the client interrupts; the
        result is their checksum."""
        item.device = session.device
        staging = session.stagings.get(connection)
        if staging is None or item.nbytes <= COPY_INLINE_BYTES:
            done: asyncio.Future[int] = self.loop.create_future()
            done.set_result(self.shelf.fill(item, staging))
            return done

        def copied(_: object) -> None:
            self._copying.discard(staging)
            if session.stagings.get(connection) is not staging:
                staging.close()  # its connection ended, or it was replaced, during the copy

        self._copying.add(staging)
        copy = self.loop.run_in_executor(self._copiers, self.shelf.fill, item, staging)
        copy.add_done_callback(copied)
        return copy

    def _stored(self, item: Item) -> None:
        self.counters.add("inserts_stored")
        self.counters.add("bytes_inserted", item.nbytes)
        self.on_stored(item.address)


def _tell_stored(connection: Connection, request: Insert, item: Item) -> None:
    outcome = InsertOutcome.STORED.value
    connection.send({"id": request.id, "outcome": outcome, "checksum": item.checksum})
