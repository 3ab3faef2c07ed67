"""Reads: pins what is here, brings what other nodes have, and answers `has_caches`.

A key that is absent here is located and fetched once for all requests that wait for it meanwhile
(single-flight). If none of them waits any more, it is not fetched, unless its bytes are on the way.
A hand-off may be removed or replaced at any moment, so a fetched copy of one is never kept: each
reader gets its own, which is freed with its pin. Called by `server`, `prefetch`, `insert` and
`claims` on the loop's thread; `transfer` copies on `lb-fetch`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import (
    Answer,
    Connection,
    Fetching,
    Fields,
    Session,
    Tasks,
)
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.items import Pin
from lookup_buffer.node.links import again_seconds
from lookup_buffer.node.locate import Located, Locator, Waiting
from lookup_buffer.node.transfer import FETCH_OWNER, TURN_SECONDS, Fetched, Fetcher, Wanted
from lookup_buffer.protocol.messages import Contains, Select, Touch
from lookup_buffer.times import CALL_SECONDS, NODE_SHARE

GRACE_SECONDS: Final = NODE_SHARE * CALL_SECONDS
"""If a key is not even located this long after a request's deadline, it is a miss."""

NOTHING: Final = Fetched(None)
"""Nothing came from another node; the key may have been inserted here."""
_BUSY: Final = Fetched(None, MissReason.BUSY)
_AGAIN: Final = (MissReason.PEER_FAILED, MissReason.BUSY)
"""Misses whose end is not notified: who waits tries again after a pause."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Fetch:
    """One key that is located and fetched, for all its readers.

    The pin of what came is kept until each reader has left, so a reader pins it before that.
    """

    address: QualifiedKey
    readers: "list[_Reader]" = field(default_factory=list)
    wanted: Wanted | None = None
    """While its bytes are on the way, or wait for their turn; there are `nbytes` of them."""
    nbytes: int = 0
    is_waiting: bool = False
    """Whether they wait for their turn."""
    result: Fetched | None = None
    look_up: "_LookUp | None" = None
    """The one that locates it."""
    is_doubted: bool = False
    """The running look-up may be out of date: repeat it."""


@dataclass(slots=True, eq=False)
class _LookUp:
    """Fetches that are located together. `read`: how many of them have readers and no result."""

    fetches: list[_Fetch]
    read: int
    task: "asyncio.Task[None]" = field(init=False)


@dataclass(slots=True, eq=False)
class _Reader:
    """A request that waits for `fetches`. `news`: one whose transfer begins, or waits for its turn,
    or that has its result."""

    fetches: set[_Fetch] = field(default_factory=set)
    news: asyncio.Queue[_Fetch] = field(default_factory=asyncio.Queue)

    async def came(self) -> list[_Fetch]:
        """Of `fetches` those that have their result since the last call, if any; waits for news."""
        news = {await self.news.get(): None}
        while not self.news.empty():
            news[self.news.get_nowait()] = None
        return [one for one in news if one in self.fetches and one.result is not None]

    def waiting(self) -> list[_Fetch]:
        return [fetch for fetch in self.fetches if fetch.is_waiting]


@dataclass(slots=True)
class Reads:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    locator: Locator
    fetcher: Fetcher
    waiting: Waiting
    counters: Counters
    boot: str
    _fetches: dict[QualifiedKey, _Fetch] = field(default_factory=dict)
    _tasks: Tasks = field(default_factory=Tasks)

    # -- select

    def select(self, connection: Connection, session: Session, request: Select) -> Answer:
        """Pin an item. If it is absent here, and perhaps elsewhere, a coroutine fetches it, and
        waits for it if the request says so.

        Raises:
            BufferFull: pins and reservations would exceed their share.
        """
        address = (request.namespace, request.key)
        held = self.hold(session, address)
        if held is not None:
            return self.resident(held)
        reason = "" if request.wait_seconds else self.missing(address)
        return self.missed(reason) if reason else self._select(connection, session, request)

    async def _select(self, connection: Connection, session: Session, request: Select) -> Fields:
        address = (request.namespace, request.key)
        hold = partial(self.hold, session, address)
        with connection.fetching(request.id) as fetching:
            found = await self.bring(address, request.wait_seconds, hold, fetching)
        if isinstance(found, Pin):
            return self.resident(found)
        return self.missed(found, timed_out=request.wait_seconds > 0)

    def resident(self, held: Pin) -> Fields:
        """The answer with a pinned item."""
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

    def missed(self, reason: MissReason, *, timed_out: bool = False) -> Fields:
        """Count a miss. Returns the answer, with the reason why another attempt found nothing."""
        self.counters.miss(MissReason.TIMEOUT if timed_out else reason)
        return {"state": "missing", "reason": reason}

    # -- what is here

    def hold(
        self, session: Session, address: QualifiedKey, fetched: Fetched = NOTHING
    ) -> Pin | None:
        """Pin the item at `address` for the session, or what came if that is a copy for this reader
        alone, and count the hit. None if there is neither, or if the session has ended.

        Raises:
            BufferFull: pins and reservations would exceed their share.
        """
        if session.has_ended:
            return None
        held = self.arena.hold(address, session.id, session.ranks())
        if held is None and fetched.held is not None and is_handoff(address[1]):
            held = self.arena.pin(fetched.held.item, session.id, session.ranks())
        if held is not None:
            self.counters.hit(held.item)
            self.counters.spare(session.encodes)
        return held

    def touch(self, session: Session, request: Touch) -> None:
        """Count reads through the local index."""
        for key, count in request.reads.items():
            item = self.arena.touch((request.namespace, key))
            if item is not None:
                self.counters.hit(item, count)
                self.counters.spare(session.encodes * count)

    # -- what other nodes have

    async def bring(
        self,
        address: QualifiedKey,
        wait_seconds: float,
        hold: Callable[[Fetched], T | None],
        fetching: Fetching = lambda _: None,
    ) -> T | MissReason:
        """Fetch an absent key as soon as a node has it; a miss after `wait_seconds`. A holder that
        fails is asked again, after pauses.

        Returns what `hold` returns for what came, or the reason of the miss. `hold` pins it, or
        returns None if it is gone again. A transfer has a deadline of its own; `fetching` is called
        when one begins, or waits for its turn: that wait ends after `wait_seconds`, or after
        TURN_SECONDS if they are 0. A store that hangs is a miss, in time for the client.
        """
        until = self.loop.time() + wait_seconds
        turn_until = until if wait_seconds else until + TURN_SECONDS
        late = MissReason.STORE_DOWN
        failures = 0
        try:
            async with asyncio.timeout_at(until + GRACE_SECONDS) as bound:
                with self.waiting.changes(address, until) as changed:
                    while True:
                        with self._joined([address]) as reader:
                            while (fetched := (fetch := await reader.news.get()).result) is None:
                                late = MissReason.BUSY
                                bound.reschedule(turn_until if fetch.is_waiting else None)
                                fetching(fetch.nbytes)
                            if (found := hold(fetched)) is not None:
                                return found
                        if self.loop.time() >= until:
                            return fetched.reason or MissReason.ABSENT
                        late = MissReason.STORE_DOWN
                        bound.reschedule(until + GRACE_SECONDS)
                        failures = failures + 1 if fetched.reason in _AGAIN else 0
                        with suppress(TimeoutError):
                            async with asyncio.timeout(
                                again_seconds(failures) if failures else None
                            ):
                                await changed()
        except TimeoutError:
            found = hold(NOTHING)
            return late if found is None else found

    async def bring_each(
        self, addresses: Sequence[QualifiedKey], turn_until: float
    ) -> AsyncIterator[list[tuple[QualifiedKey, Fetched]]]:
        """Fetch absent keys; yields those that came or are missing, as they do.

        What came is pinned until the next step. What waits for its turn at `turn_until`, by the
        loop's clock, is missing.
        """
        with self._joined(addresses) as reader:
            while reader.fetches:
                try:
                    async with asyncio.timeout_at(turn_until if reader.waiting() else None):
                        came = await reader.came()
                except TimeoutError:
                    came = reader.waiting()
                if came:
                    yield [(fetch.address, fetch.result or _BUSY) for fetch in came]
                for fetch in came:
                    self._leave(fetch, reader)

    def missing(self, address: QualifiedKey) -> MaybeMissed:
        """Why no node has the key, if that is known without a call of the store; else ""."""
        if address in self._fetches:
            return ""
        found = self.locator.cached(address)
        return "" if found is None else found.reason

    def arrived(self, address: QualifiedKey) -> None:
        """A client of this node inserted the key: its readers continue."""
        fetch = self._fetches.get(address)
        if fetch is not None:
            if fetch.wanted is not None:
                self.fetcher.withdraw(fetch.wanted)
            self._settle(fetch, NOTHING)
        self.waiting.arrived(address)

    def published(self, address: QualifiedKey) -> None:
        """A reply of the store showed that the key is stored: an earlier "absent" is out of
        date."""
        fetch = self._fetches.get(address)
        if fetch is not None:
            fetch.is_doubted = True

    # -- has_caches

    def contains(self, _: Session, request: Contains) -> Answer:
        """Which keys are here or elsewhere. If that takes a call of the store, a coroutine looks
        up what is not known, as far as the request's budget allows."""
        present = [self.arena.holds((request.namespace, key)) for key in request.keys]
        away = [index for index, here in enumerate(present) if not here]
        known = self.locator.known(request.namespace, [request.keys[index] for index in away])
        unknown = []
        for index, held in zip(away, known, strict=True):
            present[index] = bool(held)
            if held is None:
                unknown.append(index)
        return self._look_up(request, present, unknown) if unknown else {"present": present}

    async def _look_up(
        self, request: Contains, present: list[bool], unknown: Sequence[int]
    ) -> Fields:
        addresses = [(request.namespace, request.keys[index]) for index in unknown]
        seconds = request.budget_seconds
        if seconds is None:
            seconds = self.locator.look_up_seconds
        located = self.loop.create_task(self.locator.locate(addresses))
        try:
            await asyncio.wait([located], timeout=seconds)
        finally:
            is_late = located.cancel()
        if not is_late:
            for index, found in zip(unknown, located.result(), strict=True):
                present[index] = bool(found.sources)
        return {"present": present}

    # -- fetches

    @contextmanager
    def _joined(self, addresses: Sequence[QualifiedKey]) -> Iterator[_Reader]:
        """A reader of the fetches of these distinct keys; those that are not running begin."""
        reader, known, unknown = _Reader(), [], []
        for address in addresses:
            fetch = self._fetches.get(address)
            if fetch is None:
                fetch = _Fetch(address)
                if not is_handoff(address[1]):
                    self._fetches[address] = fetch
                found = self.locator.cached(address)
                if found is None:
                    unknown.append(fetch)
                else:
                    known.append((fetch, found))
            elif fetch.wanted is not None:
                reader.news.put_nowait(fetch)
            elif fetch.look_up is not None and not fetch.readers:
                fetch.look_up.read += 1
            fetch.readers.append(reader)
            reader.fetches.add(fetch)
        try:
            if known:
                self._begin(known)
            if unknown:
                self._start_look_up(unknown)
            yield reader
        finally:
            for fetch in tuple(reader.fetches):
                self._leave(fetch, reader)

    def _leave(self, fetch: _Fetch, reader: _Reader) -> None:
        reader.fetches.remove(fetch)
        fetch.readers.remove(reader)
        if fetch.readers:
            return
        if fetch.result is None:
            self._withdraw(fetch)
        else:
            self._release(fetch.result)

    def _withdraw(self, fetch: _Fetch) -> None:
        """It has no readers: it ends, unless its bytes are on the way."""
        if fetch.look_up is not None:
            self._unread(fetch.look_up)
        elif fetch.wanted is not None and self.fetcher.withdraw(fetch.wanted):
            self._settle(fetch, NOTHING)

    def _start_look_up(self, fetches: list[_Fetch]) -> None:
        look_up = _LookUp(fetches, len(fetches))
        for fetch in fetches:
            fetch.look_up = look_up
        look_up.task = self._tasks.own(self.loop.create_task(self._locate(look_up)))

    def _unread(self, look_up: _LookUp) -> None:
        """One of its fetches less has readers. Once half of them have none, those end, and the
        others are located anew: so what is located is bounded by the requests that wait for it."""
        look_up.read -= 1
        if 2 * look_up.read > len(look_up.fetches):
            return
        look_up.task.cancel()
        left = [fetch for fetch in look_up.fetches if fetch.result is None]
        for fetch in left:
            fetch.look_up = None
            if not fetch.readers:
                self._settle(fetch, NOTHING)
        if again := [fetch for fetch in left if fetch.readers]:
            self._start_look_up(again)

    async def _locate(self, look_up: _LookUp) -> None:
        fetches = look_up.fetches
        try:
            while fetches:
                located = await self.locator.locate([fetch.address for fetch in fetches])
                for fetch in fetches:
                    fetch.look_up = None
                fetches = self._begin(list(zip(fetches, located, strict=True)))
                look_up.fetches, look_up.read = fetches, len(fetches)
                for fetch in fetches:
                    fetch.look_up = look_up
        finally:  # a bug, or the node shuts down
            for fetch in fetches:
                if fetch.look_up in (None, look_up):
                    fetch.look_up = None
                    self._settle(fetch, Fetched(None, MissReason.STORE_DOWN))

    def _begin(self, fetches: Sequence[tuple[_Fetch, Located]]) -> list[_Fetch]:
        """Begin the transfers, and settle misses. Returns those whose look-up must be repeated."""
        again, wanted = [], []
        for fetch, found in fetches:
            if fetch.result is not None:
                continue  # inserted here meanwhile
            if not fetch.readers:
                self._settle(fetch, NOTHING)
            elif found.sources and self.arena.has_place(fetch.address):
                self._settle(fetch, _BUSY)  # unless it is complete now; who has time waits for that
            elif found.sources and found.record is not None:
                loan = is_handoff(fetch.address[1])
                settle, waits = partial(self._settle, fetch), partial(self._wait, fetch)
                fetch.wanted = Wanted(fetch.address, found, settle, loan, waits)
                fetch.nbytes = fetch.wanted.nbytes
                wanted.append(fetch.wanted)
                for reader in fetch.readers:
                    reader.news.put_nowait(fetch)
            elif fetch.is_doubted:
                fetch.is_doubted = False
                again.append(fetch)
            else:
                self._settle(fetch, Fetched(None, found.reason))
        self.fetcher.fetch(wanted)
        return again

    def _wait(self, fetch: _Fetch, is_waiting: bool) -> None:
        """Its transfer waits for its turn, or no longer does."""
        if fetch.is_waiting != is_waiting:
            fetch.is_waiting = is_waiting
            for reader in fetch.readers:
                reader.news.put_nowait(fetch)
        if is_waiting and not fetch.readers:
            self._withdraw(fetch)  # a holder failed, and the next one is busy

    def _settle(self, fetch: _Fetch, fetched: Fetched) -> None:
        """This is the result of a fetch, unless an insert of this node came first."""
        if fetched.reason == MissReason.STALE:
            self.locator.forget(fetch.address)
        if fetch.result is None:
            if self._fetches.get(fetch.address) is fetch:
                del self._fetches[fetch.address]
            fetch.result, fetch.wanted, fetch.is_waiting = fetched, None, False
            look_up, fetch.look_up = fetch.look_up, None
            if look_up is not None and fetch.readers:
                self._unread(look_up)
            for reader in fetch.readers:
                reader.news.put_nowait(fetch)
            if fetch.readers:
                return  # the last of them releases it
        self._release(fetched)

    def _release(self, fetched: Fetched) -> None:
        if fetched.held is not None:
            self.arena.release([fetched.held.ticket], FETCH_OWNER)
