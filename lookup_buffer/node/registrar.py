"""The metadata writer: the only writer of this node's records, beats and statistics.

One task on the loop: it beats, refreshes the membership, reads invalidations and other
nodes' device pools, removes nodes that died long ago, flushes counters, and lets `publisher` write
the dirty set (`dirty_set`). All items and namespaces are written again every third of a record's
life, and at once after Redis lost its data. Failures, bugs included, are logged and retried: if
this task ended, other nodes would judge this one dead without a reason in the log. `main.py` starts
it; `arena` (through `main.py`), `claims` and `announcements` report changes.

`PeriodicTasks` are the tasks of a beat. A store may consist of several servers, and each task has
its own keys. If a task's server does not answer, the task costs one timeout, is logged, and pauses;
the other tasks and the publication on other servers continue. A beat is delayed by at most one
task: those that did not run come first after the next beat. `Invalidations` drops this node's items
of namespaces that the store lists as invalidated. Items that are here when it reads the list are
removed; later inserts stay. For LATE_SECONDS copies from other nodes are removed, too, since those
nodes may read the list later.
"""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lookup_buffer.environment import distribution_version
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena, Item
from lookup_buffer.node.counters import REMOVAL_REASONS, Counters
from lookup_buffer.node.devices import Pools, Sightings
from lookup_buffer.node.dirty_set import AGAIN_PER_SECOND_MAX, Change, DirtySet
from lookup_buffer.node.membership import Directory, Heartbeat, Identity
from lookup_buffer.node.publisher import Publisher, Report
from lookup_buffer.node.storage import Breaker, Storage
from lookup_buffer.times import Clock
from store import (
    Failure,
    GoneReason,
    Location,
    MetadataStore,
    NodeInfo,
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
REST_SECONDS: Final = 5.0
"""The pause of a task whose server did not answer: after the server returned, the task is late by
at most this."""
LATE_SECONDS = 10.0
"""Every node with access to the store reads the list within two seconds."""
PAGE: Final = 200
"""So many items or changes are dealt with in one iteration of the loop: at most 6 ms measured."""
AGAIN_SECONDS = 60.0
"""A lasting failure is logged again after this time."""
KINDS_MAX = 16
"""At most this many different failures are logged within that time."""

Task = Callable[[MetadataStore], Awaitable[object]]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FailureLog:
    """Logs each failure at once, and then not again for a while."""

    clock: Clock = time.monotonic
    _logged_at: dict[str, float] = field(default_factory=dict)

    def log(self, what: str, error: Exception) -> None:
        """Log that `what` failed and why, unless it was logged recently. Any error but one of the
        store is a bug, logged with its traceback."""
        is_bug = not isinstance(error, StoreError)
        why = f"{error!r}; this is a bug, please report it" if is_bug else error
        text, now = f"{what}: {why}", self.clock()
        logged_at = {text: at for text, at in self._logged_at.items() if now - at < AGAIN_SECONDS}
        self._logged_at = logged_at
        if text not in logged_at and len(logged_at) < KINDS_MAX:
            logged_at[text] = now
            level, cause = (logging.ERROR, error) if is_bug else (logging.WARNING, None)
            _log.log(level, "%s", text, exc_info=cause)


@dataclass(slots=True)
class PeriodicTasks:
    failures: FailureLog
    clock: Clock = time.monotonic
    _paused_until: dict[str, float] = field(default_factory=dict)
    _turn: int = 0

    async def run_until(
        self, due: float, store: MetadataStore, tasks: Sequence[tuple[str, Task]]
    ) -> None:
        """Run the tasks one after another until `due`; the next call continues after the last
        one."""
        for _ in tasks:
            await self.run(store, *tasks[self._turn % len(tasks)])
            self._turn += 1
            if self.clock() >= due:
                return

    async def run(self, store: MetadataStore, failure: str, task: Task) -> None:
        """Run one task, unless it pauses. `failure`: the text to log if it fails; its name, too."""
        if self.clock() < self._paused_until.get(failure, 0.0):
            return
        try:
            await task(store)
        except ConfigError:
            raise  # the node must end
        except Exception as error:  # noqa: BLE001 -- the publication must not depend on it
            self.failures.log(failure, error)
            if not isinstance(error, StoreFull | StoreCorrupt):  # else its server answers
                self._paused_until[failure] = self.clock() + REST_SECONDS

    def resume(self) -> None:
        """End all pauses: the store is new, or has lost its data."""
        self._paused_until.clear()


@dataclass(slots=True)
class Invalidations:
    arena: Arena
    clock: Clock
    wall_clock: Clock = time.time
    _listed: dict[str, float] | None = None
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
                await self._remove(self.arena.items_of(namespace))
                self._recent[namespace] = now + LATE_SECONDS
        self._listed = found
        for namespace, until in list(self._recent.items()):
            await self._remove(self.arena.items_of(namespace, fetched_only=True))
            if now >= until:
                del self._recent[namespace]

    async def _remove(self, items: Sequence[Item]) -> None:
        for start in range(0, len(items), PAGE):
            for item in items[start : start + PAGE]:
                self.arena.remove(item, GoneReason.INVALIDATED)
            await asyncio.sleep(0)

    def _is_news(self, namespace: str, at: float) -> bool:
        if self._listed is None:  # older invalidations are of no concern: this node had no items
            return at >= self._started_at
        return self._listed.get(namespace) != at


class Registrar:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        arena: Arena,
        directory: Directory,
        identity: Identity,
        counters: Counters,
        record_ttl_seconds: float,
        claims: Sized,
        pools: Pools,
        report: Callable[[Sequence[Report]], None],
    ) -> None:
        """`claims` are those of this node's engines. `report` is called with the store's results
        for hand-offs."""
        self.loop, clock = loop, loop.time
        self.storage = storage
        self.arena = arena
        self.directory = directory
        self.identity = identity
        self.counters = counters
        self.record_ttl_seconds = record_ttl_seconds
        self.claims = claims
        self.pools = pools
        self.store_up = False
        """Whether the last attempt succeeded."""
        self.breaker = Breaker(clock)
        """Open while calls pause because the store failed repeatedly."""
        self.fault: ConfigError | None = None
        """Why the node must end; the loop is then stopped."""
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_closing = False
        self._namespaces: dict[str, dict[str, str]] = {}
        self._undescribed: set[str] = set()
        self._must_describe = False
        """One of them is new: not to be left until the next beat."""
        self._beat_at = 0.0
        self._walked_at = 0.0
        self._walk_pause_seconds = 0.0
        """The next walk of the inventory is due so long after the last one began."""
        self._failovers = 0
        self._dirty = DirtySet(clock)
        self._publisher = Publisher(
            arena, directory, identity, counters, pools, self._dirty, record_ttl_seconds, report,
            clock,
        )  # fmt: skip
        self._heartbeat = Heartbeat(identity, clock)
        self._invalidations = Invalidations(arena, clock)
        self._failures = FailureLog(clock)
        self._tasks = PeriodicTasks(self._failures, clock)
        self._beat_tasks = (
            ("the description of this node was not written; retried", self._describe_node),
            (
                "device pools of other nodes were not read; retried",
                Sightings(directory, pools).look,
            ),
            ("dead nodes were not removed from the store; retried", self._remove_expired),
            (
                "locations of dead nodes were not withdrawn; readers skip them",
                self._publisher.withdraw_void,
            ),
            ("reasons of failed fetches were not written and are lost", self._note_failures),
            ("counters were not written; they are kept and retried", self._flush),
        )

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

    def pending(self) -> int:
        """The number of addresses still to be written, or being written."""
        return len(self._dirty) + self._publisher.in_flight

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
        self._walked_at = self._beat_at = self.loop.time()
        store: MetadataStore | None = None
        while not self._is_closing:
            try:
                await self._wait()
                if self.breaker.allows():
                    if store is None or not self._is_closing:  # at the end no server is restarted
                        store = await self.storage.store()
                    await self._take_turn(store)
                    self.store_up = True
                    self.breaker.succeeded()
            except ConfigError as error:
                self.fault = error
                self.loop.stop()
                return  # without `_leave`: the beat in the store belongs to another node
            except Exception as error:  # noqa: BLE001 -- top of the task; the node needs it
                self._failed(error)
        if store is not None and self._heartbeat.established:
            await self._leave(store)

    def _failed(self, error: Exception) -> None:
        self.store_up = False
        self.counters.add("store_failures")
        self.breaker.failed()
        if not isinstance(error, StoreError):
            self._failures.log("the metadata writer failed and continues", error)
        elif not self._is_closing:
            self._failures.log(
                f"node {self.identity.node} failed to write to the store; retried, and "
                "other nodes do not find new items until it succeeds",
                error,
            )

    async def _wait(self) -> None:
        """Until the next beat, or until changes are due."""
        while (seconds := self._wait_seconds()) > 0 and not self._is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            self._wake.clear()

    def _wait_seconds(self) -> float:
        if not self.breaker.allows():
            return BREAKER_SECONDS
        until_beat = self._beat_at - self.loop.time()
        if not self._heartbeat.established:
            return until_beat  # changes do not end the wait
        if self._must_describe:
            return 0.0
        due = self._dirty.wait_seconds()
        return until_beat if due is None else min(until_beat, due)

    async def _take_turn(self, store: MetadataStore) -> None:
        retried: set[str] = set()
        began = self.loop.time()
        if began >= self._beat_at:
            await self._beat(store, began)
            self._beat_at = began + self._heartbeat.pause_seconds()
            retried = self._dirty.retry()
        if not self._heartbeat.established:
            return
        self._must_describe = False
        for namespace in list(self._undescribed):
            failure = f"the description of namespace {namespace} was not written; retried"
            await self._tasks.run(store, failure, partial(self._describe, namespace))
            if self.loop.time() >= self._beat_at:
                break  # the others after the next beat
        missed = await self._publisher.write(store, until=self._beat_at)
        if missed:
            servers = ", ".join(sorted(missed))
            error = StoreUnavailable(f"servers of the cluster were not reached: {servers}")
            self._failures.log("some items were not published; retried with each beat", error)
        for place in retried - missed:
            while self._dirty.retry_place(place, PAGE):
                await asyncio.sleep(0)

    # -- a beat

    async def _beat(self, store: MetadataStore, began: float) -> None:
        self.arena.remove_expired()
        was_established = self._heartbeat.established
        if await self._heartbeat.beat(store):
            self._walk_pause_seconds = 0.0  # all is written again, also if this beat fails below
            self._undescribed |= self._namespaces.keys()
            self._tasks.resume()
            if was_established:
                self.directory.store_lost_data()
        await self.directory.refresh(store)
        if not self._heartbeat.established:
            return  # meanwhile this node can read from others
        try:  # it never pauses: after two beats of a node, an invalidation counts as applied there
            await self._invalidations.apply(store)
        except StoreError as error:
            self._failures.log("invalidated namespaces were not read; retried", error)
        self._repeat(store)
        due = began + self._heartbeat.pause_seconds()
        await self._tasks.run_until(due, store, self._beat_tasks)

    def _repeat(self, store: MetadataStore) -> None:
        """Write again what may be lost: after a failover recent changes at once, since a replica
        lags, and all soon, since a server may have returned empty."""
        failovers = store.failovers()
        if failovers > self._failovers:
            self._dirty.repeat_recent()
            self._walk_pause_seconds = min(self._walk_pause_seconds, WALK_PAUSE_SECONDS)
        self._failovers = failovers
        is_due = self.loop.time() - self._walked_at >= self._walk_pause_seconds
        if is_due and not self._dirty.walking:
            self._walk()

    def _walk(self) -> None:
        """Write all items and namespaces again: their records expire unless they are renewed."""
        period_seconds = self.record_ttl_seconds / 3
        self._walked_at, self._walk_pause_seconds = self.loop.time(), period_seconds
        self._undescribed |= self._namespaces.keys()
        addresses = self.arena.addresses()
        start = random.randrange(len(addresses) + 1)
        addresses = addresses[start:] + addresses[:start]  # each node of a fleet begins elsewhere
        share = AGAIN_PER_SECOND_FLEET / max(1, self.directory.count_alive())
        needed = len(addresses) / period_seconds
        self._dirty.walk(addresses, max(needed, min(share, AGAIN_PER_SECOND_MAX)))

    async def _describe(self, fingerprint: str, store: MetadataStore) -> None:
        parts = self._namespaces[fingerprint]
        try:
            await store.describe_namespace(fingerprint, parts)
        except StoreCorrupt as error:  # another program's data; it is not overwritten
            self._failures.log(f"namespace {fingerprint} cannot be described", error)
        if self._namespaces[fingerprint] is parts:  # else a newer description is due
            self._undescribed.discard(fingerprint)

    async def _describe_node(self, store: MetadataStore) -> None:
        gauges = self.arena.gauges()
        await store.describe_node(
            NodeInfo(
                node=self.identity.node,
                boot=self.identity.boot,
                endpoint=self.identity.endpoint,
                host=socket.gethostname(),
                version=distribution_version(),
                capacity_bytes=gauges.capacity_bytes,
                used_bytes=gauges.used_bytes,
                items=gauges.items,
                claims=len(self.claims),
                pools=self.pools.endpoints,
            )
        )

    async def _remove_expired(self, store: MetadataStore) -> None:
        for node, boot in self.directory.expired()[:EXPIRED_MAX]:
            await store.leave(node, boot, reason="died")

    async def _note_failures(self, store: MetadataStore) -> None:
        failed = self.counters.take_failures()
        if failed:
            me = self.identity.node
            await store.note_failures([Failure(*at, *why, me) for at, why in failed.items()])

    async def _flush(self, store: MetadataStore) -> None:
        missed: StoreError | None = None
        for namespace, counts in self.counters.take_unflushed().items():
            what = "counters of this node"
            try:
                if namespace is None:
                    await store.add_stats(self.identity.node, counts)
                else:
                    what = f"hits of namespace {namespace}"
                    await store.add_hits(namespace, counts)
            except StoreCorrupt as error:  # another program's data: only these counts are lost
                self._failures.log(f"{what} were discarded", error)
            except StoreError as error:
                self.counters.put_back(namespace, counts)
                missed = error
        if missed is not None:
            raise missed

    async def _leave(self, store: MetadataStore) -> None:
        try:
            await self._publisher.write(store, until=self._beat_at)
            await self._flush(store)
            await store.leave(self.identity.node, self.identity.boot, reason="stopped")
        except StoreError:
            pass  # other nodes will detect that this one no longer beats
