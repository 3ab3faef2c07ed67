"""Inserts: copies tensors from clients' staging areas into the arena.

A request carries one tensor or many, and gets one answer with a result for each. Copies above
COPY_INLINE_BYTES run on `lb-copy`, all else on the loop's thread. There all inserts share one
`Turns`: however many are in progress, together they hold the loop for about TURN_SECONDS in each
of its turns, or for one part. If another client or a fetch is writing the same shared key, that
insert waits for a while: `exists` is answered only if readers can have the item.

The insert of a hand-off may have to wait for space, and is offered meanwhile (`handoffs`). It is
answered once its ownership is confirmed (`announcements`). An insert that was admitted is finished
also if its client leaves. If that fails, its memory is released. Called by `server`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena, Evicting
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.closer import Closer
from lookup_buffer.node.connection import Connection, Fields, Session, Tasks
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Arrival, Handoffs
from lookup_buffer.node.items import Item, Pin
from lookup_buffer.node.locate import Waiting
from lookup_buffer.node.read import Reads
from lookup_buffer.node.shares import size_of
from lookup_buffer.node.staging import StagingArea, fill
from lookup_buffer.node.turns import Steps, Turns
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, InsertOutcome, error_fields
from lookup_buffer.shm.memory import check_memfd
from lookup_buffer.times import TURN_SECONDS

COPY_INLINE_BYTES = 512 << 10
"""Up to this size the copy on the loop's thread (15 to 100 µs measured) costs less than a change
of threads (about 100 µs), and delays the loop no longer than other requests do."""
COPIERS = 2
"""Threads that copy."""
STEP_SECONDS = TURN_SECONDS / 10
"""One insert begins with its parts for so long, or with one of them, before others have their
step."""
LOOK_AGAIN_SECONDS = 0.02
"""The end of a fetch does not resume waiting inserts, so they check this often."""
WRITING_SECONDS_MAX = 5.0
"""An insert waits so long for another one, or for a fetch, that writes the same key."""
BUSY = "this key is being written, or room is being made for it; insert it again"
STAGING_ARENAS_MAX = 2
"""A staging area has at most the bytes of so many arenas."""
FAILED = error_fields(BufferFull("the node could not store it, as its log says; insert it again"))
"""The result of a part for which there is no other."""
PART_BYTES = 1 << 10
"""About what one part of a request occupies, beside the text of its key: also once it has its
result, while others of the request wait."""


@dataclass(slots=True, eq=False)
class _Part:
    """One tensor of a request, and its result."""

    address: QualifiedKey
    header: TensorHeader
    offset: int
    """Of its bytes in the staging area."""
    result: Fields | None = None

    @property
    def end(self) -> int:
        return self.offset + self.header.nbytes


Reserved = tuple[_Part, Item]
"""A part, and the memory for it."""


@dataclass(slots=True, eq=False)
class _Inserting:
    """One request, until it is answered. It uses the staging area so long."""

    connection: Connection
    session: Session
    request: Insert
    staging: StagingArea | None
    parts: list[_Part]
    untried: deque[_Part] = field(init=False)
    """The parts that are still to be admitted, refused or begun to wait."""
    is_beginning: bool = False
    """Whether it has a step to make with them."""
    handoffs: "dict[QualifiedKey, asyncio.Task[None]]" = field(default_factory=dict)
    """The last one of each key so far."""
    tasks: Tasks = field(default_factory=Tasks)
    waiting: Tasks = field(default_factory=Tasks)
    """Those whose part is not admitted: the end of the connection cancels them."""
    size: int = field(init=False)
    """What it counts of the session's requests that wait, until the answer; and 1 for each part
    that waits."""
    is_left: bool = False
    """Whether its connection has ended."""

    def __post_init__(self) -> None:
        self.size = size_of(self.request.keys, PART_BYTES) - 1
        self.untried = deque(self.parts)

    def admitted(self) -> None:
        """The part of this task uses the staging area from now on, and is finished."""
        task = asyncio.current_task()
        assert task is not None
        self.waiting.discard(task)


@dataclass(slots=True)
class Inserts:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    counters: Counters
    waiting: Waiting
    handoffs: Handoffs
    claims: Claims
    announcements: Announcements
    reads: Reads
    closer: Closer = field(default_factory=Closer)
    left: int = 0
    """Requests in progress whose connection has ended."""
    _stagings: dict[Connection, StagingArea] = field(default_factory=dict)
    _inserting: dict[Connection, _Inserting] = field(default_factory=dict)
    """One request at a time for each connection."""
    _turns: Turns = field(init=False)
    _copiers: ThreadPoolExecutor = field(default_factory=lambda: _started(COPIERS, "lb-copy"))

    def __post_init__(self) -> None:
        self._turns = Turns(self.loop)
        self.handoffs.on_offer = self.waiting.arrived

    def insert(self, connection: Connection, session: Session, request: Insert) -> None:
        """Store tensors of the connection's staging area, or answer `exists`.

        Raises:
            ProtocolError: the request is not valid; nothing was done.
        """
        if connection in self._inserting:
            raise ProtocolError("an insert is already in flight on this connection")
        staging = self._stagings.get(connection)
        parts = _parts(request, 0 if staging is None else staging.nbytes)
        one = _Inserting(connection, session, request, staging, parts)
        try:
            if one.size:
                session.waits.check(session.id, one.size)
        except BufferFull as error:
            for part in parts:
                self._refuse(part, error)
            self._send_results(one)
            return
        session.waits.add(session.id, one.size)
        self._inserting[connection] = one
        one.is_beginning = True
        self._turns.work(Steps(partial(self._step, one)))  # at once if no other insert waits

    def stage(self, connection: Connection) -> Fields:
        """Use the area whose descriptor the client has sent for its next inserts.

        Raises:
            ProtocolError: it sent none, or one of no such area; or an insert of the connection is
                not answered, which would lose its bytes.
        """
        if connection in self._inserting:
            raise ProtocolError("the staging area cannot change while an insert is in flight")
        descriptor = connection.take_descriptor()
        try:
            nbytes = check_memfd(
                descriptor, most_bytes=STAGING_ARENAS_MAX * self.arena.memory.nbytes
            )
        except ProtocolError:
            connection.discard([descriptor])
            raise
        self._close_staging(connection)
        self._stagings[connection] = StagingArea(descriptor, nbytes)
        return {}

    def unstage(self, connection: Connection) -> None:
        """The connection has ended: close its staging area; if an insert uses it, after that. What
        waits to be admitted is dropped."""
        inserting = self._inserting.get(connection)
        if inserting is None:
            self._close_staging(connection)
            return
        inserting.is_left = True
        self.left += 1
        inserting.waiting.cancel()
        inserting.untried.clear()

    def close(self) -> None:
        self._copiers.shutdown(wait=True, cancel_futures=True)

    # -- one request

    def _step(self, one: _Inserting) -> bool:
        """Begin with its next parts, for about STEP_SECONDS. Returns whether there are more."""
        try:
            self._begin_next(one)
        except Exception as error:  # noqa: BLE001 -- others have their steps
            one.untried.clear()
            what = "an insert was not handled; this is a bug, please report it"
            self.loop.call_exception_handler({"message": what, "exception": error})
        if one.untried:
            return True
        one.is_beginning = False
        one.handoffs.clear()
        self._answer_if_complete(one)
        return False

    def _begin_next(self, one: _Inserting) -> None:
        reserved: list[Reserved] = []
        try:
            self._reserve_next(one, reserved)
            if _is_small(reserved):
                self._store(one, reserved, self._fill(one, reserved))
            else:
                self._start(one, self._copy_and_store(one, reserved), waits=False)
        except BaseException:
            self._abandon(reserved)
            raise

    def _reserve_next(self, one: _Inserting, reserved: list[Reserved]) -> None:
        """Append those of its next parts that have their memory to `reserved`."""
        until = self.loop.time() + STEP_SECONDS
        while one.untried:
            part = one.untried.popleft()
            if is_handoff(part.address[1]):
                if self._may_wait(one, part):
                    insert = self._hand_off(one, part, one.handoffs.get(part.address))
                    one.handoffs[part.address] = self._start(one, insert, waits=True)
            elif (item := self._reserve(one, part)) is not None:
                reserved.append((part, item))
            elif part.result is None and self._may_wait(one, part):
                self._start(one, self._retry(one, part), waits=True)
            if self.loop.time() >= until:
                return

    def _may_wait(self, one: _Inserting, part: _Part) -> bool:
        """Whether this part may wait; else it is refused."""
        try:
            one.session.waits.check(one.session.id)
        except BufferFull as error:
            self._refuse(part, error)
            return False
        return True

    def _start(
        self, one: _Inserting, part: Coroutine[Any, Any, None], *, waits: bool
    ) -> "asyncio.Task[None]":
        task = one.tasks.own(self.loop.create_task(part))
        if waits:
            one.session.count(one.waiting.own(task))
        task.add_done_callback(lambda _: self._answer_if_complete(one))
        return task

    def _end(self, one: _Inserting) -> None:
        """The task of a part has done all. So the answer precedes what the item causes, such as its
        publication: 0.4 ms."""
        task = asyncio.current_task()
        assert task is not None
        one.tasks.discard(task)
        self._answer_if_complete(one)

    def _answer_if_complete(self, one: _Inserting) -> None:
        is_answered = self._inserting.get(one.connection) is not one
        if one.tasks or one.is_beginning or is_answered:
            return
        del self._inserting[one.connection]
        one.session.waits.add(one.session.id, -one.size)
        if one.is_left:
            self.left -= 1
            self._close_staging(one.connection)
        self._send_results(one)

    def _send_results(self, one: _Inserting) -> None:
        results = [part.result or FAILED for part in one.parts]
        one.connection.send({"id": one.request.id, "results": results})

    def _refuse(self, part: _Part, error: LookupBufferError) -> None:
        self.counters.add("inserts_refused")
        part.result = error_fields(error)

    def _exists(self, part: _Part) -> None:
        self.counters.add("inserts_exists")
        part.result = {"outcome": InsertOutcome.EXISTS.value}

    def _stored(self, part: _Part, item: Item) -> None:
        """The item is complete, and pinned until its readers are told."""
        self.counters.add("inserts_stored")
        self.counters.add("bytes_inserted", item.nbytes)
        self.reads.arrived(item.address)
        part.result = {"outcome": InsertOutcome.STORED.value, "checksum": item.checksum}

    # -- shared items

    def _reserve(self, one: _Inserting, part: _Part) -> Item | None:
        """Memory for a part; None if it has its result, or has to be tried again: another one is
        writing the key, or there is no room yet."""
        try:
            item = self.arena.reserve(
                part.address, part.header, origin="local", ttl_seconds=one.request.ttl_seconds
            )
        except Evicting:
            return None
        except LookupBufferError as error:
            self._refuse(part, error)
            return None
        if item is None and self.arena.holds(part.address):
            self.claims.inserted(one.session, part.address)
            self._exists(part)
        return item

    async def _retry(self, one: _Inserting, part: _Part) -> None:
        """Another one is writing the key: insert it if that fails. Or room is being made for it.
        Refuse it if that takes long, as a transfer over a slow network may."""
        until = self.loop.time() + WRITING_SECONDS_MAX
        while (item := await self._reserve_in_turn(one, part)) is None:
            if part.result is not None:
                return
            if self.loop.time() >= until:
                self._refuse(part, BufferFull(BUSY))
                return
            await self.waiting.pause(part.address, LOOK_AGAIN_SECONDS)
        one.admitted()
        await self._copy_and_store(one, [(part, item)])

    async def _reserve_in_turn(self, one: _Inserting, part: _Part) -> Item | None:
        def undo(item: Item | None) -> None:
            if item is not None:
                self.arena.abandon(item)

        return await self._turns.run(partial(self._reserve, one, part), undo)

    async def _copy_and_store(self, one: _Inserting, reserved: Sequence[Reserved]) -> None:
        try:
            self._store(one, reserved, await self._copy(one, reserved))
        except BaseException:
            self._abandon(reserved)
            raise
        self._end(one)

    def _store(
        self, one: _Inserting, reserved: Sequence[Reserved], checksums: Sequence[int]
    ) -> None:
        for (part, item), checksum in zip(reserved, checksums, strict=True):
            pin = self._commit(one, item, checksum)
            try:
                self.claims.inserted(one.session, item.address)
                self._stored(part, item)
            finally:
                self.arena.release([pin.ticket], one.session.id)

    # -- hand-offs

    async def _hand_off(
        self, one: _Inserting, part: _Part, earlier: "asyncio.Task[None] | None"
    ) -> None:
        """Insert a hand-off, after an earlier one of the same key in the request."""
        if earlier is not None:
            await asyncio.wait([earlier])
        until = self.loop.time() + one.request.wait_seconds
        admitted: asyncio.Future[Item] = self.loop.create_future()
        arrival = Arrival(part.address, part.header, one.request.ttl_seconds, until, admitted)
        try:
            item = await self.handoffs.admit(arrival)
            one.admitted()
            pin = await self._copy_and_commit(one, part, item)
            try:
                if await self.announcements.confirm(item, until) is InsertOutcome.STORED:
                    self._stored(part, item)
                else:
                    self._exists(part)
            finally:
                self.arena.release([pin.ticket], one.session.id)
        except LookupBufferError as error:
            self._refuse(part, error)
        finally:
            self.handoffs.landed(arrival)
        self._end(one)

    async def _copy_and_commit(self, one: _Inserting, part: _Part, item: Item) -> Pin:
        reserved = [(part, item)]
        try:
            (checksum,) = await self._copy(one, reserved)
            return self._commit(one, item, checksum)
        except BaseException:
            self._abandon(reserved)
            raise

    # -- the copy

    async def _copy(self, one: _Inserting, reserved: Sequence[Reserved]) -> list[int]:
        """Copy bytes into the reserved memory, which no end of the client interrupts; returns
        their checksums. Nothing writes there any more once this returns or raises."""
        if _is_small(reserved):
            return await self._turns.run(partial(self._fill, one, reserved))
        copying = self.loop.run_in_executor(self._copiers, self._fill, one, reserved)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:  # the node ends
            await asyncio.wait([copying])
            raise

    def _fill(self, one: _Inserting, reserved: Sequence[Reserved]) -> list[int]:
        source = -1 if one.staging is None else one.staging.fd
        return [
            fill(self.arena.bytes_of(item), source, part.offset, self._copiers)
            for part, item in reserved
        ]

    def _close_staging(self, connection: Connection) -> None:
        """On a thread: it may be the last to have the pages, and to free 1 GiB takes 0.25 s."""
        staging = self._stagings.pop(connection, None)
        if staging is not None:
            self.closer.close([staging.fd])

    def _abandon(self, reserved: Sequence[Reserved]) -> None:
        """Release the memory of those that are not committed."""
        for _, item in reserved:
            if not item.ready:
                self.arena.abandon(item)

    def _commit(self, one: _Inserting, item: Item, checksum: int) -> Pin:
        item.device = one.session.device
        return self.arena.commit(item, checksum, one.session.id)


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool all of whose threads run: the system may refuse one later, and then a copy that was
    begun would not end.

    Raises:
        RuntimeError: no thread can be started.
    """
    pool, met = ThreadPoolExecutor(threads, thread_name_prefix=name), threading.Barrier(threads)
    try:
        for _ in range(threads):
            pool.submit(met.wait)  # so none of them is idle, and the next one is started
    except RuntimeError:
        met.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool


def _is_small(reserved: Sequence[Reserved]) -> bool:
    """Whether they are copied on the loop's thread."""
    return sum(item.nbytes for _, item in reserved) <= COPY_INLINE_BYTES


def _parts(request: Insert, staging_bytes: int) -> list[_Part]:
    """Raises ProtocolError if the lists do not agree, or exceed the staging area."""
    if not len(request.keys) == len(request.headers) == len(request.offsets) > 0:
        raise ProtocolError("an insert needs as many headers and offsets as keys")
    parts = []
    for key, fields, offset in zip(request.keys, request.headers, request.offsets, strict=True):
        header = TensorHeader.from_fields(fields)
        part = _Part((request.namespace, key), header, offset)
        if header.nbytes and part.end > staging_bytes:
            raise ProtocolError("the staging area is smaller than the tensors")
        parts.append(part)
    return parts
