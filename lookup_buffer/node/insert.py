"""Inserts: copies tensors from clients' staging areas into the arena.

A request carries one tensor or many, and gets one answer with a result for each. Copies above
COPY_INLINE_BYTES run on `lb-copy`, all else on the loop's thread. If another client or a fetch is
writing the same shared key, that insert waits for a while: `exists` is answered only if readers can
have the item.

The insert of a hand-off may have to wait for space, and is offered meanwhile (`handoffs`). It is
answered once its ownership is confirmed (`announcements`). An insert that was admitted is finished
also if its client leaves. Called by `server`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena, Item, Pin
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Connection, Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Arrival, Handoffs
from lookup_buffer.node.locate import Waiting
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, InsertOutcome, error_fields
from lookup_buffer.shm.memory import Mapping

COPY_INLINE_BYTES = 512 << 10
"""Up to this size the copy on the loop's thread (15 to 100 µs measured) costs less than a change
of threads (about 100 µs), and delays the loop no longer than other requests do."""
LOOK_AGAIN_SECONDS = 0.02
"""The end of a fetch does not resume waiting inserts, so they check this often."""
WRITING_SECONDS_MAX = 5.0
"""An insert waits so long for another one, or for a fetch, that writes the same key."""


@dataclass(slots=True, eq=False)
class _Part:
    """One tensor of a request."""

    address: QualifiedKey
    header: TensorHeader
    offset: int
    """Of its bytes in the staging area."""


@dataclass(slots=True, eq=False)
class _Inserting:
    """One request, until it is answered. It keeps the staging area mapped."""

    connection: Connection
    session: Session
    request: Insert
    staging: Mapping | None
    parts: list[_Part]
    results: list[dict[str, Any] | None]
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    waiting: set["asyncio.Task[None]"] = field(default_factory=set)
    """Those whose part is not admitted: the end of the connection cancels them."""

    def admitted(self) -> None:
        """The part of this task uses the staging area from now on, and is finished."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting.discard(task)


@dataclass(slots=True)
class Inserts:
    """`on_stored(address)` is called for each complete item, while it is pinned."""

    loop: asyncio.AbstractEventLoop
    arena: Arena
    counters: Counters
    waiting: Waiting
    handoffs: Handoffs
    claims: Claims
    announcements: Announcements
    on_stored: Callable[[QualifiedKey], None]
    _inserting: dict[Connection, _Inserting] = field(default_factory=dict)
    """One request at a time for each connection."""
    _copiers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="lb-copy")
    )

    def insert(self, connection: Connection, session: Session, request: Insert) -> None:
        """Store tensors of the connection's staging area, or answer `exists`.

        Raises:
            ProtocolError: the request is not valid; nothing was done.
        """
        if connection in self._inserting:
            raise ProtocolError("an insert is already in flight on this connection")
        staging = session.stagings.get(connection)
        parts = _parts(request, 0 if staging is None else staging.nbytes)
        one = _Inserting(connection, session, request, staging, parts, [None] * len(parts))
        self._inserting[connection] = one
        reserved, handoffs = [], dict[QualifiedKey, asyncio.Task[None]]()
        for index, part in enumerate(parts):
            if is_handoff(part.address[1]):
                insert = self._hand_off(one, index, handoffs.get(part.address))
                handoffs[part.address] = self._start(one, insert, waits=True)
            elif (item := self._reserve(one, index)) is not None:
                reserved.append((index, item))
            elif one.results[index] is None:
                self._start(one, self._retry(one, index), waits=True)
        if sum(item.nbytes for _, item in reserved) <= COPY_INLINE_BYTES:
            for index, item in reserved:
                self._store(one, index, item, self._fill(one, index, item))
        else:
            self._start(one, self._copy_and_store(one, reserved), waits=False)
        self._answer_if_complete(one)

    def unstage(self, session: Session, connection: Connection) -> None:
        """Unmap the connection's staging area; if an insert uses it, after that. What waits to be
        admitted is dropped."""
        staging = session.stagings.pop(connection, None)
        inserting = self._inserting.get(connection)
        for task in inserting.waiting if inserting else ():
            task.cancel()
        if staging is not None and (inserting is None or inserting.staging is not staging):
            staging.close()

    def close(self) -> None:
        self._copiers.shutdown(wait=True, cancel_futures=True)

    # -- one request

    def _start(
        self, one: _Inserting, part: Coroutine[Any, Any, None], *, waits: bool
    ) -> "asyncio.Task[None]":
        task = self.loop.create_task(part)
        one.tasks.add(task)
        if waits:
            one.waiting.add(task)
        task.add_done_callback(partial(self._ended, one))
        return task

    def _ended(self, one: _Inserting, task: "asyncio.Task[None]") -> None:
        one.tasks.discard(task)
        one.waiting.discard(task)
        self._answer_if_complete(one)

    def _answer_if_complete(self, one: _Inserting) -> None:
        if one.tasks:
            return
        del self._inserting[one.connection]
        if one.staging is not None and one.session.stagings.get(one.connection) is not one.staging:
            one.staging.close()  # the connection ended, or its area was replaced, meanwhile
        if None not in one.results:  # else it was dropped
            one.connection.send({"id": one.request.id, "results": one.results})

    def _refuse(self, one: _Inserting, index: int, error: LookupBufferError) -> None:
        self.counters.add("inserts_refused")
        one.results[index] = error_fields(error)

    # -- shared items

    def _reserve(self, one: _Inserting, index: int) -> Item | None:
        """Memory for a part; None if it has its result, or if another one is writing the key."""
        part = one.parts[index]
        try:
            item = self.arena.reserve(
                part.address, part.header, origin="local", ttl_seconds=one.request.ttl_seconds
            )
        except LookupBufferError as error:
            self._refuse(one, index, error)
            return None
        if item is None and self.arena.holds(part.address):
            self.counters.add("inserts_exists")
            self.claims.inserted(one.session, part.address)
            one.results[index] = {"outcome": InsertOutcome.EXISTS.value}
        return item

    async def _retry(self, one: _Inserting, index: int) -> None:
        """Another one is writing the key: insert it if that fails, and refuse it if that takes
        long, as a transfer over a slow network may."""
        until = self.loop.time() + WRITING_SECONDS_MAX
        while (item := self._reserve(one, index)) is None:
            if one.results[index] is not None:
                return
            if self.loop.time() >= until:
                self._refuse(one, index, BufferFull("this key is being written; insert it again"))
                return
            await self.waiting.pause(one.parts[index].address, LOOK_AGAIN_SECONDS)
        one.admitted()
        await self._copy_and_store(one, [(index, item)])

    async def _copy_and_store(self, one: _Inserting, reserved: Sequence[tuple[int, Item]]) -> None:
        checksums = await self._copy(one, reserved)
        for (index, item), checksum in zip(reserved, checksums, strict=True):
            self._store(one, index, item, checksum)

    def _store(self, one: _Inserting, index: int, item: Item, checksum: int) -> None:
        pin = self._commit(one, item, checksum)
        self.claims.inserted(one.session, item.address)
        self._stored(one, index, item)
        self.arena.release([pin.ticket], one.session.id)

    # -- hand-offs

    async def _hand_off(
        self, one: _Inserting, index: int, earlier: "asyncio.Task[None] | None"
    ) -> None:
        """Insert a hand-off, after an earlier one of the same key in the request."""
        if earlier is not None:
            await asyncio.wait([earlier])
        part, request = one.parts[index], one.request
        until = self.loop.time() + request.wait_seconds
        arrival = Arrival(part.address, part.header, request.ttl_seconds)
        try:
            item = self.handoffs.reserve(arrival, until)
            if item is None:
                self.waiting.arrived(part.address)  # waiters of this host now queue for it
                item = await self.handoffs.admitted(arrival, until)
            one.admitted()
            (checksum,) = await self._copy(one, [(index, item)])
            pin = self._commit(one, item, checksum)
            try:
                outcome = await self.announcements.confirm(item, until)
                if outcome is InsertOutcome.STORED:
                    self._stored(one, index, item)
            finally:
                self.arena.release([pin.ticket], one.session.id)
        except LookupBufferError as error:
            self._refuse(one, index, error)
            return
        finally:
            self.handoffs.landed(arrival)
        if outcome is not InsertOutcome.STORED:
            self.counters.add("inserts_exists")
            one.results[index] = {"outcome": outcome.value}

    # -- the copy

    async def _copy(self, one: _Inserting, reserved: Sequence[tuple[int, Item]]) -> list[int]:
        """Copy bytes into the reserved memory, which no end of the client interrupts; returns
        their checksums."""
        fill = partial(self._fill_all, one, reserved)
        if sum(item.nbytes for _, item in reserved) <= COPY_INLINE_BYTES:
            return fill()
        return await asyncio.shield(self.loop.run_in_executor(self._copiers, fill))

    def _fill_all(self, one: _Inserting, reserved: Sequence[tuple[int, Item]]) -> list[int]:
        return [self._fill(one, index, item) for index, item in reserved]

    def _fill(self, one: _Inserting, index: int, item: Item) -> int:
        return self.arena.fill(item, one.staging, one.parts[index].offset)

    def _commit(self, one: _Inserting, item: Item, checksum: int) -> Pin:
        item.device = one.session.device
        return self.arena.commit(item, checksum, one.session.id)

    def _stored(self, one: _Inserting, index: int, item: Item) -> None:
        self.counters.add("inserts_stored")
        self.counters.add("bytes_inserted", item.nbytes)
        self.on_stored(item.address)
        one.results[index] = {"outcome": InsertOutcome.STORED.value, "checksum": item.checksum}


def _parts(request: Insert, staging_bytes: int) -> list[_Part]:
    """Raises ProtocolError if the lists do not agree, or exceed the staging area."""
    if not len(request.keys) == len(request.headers) == len(request.offsets) > 0:
        raise ProtocolError("an insert needs as many headers and offsets as keys")
    parts = []
    for key, fields, offset in zip(request.keys, request.headers, request.offsets, strict=True):
        header = TensorHeader.from_fields(fields)
        if header.nbytes and offset + header.nbytes > staging_bytes:
            raise ProtocolError("the staging area is smaller than the tensors")
        parts.append(_Part((request.namespace, key), header, offset))
    return parts
