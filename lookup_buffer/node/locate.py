"""The locator: which nodes hold a key, and when that changes.

With a mirror it caches the store's records, which the store invalidates: a look-up of a cached key
costs no round trip. Without one, by the setting or because a package's store has none, it calls the
store for each look-up; so it does for a key that is moving to another server. It reads the
membership when a record names an unknown node. A failed store is a value, not an error. Called by
`read`, `devices`, `takes`, `announcements` and `claims`.

`Waiting` resumes a waiter when a client of this node inserts the key, when the store may have its
record or a free claim, after a pause, and at its deadline. Called by `read`, `insert`, `claims` and
`takes`. All runs on the loop's thread.
"""

import asyncio
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import Breaker, Storage
from lookup_buffer.node.turns import granted
from lookup_buffer.shm.index import RemoteIndex
from lookup_buffer.times import LOOK_UP_SECONDS_MAX, LOOK_UP_SECONDS_MIN
from store import (
    Found,
    Location,
    MetadataStore,
    Record,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from store.base import Entry, Mirror, MirrorClaims

OPEN_AGAIN_SECONDS = 1.0
REQUESTS_MAX = 512
"""Bound on the requests that one call of the store answers together."""
READING_MAX: Final = 16_384
"""Bound on the keys that are being read: each takes 2 to 4 KB until its request is answered."""
LOOK_AGAIN_SECONDS = 1.0
"""A waiter is resumed at least this often: some changes cause no notification, such as the
recovery of a peer that failed."""
POLL_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""Without a mirror no change causes one, and a waiter is resumed after these pauses; the last one
repeats."""

Cancel = Callable[[], object]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Located:
    """Where a key can be fetched; without sources the reason is set."""

    record: Record | None
    sources: tuple[tuple[Location, str], ...] = ()
    """(location, endpoint) of live nodes other than this one."""
    reason: MaybeMissed = ""
    offers: tuple[tuple[Location, str], ...] = ()
    """Live nodes with the hand-off but no space for it in their arena yet."""


NOT_REACHED = Located(None, reason=MissReason.STORE_DOWN)


def located(record: Record | None, directory: Directory) -> Located:
    """The meaning of a record, given the nodes that are alive now."""
    if record is None:
        return Located(None, reason=MissReason.ABSENT)
    alive = directory.sources(record)
    offers = tuple(source for source in alive if source[0].is_offer)
    sources = tuple(source for source in alive if not source[0].is_offer) if offers else alive
    reason = MissReason.ABSENT if offers else MissReason.OWNER_DEAD
    return Located(record, sources, "" if sources else reason, offers)


class _Batched(Generic[T, R]):
    """Calls of the store, one at a time: what is requested during one goes together in the next."""

    def __init__(self, call: Callable[[list[T]], Coroutine[Any, Any, R]]) -> None:
        self._call = call
        self._one_at_a_time = asyncio.Lock()
        self._requests: list[Sequence[T]] = []
        """Those of the call that begins next."""
        self._items = 0
        """Of these."""
        self._next: asyncio.Task[R] | None = None
        """That call; None if no request waits for one."""
        self._tasks: set[asyncio.Task[R]] = set()
        self._waiting: dict[asyncio.Task[R], list[Sequence[T]]] = {}
        """The requests of each call that has not begun."""

    def request(self, items: Sequence[T]) -> "asyncio.Task[R]":
        """The call that answers for `items`. It is shared: await it by `shield` or `wait`."""
        if self._next is None or self._is_full(len(items)):
            self._requests, self._items = [], 0
            self._next = asyncio.get_running_loop().create_task(self._run(self._requests))
            self._tasks.add(self._next)
            self._waiting[self._next] = self._requests
            self._next.add_done_callback(self._tasks.discard)
        self._requests.append(items)
        self._items += len(items)
        return self._next

    def withdraw(self, call: "asyncio.Task[R]", items: Sequence[T]) -> None:
        """Nobody waits for what `call` answers for `items`: unless it has begun, they are left
        out."""
        requests = self._waiting.get(call, [])
        for index, one in enumerate(requests):
            if one is items:
                del requests[index]
                if requests is self._requests:
                    self._items -= len(items)
                return

    def _is_full(self, more: int) -> bool:
        return len(self._requests) >= REQUESTS_MAX or self._items + more > READING_MAX

    async def _run(self, requests: list[Sequence[T]]) -> R:
        async with self._one_at_a_time:
            task = asyncio.current_task()
            assert task is not None
            self._waiting.pop(task, None)
            if requests is self._requests:
                self._next = None
            return await self._call(list(itertools.chain.from_iterable(requests)))


class Reading:
    """The keys that are being read: READING_MAX, or those of one request. Others wait for their
    turn, in the order of their requests."""

    def __init__(self) -> None:
        self._count = 0
        self._queue: dict[asyncio.Future[int], int] = {}
        """The requests that wait, and how many keys each has."""

    async def begin(self, count: int) -> None:
        """Wait until so many more may be read; `end` has to follow."""
        if not self._queue and self._fits(count):
            self._count += count
            return
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue[turn] = count
        try:
            await granted(turn, None, self.end)
        finally:
            self._queue.pop(turn, None)

    def end(self, count: int) -> None:
        self._count -= count
        while self._queue:
            turn, more = next(iter(self._queue.items()))
            if not turn.done() and not self._fits(more):
                return
            del self._queue[turn]
            if not turn.done():  # else it is cancelled
                self._count += more
                turn.set_result(more)

    def _fits(self, count: int) -> bool:
        return not self._count or self._count + count <= READING_MAX


@dataclass(slots=True)
class Locator:
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    remote_index: RemoteIndex
    """Lists the keys that other nodes hold, for this host's clients. Empty without a mirror."""
    mirrored: bool
    claims: "MirrorClaims | None" = None
    """Claims over the mirror's connections; None until the mirror exists."""
    _mirror: "Mirror | None" = None
    _store: MetadataStore | None = None
    _opening: asyncio.Task[None] | None = None
    _open_at: float = 0.0
    _look_ups: _Batched[QualifiedKey, dict[QualifiedKey, Found]] = field(init=False)
    """Without a mirror, and of what it cannot read while a slot of a cluster moves."""
    _meetings: _Batched[Record, None] = field(init=False)
    """Readings of the membership, for records that name unknown nodes."""
    _breakers: defaultdict[str, Breaker] = field(
        default_factory=lambda: defaultdict(lambda: Breaker(time.monotonic))
    )
    """By server name, so that a dead server does not cost every look-up its timeout."""
    _reading: Reading = field(default_factory=Reading)
    """By the mirror."""
    _epoch: int = -1
    """The epoch of the membership when the current round began."""
    _round: int = 0
    """Verdicts of earlier rounds are out of date, and their entries are removed from the remote
    index."""

    def __post_init__(self) -> None:
        self._look_ups, self._meetings = _Batched(self._look_up), _Batched(self._meet)

    def start(self) -> None:
        """Begin to open the store, in the background."""
        self._opening = self.loop.create_task(self._open())

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        """A `Located` for each of `addresses`, in order. Their namespace is the same. Does not
        suspend if all are cached, unless very many keys are being read."""
        if not addresses or await self.store() is None:
            return [NOT_REACHED] * len(addresses)
        if self._mirror is None:
            found = await self._read(addresses)
        else:
            found = await self._ask(self._mirror, addresses)
            moving = [n for n, one in enumerate(found) if isinstance(one, StoreRefused)]
            if moving:
                read = await self._read([addresses[n] for n in moving])
                for n, one in zip(moving, read, strict=True):
                    found[n] = one
        await self.meet([record for record in found if isinstance(record, Record)])
        return [
            NOT_REACHED if isinstance(one, StoreError) else located(one, self.directory)
            for one in found
        ]

    def cached(self, address: QualifiedKey) -> Located | None:
        """What `locate` returns, if that takes no call of the store; else None."""
        entry = None if self._mirror is None else self._mirror.entries(address[0]).get(address[1])
        if entry is None or entry.until < self.loop.time():
            return None
        if not self.knows(entry.record, entry.read_at):
            return None
        return located(entry.record, self.directory)

    def known(self, namespace: str, keys: Sequence[str]) -> list[bool | None]:
        """Whether a live node holds each key; None if that takes a call of the store."""
        if self._mirror is None:
            return [None] * len(keys)
        self._turn()
        entry_of, this_round = self._mirror.entries(namespace).get, self._round
        found: list[bool | None] = []
        for key in keys:
            entry = entry_of(key)
            if entry is None:
                found.append(None)
            elif entry.verdict_epoch == this_round:
                found.append(entry.verdict)
            else:
                found.append(self._judge((namespace, key), entry))
        return found

    @property
    def look_up_seconds(self) -> float:
        """How long a look-up without a timeout waits for the store: for its round trip, and for
        two more that read who an unknown holder is."""
        seconds = 3 * self.directory.round_trip.bound_seconds
        return min(max(seconds, LOOK_UP_SECONDS_MIN), LOOK_UP_SECONDS_MAX)

    async def store(self) -> MetadataStore | None:
        """The store; None if it cannot be opened. A failed attempt is repeated, at most once a
        second."""
        if self._store is None:
            if self._opening is None or self._opening.done():
                if self.loop.time() < self._open_at:
                    return None
                self.start()
            assert self._opening is not None
            await asyncio.wait([self._opening])
        return self._store

    def place_of(self, address: QualifiedKey) -> str:
        """The name of the server that has the key, as far as known; never blocks."""
        return "" if self._store is None else self._store.place_of(*address)

    def forget(self, address: QualifiedKey) -> None:
        """This node has newer information on the key: the next `locate` reads the store."""
        if self._mirror is not None:
            self._mirror.forget(*address)

    def tick(self) -> None:
        """To be called a few times a second, after `Directory.tick`."""
        if self.mirrored:
            self._turn()
            self.remote_index.mark_current()

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Cancel | None:
        """Call `notify` when the key's record may exist, or its claim may be free; until cancelled.

        Requests during or after that call see the change. There may be more calls than changes.
        Returns the cancellation, which is idempotent; None without a mirror, or before it exists.
        """
        return None if self._mirror is None else self._mirror.watch(*address, notify)

    def knows(self, record: Record | None, read_at: float = math.inf) -> bool:
        """Whether all nodes that `record` names are known; it was read at `read_at`, by the loop's
        clock, or just now."""
        return record is None or all(self.directory.knows(at, read_at) for at in record.locations)

    async def meet(self, records: Sequence[Record]) -> None:
        """Make known all nodes that these records name, as far as possible.

        All that ask for it before the membership is read share that reading.
        """
        if not all(map(self.knows, records)):
            await asyncio.wait([self._meetings.request(records)])

    def close(self) -> None:
        """Stop. Whoever closes the loop ends the tasks."""
        if self._opening is not None:
            self._opening.cancel()
        if self._mirror is not None:
            self._mirror.close()

    # -- the store

    async def _open(self) -> None:
        try:
            store = await self.storage.store()
        except StoreError:
            return
        finally:
            self._open_at = self.loop.time() + OPEN_AGAIN_SECONDS
        if self.mirrored:
            opened = store.mirror(self._forgotten)
            assert opened is not None, "the node has asked `Storage.has_mirror`"
            self._mirror, self.claims = opened
        self._store = store

    async def _ask(self, mirror: "Mirror", addresses: Sequence[QualifiedKey]) -> list[Found]:
        answer: asyncio.Future[list[Found]] = self.loop.create_future()
        await self._reading.begin(len(addresses))

        def answered(found: list[Found]) -> None:
            self._reading.end(len(addresses))
            if not answer.done():  # else whoever awaits it was cancelled
                answer.set_result(found)

        try:
            mirror.ask(addresses[0][0], [key for _, key in addresses], answered)
        except BaseException:  # a bug: it would be counted for ever
            self._reading.end(len(addresses))
            raise
        return await answer

    async def _read(self, addresses: Sequence[QualifiedKey]) -> list[Found]:
        call = self._look_ups.request(addresses)
        try:
            found = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._look_ups.withdraw(call, addresses)
            raise
        return [found[address] for address in addresses]

    async def _look_up(self, addresses: list[QualifiedKey]) -> dict[QualifiedKey, Found]:
        """Look up these keys at the store, except on servers whose breaker is open."""
        assert self._store is not None
        paused = StoreUnavailable("calls of this server pause, since the last ones failed")
        found: dict[QualifiedKey, Found] = dict.fromkeys(addresses, paused)
        groups = defaultdict(list)
        for address in found:
            groups[self.place_of(address)].append(address)
        asked = {place: keys for place, keys in groups.items() if self._breakers[place].allows()}
        items = list(itertools.chain.from_iterable(asked.values()))
        try:
            answers: Sequence[Found] = await self._store.look_up(items) if items else []
        except StoreError as error:
            answers = [StoreUnavailable(str(error))] * len(items)
        found.update(zip(items, answers, strict=True))
        for place, keys in asked.items():
            if all(isinstance(found[address], StoreError) for address in keys):
                self._breakers[place].failed()
            else:
                self._breakers[place].succeeded()
        return found

    async def _meet(self, records: list[Record]) -> None:
        assert self._store is not None, "the records come from there"
        await self.directory.meet(self._store, records)

    # -- verdicts

    def _judge(self, address: QualifiedKey, entry: "Entry") -> bool | None:
        """Whether a live node holds it. None if its node is unknown, or if the absence of a
        record was read too long ago."""
        record = entry.record
        if record is None:
            return None if entry.until < self.loop.time() else False
        if entry.read_at > self.directory.refreshed_at and not self.knows(record):
            return None
        entry.verdict = bool(located(record, self.directory).sources)
        entry.verdict_epoch = self._round
        if entry.verdict:
            self.remote_index.add(address)
        return entry.verdict

    def _turn(self) -> None:
        """Start a new round if nodes appeared or died."""
        if self.directory.epoch != self._epoch:
            self._epoch = self.directory.epoch
            self._judge_anew()

    def _judge_anew(self) -> None:
        self._round += 1
        self.remote_index.clear()

    def _forgotten(self, address: QualifiedKey | None) -> None:
        """The mirror dropped the key; None: many keys at once."""
        if address is None:
            self._judge_anew()
        else:
            self.remote_index.remove(address)


@dataclass(slots=True)
class Waiting:
    """Waiters for keys that are absent, or for claims that others hold."""

    loop: asyncio.AbstractEventLoop
    locator: Locator
    pauses: Sequence[float] = (LOOK_AGAIN_SECONDS,)
    """A waiter is resumed after these, though nothing has happened; the last one repeats. Seconds,
    not above LOOK_AGAIN_SECONDS."""
    _waiters: dict[QualifiedKey, set[asyncio.Event]] = field(default_factory=dict)

    def arrived(self, address: QualifiedKey) -> None:
        """A client of this node inserted the key: resume its waiters."""
        for event in self._waiters.get(address, ()):
            event.set()

    async def pause(self, address: QualifiedKey, seconds: float) -> None:
        """Return when `address` arrives here, or after `seconds`."""
        event = asyncio.Event()
        self._add(address, event)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
        finally:
            self._remove(address, event)

    @contextmanager
    def changes(
        self, address: QualifiedKey, until: float
    ) -> Iterator[Callable[[], Awaitable[None]]]:
        """A coroutine function: waits until another attempt may succeed, or until `until`.

        It returns once for all changes since its last return; the first call returns when no later
        change can be missed.
        """
        event = asyncio.Event()
        cancel: Cancel | None = None
        pauses = iter(self.pauses)

        async def changed() -> None:
            nonlocal cancel
            self._add(address, event)  # not before: most requests never wait
            if cancel is None:
                cancel = self.locator.watch(address, event.set)
            left = min(until - self.loop.time(), next(pauses, self.pauses[-1]))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left)):
                    await event.wait()
            event.clear()

        try:
            yield changed
        finally:
            if cancel is not None:
                cancel()
            self._remove(address, event)

    def _add(self, address: QualifiedKey, event: asyncio.Event) -> None:
        self._waiters.setdefault(address, set()).add(event)

    def _remove(self, address: QualifiedKey, event: asyncio.Event) -> None:
        if waiters := self._waiters.get(address):
            waiters.discard(event)
            if not waiters:
                del self._waiters[address]
