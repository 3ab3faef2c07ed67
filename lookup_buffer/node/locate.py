"""The locator: which nodes hold a key, and when that changes.

With a mirror it caches the store's records, which the store invalidates: a look-up of a cached key
costs no round trip. Without one, by the setting or because a package's store has none, it calls the
store for each look-up, and polls it for waiters. It reads the membership when a record names an
unknown node. A failed store is a value, not an error. Called by `read`, `prefetch`, `devices`,
`takes`, `announcements` and `arbiter`.

`Waiting` resumes a waiter when a client of this node inserts the key, when the store may have its
record or a free claim, and at its deadline. Called by `read`, `insert`, `claims` and `takes`. All
runs on the loop's thread.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.storage import Storage
from lookup_buffer.shm.index import RemoteIndex
from store import (
    Found,
    Location,
    MetadataStore,
    Record,
    StoreError,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from store.base import Entry, Mirror, MirrorClaims

OPEN_AGAIN_SECONDS = 1.0
QUESTIONS_MAX = 512
"""Bound on the look-ups of one round trip, without a mirror."""
LOOK_AGAIN_SECONDS = 1.0
"""A waiter is resumed at least this often: some changes cause no notification, such as the
recovery of a peer that failed."""
POLL_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""Without a mirror a watch polls: its calls come after these pauses; the last one repeats."""


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
    _is_open: asyncio.Event = field(default_factory=asyncio.Event)
    _opening: asyncio.Task[None] | None = None
    _open_at: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Watches that poll, or that wait for the mirror; and the look-ups without a mirror."""
    _questions: list[tuple[Sequence[QualifiedKey], asyncio.Future[list[Found]]]] = field(
        default_factory=list
    )
    """Look-ups without a mirror that are not sent yet."""
    _asking: asyncio.Task[None] | None = None
    _breakers: defaultdict[str, Breaker] = field(
        default_factory=lambda: defaultdict(lambda: Breaker(time.monotonic))
    )
    """By server name, so that a dead server does not cost every look-up its timeout."""
    _meeting: asyncio.Task[None] | None = None
    """Will read the membership, for the records in `_unmet`."""
    _meeting_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unmet: list[Record] = field(default_factory=list)
    _epoch: int = -1
    """The epoch of the membership when the current round began."""
    _round: int = 0
    """Verdicts of earlier rounds are out of date, and their entries are removed from the remote
    index."""

    def start(self) -> None:
        """Begin to open the store, in the background."""
        self._opening = self.loop.create_task(self._open())

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        """A `Located` for each of `addresses`, in order. Does not suspend if all are cached."""
        if await self.store() is None:
            return [NOT_REACHED] * len(addresses)
        if self._mirror is None:
            found = await self._ask_later(addresses)
        else:
            found = await self._ask(self._mirror, addresses)
        await self.meet([record for record in found if isinstance(record, Record)])
        return [self._located(one) for one in found]

    def cached(self, address: QualifiedKey) -> Located | None:
        """What `locate` returns, if that takes no call of the store; else None."""
        entry = None if self._mirror is None else self._mirror.entries(address[0]).get(address[1])
        if entry is None or entry.until < self.loop.time() or not self.knows(entry.record):
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
        return self.storage.place_of(address)

    def forget(self, address: QualifiedKey) -> None:
        """This node has newer information on the key: the next `locate` reads the store."""
        if self._mirror is not None:
            self._mirror.forget(*address)

    def tick(self) -> None:
        """To be called a few times a second, after `Directory.tick`."""
        if self.mirrored:
            self._turn()
            self.remote_index.mark_current()

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], object]:
        """Call `notify` when the key's record may exist, or its claim may be free; until cancelled.

        Requests during or after that call see the change. There may be more calls than changes.
        Returns the cancellation, which is idempotent.
        """
        if self._mirror is not None:
            return self._mirror.watch(*address, notify)
        watch = self._watch_when_open(address, notify) if self.mirrored else _poll(notify)
        task = self.loop.create_task(watch)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.cancel

    def knows(self, record: Record | None) -> bool:
        """Whether all nodes that `record` names are known."""
        return record is None or all(map(self.directory.knows, record.locations))

    async def meet(self, records: Sequence[Record]) -> None:
        """Make known all nodes that these records name, as far as possible.

        All that ask for it before the membership is read share that reading.
        """
        if all(map(self.knows, records)):
            return
        self._unmet += records
        if self._meeting is None:
            self._meeting = self.loop.create_task(self._meet())
        await asyncio.wait([self._meeting])

    async def _meet(self) -> None:
        async with self._meeting_lock:
            records, self._unmet, self._meeting = self._unmet, [], None
            assert self._store is not None, "the records come from there"
            await self.directory.meet(self._store, records)

    def close(self) -> None:
        """Stop. Whoever closes the loop ends the cancelled tasks."""
        for task in (self._opening, self._asking, self._meeting, *self._tasks):
            if task is not None:
                task.cancel()
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
            opened = self.storage.mirror(self._forgotten)
            assert opened is not None, "the node has asked `Storage.has_mirror`"
            self._mirror, self.claims = opened
        self._store = store
        self._is_open.set()

    async def _watch_when_open(self, address: QualifiedKey, notify: Callable[[], None]) -> None:
        await self._is_open.wait()
        assert self._mirror is not None
        cancel = self._mirror.watch(*address, notify)
        try:
            await self.loop.create_future()  # until this task is cancelled
        finally:
            cancel()

    # -- look-ups in the mirror

    async def _ask(self, mirror: "Mirror", addresses: Sequence[QualifiedKey]) -> list[Found]:
        keys_by_namespace = defaultdict(list)
        for namespace, key in addresses:
            keys_by_namespace[namespace].append(key)
        answers: dict[str, asyncio.Future[list[Found]]] = {}
        for namespace, keys in keys_by_namespace.items():
            answer = answers[namespace] = self.loop.create_future()
            mirror.ask(namespace, keys, _setter(answer))
        found: dict[QualifiedKey, Found] = {}
        for namespace, answer in answers.items():
            for key, one in zip(keys_by_namespace[namespace], await answer, strict=True):
                found[namespace, key] = one
        return [found[address] for address in addresses]

    def _located(self, found: Found) -> Located:
        return NOT_REACHED if isinstance(found, StoreError) else located(found, self.directory)

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

    # -- look-ups without a mirror

    async def _ask_later(self, addresses: Sequence[QualifiedKey]) -> list[Found]:
        """Look-ups that are requested during a round trip go together in the next one."""
        answer: asyncio.Future[list[Found]] = self.loop.create_future()
        self._questions.append((addresses, answer))
        if self._asking is None or self._asking.done():
            self._asking = self.loop.create_task(self._ask_all())
        return await answer

    async def _ask_all(self) -> None:
        while self._questions:
            asked = self._questions[:QUESTIONS_MAX]
            del self._questions[:QUESTIONS_MAX]
            found = await self._read({item for addresses, _ in asked for item in addresses})
            for addresses, answer in asked:
                _setter(answer)([found[address] for address in addresses])

    async def _read(self, addresses: set[QualifiedKey]) -> dict[QualifiedKey, Found]:
        assert self._store is not None
        paused = StoreUnavailable("calls of this server pause, since the last ones failed")
        found: dict[QualifiedKey, Found] = dict.fromkeys(addresses, paused)
        groups = defaultdict(list)
        for address in addresses:
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


@dataclass(slots=True)
class Waiting:
    """Waiters for keys that are absent, or for claims that others hold."""

    loop: asyncio.AbstractEventLoop
    locator: Locator
    _waiters: dict[QualifiedKey, set[asyncio.Event]] = field(default_factory=dict)

    def arrived(self, address: QualifiedKey) -> None:
        """A client of this node inserted the key: resume its waiters."""
        for event in self._waiters.get(address, ()):
            event.set()

    async def pause(self, address: QualifiedKey, seconds: float) -> None:
        """Return when `address` arrives here, or after `seconds`."""
        with self._waiter(address) as event, suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    @contextmanager
    def changes(
        self, address: QualifiedKey, until: float
    ) -> Iterator[Callable[[], Awaitable[None]]]:
        """A coroutine function: waits until another attempt may succeed, or until `until`.

        It returns once for all changes since its last return; the first call returns when no later
        change can be missed.
        """
        with ExitStack() as watch:
            event: asyncio.Event | None = None  # most requests never wait

            async def changed() -> None:
                nonlocal event
                if event is None:
                    event = watch.enter_context(self._waiter(address))
                    watch.callback(self.locator.watch(address, event.set))
                left = min(until - self.loop.time(), LOOK_AGAIN_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, left)):
                        await event.wait()
                event.clear()

            yield changed

    @contextmanager
    def _waiter(self, address: QualifiedKey) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        waiters = self._waiters.setdefault(address, set())
        waiters.add(event)
        try:
            yield event
        finally:
            waiters.discard(event)
            if not waiters:
                del self._waiters[address]


def _setter(answer: "asyncio.Future[list[Found]]") -> Callable[[list[Found]], None]:
    """Sets the result, unless whoever awaits it was cancelled."""
    return lambda found: None if answer.done() else answer.set_result(found)


async def _poll(notify: Callable[[], None]) -> None:
    for seconds in itertools.chain(POLL_SECONDS, itertools.repeat(POLL_SECONDS[-1])):
        await asyncio.sleep(seconds)
        notify()
