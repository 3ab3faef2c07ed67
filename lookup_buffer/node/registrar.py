"""The metadata writer: the only writer of this node's records, beats and statistics.

One task on the loop: it beats, refreshes the membership, reads invalidations and other
nodes' device pools, removes nodes that died long ago, flushes counters, and lets `publisher` write
the dirty set (`dirty_set`). All items and namespaces are written again every third of a record's
life, and at once after Redis lost its data. Failures, bugs included, are logged and retried: if
this task ended, other nodes would judge this one dead without a reason in the log. `node.py` starts
it; `shelf` (through `node.py`), `claims` and `announcements` report changes.

`Errands` are the periodic tasks of a beat, each with its own circuit breaker. A store may consist
of several servers, and each task has its own keys. If a task's server does not answer, the task
costs one timeout, is logged, and pauses; the other tasks and the publication on other servers
continue. A beat is delayed by at most one task: those that did not run come first after the next
beat. `Invalidations` drops this node's items of namespaces that the store lists as invalidated.
Items that are here when it reads the list are removed; later inserts stay. For LATE_SECONDS copies
from other nodes are removed, too, since those nodes may read the list later.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.counters import REMOVAL_REASONS, Counters
from lookup_buffer.node.dirty_set import AGAIN_PER_SECOND_MAX, Change, DirtySet
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.membership import Directory, Heartbeat, Pulse
from lookup_buffer.node.publisher import Publisher, Report
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.storage import Storage
from lookup_buffer.node.transfer import FailedFetches
from store import (
    DeviceLocation,
    Failure,
    GoneReason,
    Location,
    MetadataStore,
    PoolEndpoint,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

AGAIN_PER_SECOND_FLEET = 20_000.0
"""Bound on rewrites by all nodes together: a fifth of what one server can take. Divided by the
number of live nodes; but a walk of the inventory always ends before the next one begins."""
WALK_PAUSE_SECONDS = 60.0
"""After a server was lost, all items are written again, at most this often: unstable connections
must not keep the fleet rewriting."""
BREAKER_SECONDS = 0.05
"""How often it is checked whether calls may be made again."""
CLOSE_SECONDS = 5.0
EXPIRED_MAX = 8
"""Dead nodes that are removed with one beat: every node does it, so a few are enough."""
REST_SECONDS_MIN: Final = 2.0
REST_SECONDS_MAX: Final = 5.0
"""After its server returned, a task is late by at most this."""
LATE_SECONDS = 10.0
"""Every node with access to the store reads the list within two seconds."""
PAGE: Final = 200
"""So many items or changes are dealt with in one iteration of the loop: at most 6 ms measured."""
AGAIN_SECONDS = 60.0
"""A lasting failure is logged again after this time."""
KINDS_MAX = 16
"""At most this many different failures are logged within that time."""

Errand = tuple[str, Callable[[], Awaitable[object]]]
"""The text to log if it fails, and the task."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Troubles:
    clock: Callable[[], float] = time.monotonic
    _said_at: dict[str, float] = field(default_factory=dict)

    def log(self, what: str, error: Exception) -> None:
        """Log that `what` failed and why, unless it was logged recently."""
        text = f"{what}: {error}"
        if self._is_due(text):
            _log.warning("%s", text)

    def log_bug(self, what: str, error: Exception) -> None:
        """As `log`, for an unexpected error; with its traceback."""
        text = f"{what}: {error!r}; this is a bug, please report it"
        if self._is_due(text):
            _log.error("%s", text, exc_info=error)

    @contextmanager
    def logged(self, what: str, *kinds: type[Exception]) -> Iterator[None]:
        """Continue after errors of these kinds, after logging them."""
        try:
            yield
        except kinds as error:
            self.log(what, error)

    def _is_due(self, text: str) -> bool:
        now = self.clock()
        said = {said: at for said, at in self._said_at.items() if now - at < AGAIN_SECONDS}
        self._said_at = said
        if text in said or len(said) >= KINDS_MAX:
            return False
        said[text] = now
        return True


@dataclass(slots=True)
class Errands:
    troubles: Troubles
    clock: Callable[[], float] = time.monotonic
    _breakers: dict[str, Breaker] = field(default_factory=dict)
    _turn: int = 0

    async def run_until(self, due: float, errands: Sequence[Errand]) -> None:
        """Run the tasks one after another until `due`; the next call continues after the last
        one."""
        for _ in errands:
            await self.run(*errands[self._turn % len(errands)])
            self._turn += 1
            if self.clock() >= due:
                return

    async def run(self, trouble: str, errand: Callable[[], Awaitable[object]]) -> None:
        """Run one task, unless it pauses. `trouble`: the text to log if it fails."""
        breaker = self._breakers.get(trouble)
        if breaker is None:
            breaker = self._breakers[trouble] = Breaker(
                self.clock,
                failures_to_open=1,
                open_seconds_min=REST_SECONDS_MIN,
                open_seconds_max=REST_SECONDS_MAX,
            )
        if not breaker.allows():
            return
        try:
            await errand()
        except (StoreFull, StoreCorrupt) as error:  # its server answers: no pause
            self.troubles.log(trouble, error)
        except StoreError as error:
            self.troubles.log(trouble, error)
            breaker.failed()
            return
        except ConfigError:
            raise  # the node must end
        except Exception as error:  # noqa: BLE001 -- the publication must not depend on it
            self.troubles.log_bug(trouble, error)
            breaker.failed()
            return
        breaker.succeeded()

    def wake(self) -> None:
        """End all pauses: the store is new, or has lost its data."""
        self._breakers.clear()


@dataclass(slots=True)
class Invalidations:
    shelf: Shelf
    clock: Callable[[], float]
    wall_clock: Callable[[], float] = time.time
    _heard: dict[str, float] | None = None
    """None until the list was read for the first time."""
    _recent: dict[str, float] = field(default_factory=dict)
    """By namespace: until when copies from other nodes are removed."""
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at = self.wall_clock()

    async def apply(self, store: MetadataStore) -> None:
        """Read the list and remove what it names.

        Raises:
            StoreError: the store did not answer.
        """
        found, now = await store.invalidations(), self.clock()
        for namespace, at in found.items():
            if self._is_news(namespace, at):
                _log.info(
                    "namespace %s was invalidated: its items on this node are removed", namespace
                )
                await self._remove(self.shelf.items_of(namespace))
                self._recent[namespace] = now + LATE_SECONDS
        self._heard = found
        for namespace, until in list(self._recent.items()):
            await self._remove(self.shelf.items_of(namespace, fetched_only=True))
            if now >= until:
                del self._recent[namespace]

    async def _remove(self, items: Sequence[Item]) -> None:
        for start in range(0, len(items), PAGE):
            for item in items[start : start + PAGE]:
                self.shelf.remove(item, GoneReason.INVALIDATED)
            await asyncio.sleep(0)

    def _is_news(self, namespace: str, at: float) -> bool:
        if self._heard is None:  # older invalidations are of no concern: this node had no items
            return at >= self._started_at
        return self._heard.get(namespace) != at


@dataclass(slots=True)
class Registrar:
    loop: asyncio.AbstractEventLoop
    storage: Storage
    shelf: Shelf
    directory: Directory
    identity: Identity
    counters: Counters
    record_ttl_seconds: float
    give_up: Callable[[ConfigError], None]
    """Called if the node must end, with the reason."""
    report: Callable[[Sequence[Report]], None]
    """Called with the store's results for hand-offs."""
    clock: Callable[[], float] = time.monotonic
    failed_fetches: FailedFetches = field(default_factory=FailedFetches)
    count_claims: Callable[[], int] = lambda: 0
    """The number of claims of this node's engines."""
    endpoints: Callable[[], tuple[PoolEndpoint, ...]] = tuple
    """The device pools from which other nodes may receive."""
    look_for_pools: Callable[[MetadataStore], Awaitable[None]] | None = None
    """Called with each beat; see `Sightings.look`."""
    store_up: bool = False
    """Whether the last attempt succeeded."""
    failing: bool = False
    """Whether the last attempt failed."""
    _dirty: DirtySet = field(init=False)
    _publisher: Publisher = field(init=False)
    _heartbeat: Heartbeat = field(init=False)
    _invalidations: Invalidations = field(init=False)
    _troubles: Troubles = field(init=False)
    _errands: Errands = field(init=False)
    _breaker: Breaker = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closing: bool = False
    _namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    _undescribed: set[str] = field(default_factory=set)
    _must_describe: bool = False
    """One of them is new: not to be left until the next beat."""
    _task: asyncio.Task[None] | None = None
    _beat_at: float = 0.0
    _walked_at: float = 0.0
    _walk_due: bool = False
    _must_repeat: bool = False
    """The store has lost its data."""
    _beat_failed: bool = False
    """Since the last beat that succeeded."""
    _failovers: int = 0

    def __post_init__(self) -> None:
        self._dirty = DirtySet(self.clock)
        self._heartbeat = Heartbeat(self.identity, self.clock)
        self._invalidations = Invalidations(self.shelf, self.clock)
        self._troubles = Troubles(self.clock)
        self._errands = Errands(self._troubles, self.clock)
        self._breaker = Breaker(self.clock)
        self._publisher = Publisher(
            self.shelf, self.directory, self.identity, self.counters, self._dirty,
            self.record_ttl_seconds, self.report, self.clock,
        )  # fmt: skip

    def start(self) -> None:
        self._task = self.loop.create_task(self._run())

    def changed(
        self,
        address: QualifiedKey,
        reason: str,
        claim_token: str | None = None,
        void: tuple[Location, ...] = (),
    ) -> None:
        """The item at `address` appeared (reason "") or was removed (why).

        `claim_token` is the fencing token of the claim under which it was produced; the publication
        drops that claim. `void` are locations of nodes that do not have it; they are withdrawn
        first.
        """
        if reason in REMOVAL_REASONS:
            self.counters.add(reason)
        if self._dirty.add(Change(address, reason, claim_token, void)):
            self._wake.set()

    def describe(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Publish the parts of a namespace, now and whenever Redis lost them."""
        if self._namespaces.get(fingerprint) != parts:
            self._namespaces[fingerprint] = parts
            self._undescribed.add(fingerprint)
            self._must_describe = True
            self._wake.set()

    def ask_for_devices(self, device_of: Callable[[Item, str], DeviceLocation | None]) -> None:
        """Set the function that gives the device location beside a copy."""
        self._publisher.device_of = device_of

    def pending(self) -> int:
        """The number of addresses still to be written, or being written."""
        return len(self._dirty) + self._publisher.in_flight

    @property
    def breaker_open(self) -> bool:
        """Whether calls pause because the store failed repeatedly."""
        return self._breaker.open

    @property
    def established(self) -> bool:
        """Whether this node beats under its id, so that other nodes can find its items."""
        return self._heartbeat.established

    async def close(self) -> None:
        """Shut down: flush what can be flushed and remove the beat. Bounded."""
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()

    # -- the task

    async def _run(self) -> None:
        breaker = self._breaker
        self._walked_at = self._beat_at = self.clock()
        while not self._is_closing:
            try:
                await self._wait()
                if breaker.allows():
                    await self._take_turn(await self.storage.store())
                    self.store_up, self.failing = True, False
                    breaker.succeeded()
            except StoreError as error:
                self._failed()
                if not self._is_closing:
                    self._troubles.log(
                        f"node {self.identity.node} failed to write to the store; retried, and "
                        "other nodes do not find new items until it succeeds",
                        error,
                    )
                    await self._revive()
            except ConfigError as error:
                self.give_up(error)
                return  # without `_leave`: the beat in the store belongs to another node
            except Exception as error:  # noqa: BLE001 -- top of the task; the node needs it
                self._failed()
                self._troubles.log_bug("the metadata writer failed and continues", error)
        await self._leave()

    async def _take_turn(self, store: MetadataStore) -> None:
        retried: set[str] = set()
        if self.clock() >= self._beat_at:
            began = self.clock()
            await self._beat(store, began)
            self._beat_at = began + self._heartbeat.pause_seconds()
            retried = self._dirty.retry()
        if self._heartbeat.established:
            self._must_describe = False
            for namespace in list(self._undescribed):
                trouble = f"the description of namespace {namespace} was not written; retried"
                await self._errands.run(trouble, partial(self._describe, store, namespace))
            missed = await self._publisher.write(store, until=self._beat_at)
            if missed:
                servers = ", ".join(sorted(missed))
                error = StoreUnavailable(f"servers of the cluster were not reached: {servers}")
                self._troubles.log("some items were not published; retried with each beat", error)
            for place in retried - missed:
                while self._dirty.retry_place(place, PAGE):
                    await asyncio.sleep(0)

    def _failed(self) -> None:
        self.store_up, self.failing = False, True
        self.counters.add("store_failures")
        self._breaker.failed()

    async def _revive(self) -> None:
        trouble = "the embedded server was not restarted; retried"
        try:
            with self._troubles.logged(trouble, StoreError):
                await self.storage.revive()
        except Exception as error:  # noqa: BLE001 -- such as a thread that cannot be started
            self._troubles.log_bug(trouble, error)

    async def _wait(self) -> None:
        """Until the next beat, or until changes are due."""
        while (seconds := self._wait_seconds()) > 0 and not self._is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            self._wake.clear()

    def _wait_seconds(self) -> float:
        if not self._breaker.allows():
            return BREAKER_SECONDS
        until_beat = self._beat_at - self.clock()
        if not self._heartbeat.established:
            return until_beat  # changes do not end the wait
        if self._must_describe:
            return 0.0
        due = self._dirty.wait_seconds()
        return until_beat if due is None else min(until_beat, due)

    async def _beat(self, store: MetadataStore, began: float) -> None:
        self.shelf.remove_expired()
        was_established = self._heartbeat.established
        try:
            pulse = await self._heartbeat.beat(store)
        except StoreError:
            self._beat_failed = True
            raise
        if pulse is Pulse.NEW or (pulse is Pulse.KNOWN and await self._is_forgotten(store)):
            self._must_repeat = True  # also if this beat fails below
            self._errands.wake()
            if was_established:
                self.directory.store_lost_data()
        await self.directory.refresh(store)
        if pulse is Pulse.WATCHING:
            return  # meanwhile this node can read from others
        with self._troubles.logged("invalidated namespaces were not read; retried", StoreError):
            # It never pauses: after two beats of a node, an invalidation counts as applied there.
            await self._invalidations.apply(store)
        if self._must_repeat or self.clock() - self._walked_at > self.record_ttl_seconds / 3:
            self._repeat_all()
        self._repeat_after_failover(store)
        errands = (
            ("the description of this node was not written; retried", self._describe_node),
            ("device pools of other nodes were not read; retried", self._look_for_pools),
            ("dead nodes were not removed from the store; retried", self._remove_expired),
            (
                "locations of dead nodes were not withdrawn; readers skip them",
                self._publisher.withdraw_void,
            ),
            ("reasons of failed fetches were not written and are lost", self._note_failures),
            ("counters were not written; they are kept and retried", self._flush),
        )
        due = began + self._heartbeat.pause_seconds()
        await self._errands.run_until(
            due, [(trouble, partial(do, store)) for trouble, do in errands]
        )

    async def _is_forgotten(self, store: MetadataStore) -> bool:
        """Whether the store lost its data, and a beat that had failed for us hid it: it was carried
        out after the loss. Then the description of this node is gone."""
        if not self._beat_failed:
            return False
        me = self.identity
        info = (await store.node_infos([me.node])).get(me.node)
        self._beat_failed = False
        return info is None or info.boot != me.boot

    async def _describe_node(self, store: MetadataStore) -> None:
        gauges, claims = self.shelf.gauges(), self.count_claims()
        await store.describe_node(self.identity.info(gauges, claims, self.endpoints()))

    async def _look_for_pools(self, store: MetadataStore) -> None:
        if self.look_for_pools is not None:
            await self.look_for_pools(store)

    async def _remove_expired(self, store: MetadataStore) -> None:
        for node, boot in self.directory.expired()[:EXPIRED_MAX]:
            await store.leave(node, boot, reason="died")

    def _repeat_all(self) -> None:
        """Write all items and namespaces again: their records expire unless they are renewed."""
        self._undescribed |= self._namespaces.keys()
        self._walked_at = self.clock()
        self._must_repeat = False
        addresses = self.shelf.addresses()
        start = random.randrange(len(addresses) + 1)
        addresses = addresses[start:] + addresses[:start]  # each node of a fleet begins elsewhere
        share = AGAIN_PER_SECOND_FLEET / max(1, self.directory.count_alive())
        needed = len(addresses) / (self.record_ttl_seconds / 3)
        self._dirty.walk(addresses, max(needed, min(share, AGAIN_PER_SECOND_MAX)))

    def _repeat_after_failover(self, store: MetadataStore) -> None:
        """Write recent changes again at once, since a replica lags; then all, since a server may
        have returned empty."""
        failovers = store.failovers()
        if failovers > self._failovers:
            self._dirty.repeat_recent()
            self._walk_due = True
        self._failovers = failovers
        if self._walk_due and self.clock() - self._walked_at > WALK_PAUSE_SECONDS:
            self._walk_due = False
            self._repeat_all()

    async def _describe(self, store: MetadataStore, fingerprint: str) -> None:
        parts = self._namespaces[fingerprint]
        try:
            await store.describe_namespace(fingerprint, parts)
        except StoreCorrupt as error:  # another program's data; it is not overwritten
            self._troubles.log(f"namespace {fingerprint} cannot be described", error)
        if self._namespaces[fingerprint] is parts:  # else a newer description is due
            self._undescribed.discard(fingerprint)

    async def _note_failures(self, store: MetadataStore) -> None:
        failed = self.failed_fetches.take()
        if failed:
            me = self.identity.node
            await store.note_failures([Failure(*at, *why, me) for at, why in failed.items()])

    async def _flush(self, store: MetadataStore) -> None:
        counters, hits = self.counters.take_unflushed()
        by_namespace: dict[str, dict[str, int]] = {}
        for (namespace, key), count in hits.items():
            by_namespace.setdefault(namespace, {})[key] = count
        missed: StoreError | None = None
        left: dict[QualifiedKey, int] = {}
        # If a key holds another program's data, only the counts for that key are lost.
        try:
            if counters:
                with self._troubles.logged("counters of this node were discarded", StoreCorrupt):
                    await store.add_stats(self.identity.node, counters)
                counters = {}
        except StoreError as error:
            missed = error
        for namespace, keys in by_namespace.items():
            try:
                with self._troubles.logged(
                    f"hits of namespace {namespace} were discarded", StoreCorrupt
                ):
                    await store.add_hits(namespace, keys)
            except StoreError as error:
                missed = error
                left |= {(namespace, key): count for key, count in keys.items()}
        if missed is not None:
            self.counters.put_back(counters, left)
            raise missed

    async def _leave(self) -> None:
        if not self._heartbeat.established:
            return
        try:
            store = await self.storage.store()
            await self._publisher.write(store, until=self._beat_at)
            await self._flush(store)
            await store.leave(self.identity.node, self.identity.boot, reason="stopped")
        except StoreError:
            pass  # other nodes will detect that this one no longer beats
