"""The metadata writer: the only writer of this node's records, beats and statistics.

One task on the loop. With each beat it refreshes the membership, applies invalidations, and starts
the periodic tasks, which run beside it: they may take many round trips, and the store may be far
away. Between beats it writes the dirty set (`dirty_set`), many changes in one round trip:
what the arena holds at that moment, so the newest state always wins. All items and namespaces are
written again every third of a record's life, and at once after Redis lost its data. Failures, bugs
included, are logged and retried: if this task ended, other nodes would judge this one dead without
a reason in the log. `main.py` starts it; `arena` (through `main.py`), `claims` and `announcements`
report changes.

A store may consist of several servers. If that of a periodic task does not answer, the task costs
one timeout, is logged, and pauses; the others continue. Those that did not run until the next beat
come first after it. A change whose server was not reached, or has
no memory for it, is held; some of those are tried again with each beat.

In a node that only reads it writes nothing: it reads the membership and the invalidations.
"""

import asyncio
import logging
import math
import random
import socket
import time
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.environment import distribution_version
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import REMOVAL_REASONS, Counters
from lookup_buffer.node.descriptions import Descriptions
from lookup_buffer.node.devices import Pools, Sightings
from lookup_buffer.node.dirty_set import AGAIN_PER_SECOND_MAX, Change, DirtySet
from lookup_buffer.node.expiry import Expiry
from lookup_buffer.node.invalidations import Invalidations
from lookup_buffer.node.items import Item
from lookup_buffer.node.membership import Directory, Heartbeat, Identity
from lookup_buffer.node.storage import Breaker, FailureLog, PeriodicTasks, Storage
from lookup_buffer.node.write_batch import WriteBatch
from lookup_buffer.times import BEAT_SECONDS, HANDOFF_GONE_SECONDS
from store import (
    GONE_SECONDS,
    Failure,
    GoneReason,
    Location,
    MetadataStore,
    NodeInfo,
    Publication,
    Publishing,
    Record,
    Releasing,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    Withdrawing,
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
FLUSH_SECONDS: Final = 0.5
"""Bound on what counters and hits add to one round of the periodic tasks. What is left by then is
written after the next beat."""
FLUSH_KEYS: Final = 1000
"""The hits of so many keys are one round trip."""
EXPIRED_MAX = 8
"""Dead nodes that are removed with one beat: every node does it, so a few are enough."""
VOID_MAX: Final = 64
"""Locations of dead nodes that are withdrawn with one beat."""
MISSED_MAX: Final = 64
"""Items that other nodes requested and this one does not have: so many are written after each beat.
Any node may request anything, and a script in the store for each would be too much."""

Report = tuple[QualifiedKey, int, Publication]
"""The result of publishing one generation of a hand-off."""
_COUNTED: Final = {
    Publication.ADDED: "publish_written",
    Publication.PRESENT: "publish_written",
    Publication.REFUSED: "publish_refused",
    Publication.CONFLICT: "publish_conflict",
}
"""What each result of a publication is counted as."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Registrar:
    loop: asyncio.AbstractEventLoop
    storage: Storage
    arena: Arena
    directory: Directory
    identity: Identity
    counters: Counters
    record_ttl_seconds: float
    claims: Sized
    """Those of this node's engines."""
    pools: Pools
    report: Callable[[Sequence[Report]], None]
    """Called with the store's results for hand-offs."""
    read_only: bool = False
    """Whether this node writes nothing to the store."""
    store_up: bool = False
    """Whether the last attempt succeeded."""
    fault: ConfigError | None = None
    """Why the node must end; the loop is then stopped."""
    breaker: Breaker = field(init=False)
    """Open while calls pause because the store failed repeatedly."""
    dirty: DirtySet = field(init=False)
    heartbeat: Heartbeat = field(init=False)
    _writing: int = 0
    """Changes that are being written: they are not in the dirty set."""
    _task: asyncio.Task[None] | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closing: bool = False
    _beat_at: float = field(init=False)
    _walked_at: float = field(init=False)
    _walk_pause_seconds: float = 0.0
    """The next walk of the inventory is due so long after the last one began."""
    _failovers: int = 0
    _missed_left: int = MISSED_MAX
    _version: str = field(init=False)
    _descriptions: Descriptions = field(init=False)
    _expiry: Expiry = field(init=False)
    _invalidations: Invalidations = field(init=False)
    _failures: FailureLog = field(init=False)
    _tasks: PeriodicTasks = field(init=False)
    _round: "asyncio.Task[None] | None" = None
    """The last round of the periodic tasks."""

    def __post_init__(self) -> None:
        clock = self.loop.time
        self.breaker, self.dirty = Breaker(clock), DirtySet(clock)
        self.heartbeat = Heartbeat(self.identity, clock)
        self._beat_at = self._walked_at = clock()
        self._expiry = Expiry(self.loop, self.arena)
        self._invalidations = Invalidations(self.loop, self.arena)
        self._failures = FailureLog(clock)
        self._version = distribution_version()  # which reads files: later there may be none free
        self._descriptions = Descriptions(self.loop, self._failures)
        self._tasks = PeriodicTasks(
            self._failures,
            clock,
            [
                ("the description of this node was not written; retried", self._describe_node),
                ("namespaces were not described; retried", self._descriptions.write),
                (
                    "device pools of other nodes were not read; retried",
                    Sightings(self.directory, self.pools).look,
                ),
                ("dead nodes were not removed from the store; retried", self._remove_expired),
                (
                    "locations of dead nodes were not withdrawn; readers skip them",
                    self.withdraw_void,
                ),
                ("reasons of failed fetches were not written and are lost", self._note_failures),
                ("counters were not written; they are kept and retried", self._flush),
            ],
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
        """The item at `address` appeared (reason "") or was removed (why), see `Change`."""
        if reason in REMOVAL_REASONS:
            self.counters.add(reason)
        if not self.read_only and self.dirty.add(Change(address, reason, claim_token, void)):
            self._wake.set()

    def missed(self, address: QualifiedKey) -> None:
        """Another node requested an item that is not here, for which the store may name this node:
        write what is here. Beyond MISSED_MAX it is dropped; the next such request reports it."""
        if self._missed_left > 0:
            self._missed_left -= 1
            self.changed(address, GoneReason.STALE)

    def describe(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Publish the parts of a namespace, now and whenever Redis lost them."""
        if not self.read_only and self._descriptions.add(fingerprint, parts):
            self._beat_at = 0.0  # a new one is not left until the next beat
            self._wake.set()

    def pending(self) -> int:
        """The number of addresses still to be written, or being written."""
        return len(self.dirty) + self._writing

    async def close(self) -> None:
        """Shut down: flush what can be flushed and remove the beat. Bounded."""
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self._task.cancel()
        if self._round is not None:
            self._round.cancel()
        self._invalidations.close()

    # -- the task

    async def _run(self) -> None:
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
        if store is not None and self.heartbeat.established:
            await self._leave(store)

    def _failed(self, error: Exception) -> None:
        self.store_up = False
        self.counters.add("store_failures")
        self.breaker.failed()
        if not isinstance(error, StoreError):
            self._failures.log("the metadata writer failed and continues", error)
        elif not self._is_closing:
            self._failures.log(
                f"node {self.identity.node} failed to read the store; retried, and it finds "
                "nothing of other nodes until it succeeds"
                if self.read_only
                else f"node {self.identity.node} failed to write to the store; retried, and "
                "other nodes do not find new items until it succeeds",
                error,
            )

    async def _wait(self) -> None:
        """Until the next beat, or until changes are due."""
        await asyncio.sleep(0)  # a store that is not reached may fail at once
        while (seconds := self._wait_seconds()) > 0 and not self._is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            self._wake.clear()

    def _wait_seconds(self) -> float:
        if not self.breaker.allows():
            return BREAKER_SECONDS
        until_beat = self._beat_at - self.loop.time()
        due = self.dirty.wait_seconds() if self.heartbeat.established else None
        return until_beat if due is None else min(until_beat, due)

    async def _take_turn(self, store: MetadataStore) -> None:
        """A beat if it is due; then one batch of changes."""
        began = self.loop.time()
        if began >= self._beat_at:
            due, self._beat_at = self._beat_at, math.inf
            self._missed_left = MISSED_MAX
            try:
                await self._beat(store, began)
                due = began + self.heartbeat.pause_seconds()
            finally:
                self._beat_at = min(self._beat_at, due)  # sooner if a namespace came meanwhile
            self.dirty.retry()
        if self.heartbeat.established and (missed := await self.write(store)):
            servers = ", ".join(sorted(missed))
            error = StoreUnavailable(f"servers of the cluster were not reached: {servers}")
            self._failures.log("some items were not published; retried with each beat", error)

    async def _leave(self, store: MetadataStore) -> None:
        try:
            await self.write(store)
            while self.dirty.wait_seconds() == 0.0 and self.loop.time() < self._beat_at:
                await self.write(store)
            if self._round is not None:
                await asyncio.wait([self._round], timeout=BEAT_SECONDS)  # if its server hangs
                self._round.cancel()
            await self._flush(store)
            await store.leave(self.identity.node, self.identity.boot, reason="stopped")
        except StoreError:
            pass  # other nodes will detect that this one no longer beats

    # -- a batch of changes

    async def write(self, store: MetadataStore) -> set[str]:
        """Write one batch of changes that are due.

        Returns the servers of a cluster that were not reached; their changes are held.

        Raises:
            StoreError: the store was not reached. What was not written is back in the dirty set.
        """
        changes = self.dirty.take()
        self._writing = len(changes)
        batch = WriteBatch(store)
        try:
            await self._write(batch, store, changes)
        except BaseException:  # a bug, or a garbled reply, too
            self.dirty.put_back(changes)
            raise
        finally:
            self._writing = 0
        held = batch.held()
        self.dirty.written(change for change in changes if change not in held)
        for change, place in held.items():
            self.dirty.hold(change, place)
        return set(batch.missed.values())

    async def _write(
        self, batch: WriteBatch, store: MetadataStore, changes: Sequence[Change]
    ) -> None:
        found = [(change, self.arena.published(change.address)) for change in changes]
        here = [(change, item) for change, item in found if item is not None]
        gone = [change for change, item in found if item is None]
        withdrawings = [(change, self._withdrawing(change)) for change in gone]
        withdrawings += [
            (change, _void(change.address, location))
            for change, _ in here
            for location in change.void
        ]
        await batch.step(store.withdraw_many, withdrawings)
        publishings = [(change, self._publishing(item, change)) for change, item in here]
        published = await batch.step(store.publish_many, publishings)
        self._note(published)
        full = [(change, one) for change, one, result in published if result is Publication.FULL]
        published += await batch.step(lambda some: self._replace_dead(store, some), full)
        failed = (Publication.REFUSED, Publication.CONFLICT)
        gone += [change for change, _, result in published if result in failed]
        # Nothing is published for these, so no engine is to wait for them.
        releasings = [
            (change, Releasing(*change.address, change.claim_token))
            for change in gone
            if change.claim_token is not None
        ]
        await batch.step(store.release_many, releasings)
        batch.refused = [change for change, _, result in published if result is Publication.REFUSED]

    def _note(self, published: Sequence[tuple[Change, Publishing, Publication | None]]) -> None:
        """Count the results, and report those of hand-offs."""
        for _, _, result in published:
            if result in _COUNTED:
                self.counters.add(_COUNTED[result])
        reports = [
            (change.address, one.location.generation, result or Publication.UNREACHED)
            for change, one, result in published
            if one.sole
        ]
        if reports:
            self.report(reports)

    async def _replace_dead(
        self, store: MetadataStore, full: Sequence[Publishing]
    ) -> Sequence[Publication]:
        """Where dead nodes fill a record's list of locations, publish in place of one of them."""
        records = await store.look_up([(one.record.namespace, one.record.key) for one in full])
        await self.directory.refresh(store)  # after the reading: see Directory.dead_seconds
        dead = [
            _void((record.namespace, record.key), location)
            for record in records
            if isinstance(record, Record)
            for location in record.locations
            if self.directory.dead_seconds(location) > 0
        ]
        if not dead:
            return [Publication.FULL] * len(full)
        await store.withdraw_many(dead)
        return await store.publish_many(full)

    def _withdrawing(self, change: Change) -> Withdrawing:
        return Withdrawing(
            *change.address,
            self.identity.node,
            change.reason or GoneReason.GONE,
            gone_seconds=_gone_seconds(change.address),
            # Write the reason also if the record was never published or has expired; but not if
            # a peer merely requested an item that is not here.
            may_have_ended=change.reason != GoneReason.STALE,
        )

    def _publishing(self, item: Item, change: Change) -> Publishing:
        header, identity = item.header, self.identity
        namespace, key = item.address
        location = Location(identity.node, identity.boot, item.generation, item.checksum)
        record = Record(
            namespace=namespace,
            key=key,
            dtype=header.dtype,
            shape=header.shape,
            nbytes=header.nbytes,
            kind=header.kind,
            created=time.time(),
            device=item.device,
        )
        ttl_seconds, remaining = self.record_ttl_seconds, self.arena.remaining_seconds(item)
        if remaining is not None:
            # At most the time between renewals, so that the record of a dead holder expires.
            ttl_seconds = min(ttl_seconds, max(remaining, 0.001))
        device = self.pools.device_of(item, identity.node)
        return Publishing(
            record, location, ttl_seconds, change.claim_token, is_handoff(key), device
        )

    # -- a beat

    async def _beat(self, store: MetadataStore, began: float) -> None:
        self._expiry.begin()
        is_new = not self.read_only and await self._own_beat(store)
        await self.directory.refresh(store)
        if not (self.read_only or self.heartbeat.established):
            return  # meanwhile this node can read from others
        try:  # it never pauses: after two beats of a node, it has read the mark of an invalidation
            await self._invalidations.apply(store)
        except StoreError as error:
            self._failures.log("invalidated namespaces were not read; retried", error)
        if self.read_only:
            self.counters.take_unflushed()  # which only `/metrics` shows
            return
        self._repeat(store)
        self._start_round(began + self.heartbeat.pause_seconds(), store)
        if is_new and self._round is not None:  # others find the node before its items
            await asyncio.wait([self._round])

    def _start_round(self, until: float, store: MetadataStore) -> None:
        """Start the periodic tasks, unless the last round has not ended."""
        if self._round is not None:
            if not self._round.done():
                return
            self._round.result()  # which raises if the node must end
        self._round = self.loop.create_task(self._tasks.run_until(until, store))

    async def _own_beat(self, store: MetadataStore) -> bool:
        """Returns whether the store does not know this node, so that all is written again."""
        was_established = self.heartbeat.was_established
        if is_new := await self.heartbeat.beat(store):
            self._walk_pause_seconds = 0.0  # all is written again, also if this beat fails below
            self._descriptions.repeat()
            self._tasks.resume()
            if was_established:
                self.directory.store_lost_data()
        return is_new

    def _repeat(self, store: MetadataStore) -> None:
        """Write again what may be lost: after a failover recent changes at once, since a replica
        lags, and all soon, since a server may have returned empty."""
        failovers = store.failovers()
        if failovers > self._failovers:
            self.dirty.repeat_recent()
            self._walk_pause_seconds = min(self._walk_pause_seconds, WALK_PAUSE_SECONDS)
        self._failovers = failovers
        is_due = self.loop.time() - self._walked_at >= self._walk_pause_seconds
        if is_due and not self.dirty.walking:
            self._walk()

    def _walk(self) -> None:
        """Write all items and namespaces again: their records expire unless they are renewed."""
        period_seconds = self.record_ttl_seconds / 3
        self._walked_at, self._walk_pause_seconds = self.loop.time(), period_seconds
        self._descriptions.repeat()
        addresses = self.arena.addresses()
        start = random.randrange(len(addresses) + 1)
        addresses = addresses[start:] + addresses[:start]  # each node of a fleet begins elsewhere
        share = AGAIN_PER_SECOND_FLEET / max(1, self.directory.count_alive())
        needed = len(addresses) / period_seconds
        self.dirty.walk(addresses, max(needed, min(share, AGAIN_PER_SECOND_MAX)))

    async def _describe_node(self, store: MetadataStore) -> None:
        gauges = self.arena.gauges()
        await store.describe_node(
            NodeInfo(
                node=self.identity.node,
                boot=self.identity.boot,
                endpoint=self.identity.endpoint,
                host=socket.gethostname(),
                version=self._version,
                capacity_bytes=gauges.capacity_bytes,
                used_bytes=gauges.used_bytes,
                items=gauges.items,
                claims=len(self.claims),
                pools=self.pools.endpoints,
            )
        )

    async def withdraw_void(self, store: MetadataStore) -> None:
        """Withdraw some of the locations of dead nodes that readers found."""
        void = self.directory.take_void(VOID_MAX)
        if void:
            await store.withdraw_many([_void(*one) for one in void])

    async def _remove_expired(self, store: MetadataStore) -> None:
        for node, boot in self.directory.expired()[:EXPIRED_MAX]:
            await store.leave(node, boot, reason="died")

    async def _note_failures(self, store: MetadataStore) -> None:
        failed = self.counters.take_failures()
        if failed:
            me = self.identity.node
            await store.note_failures([Failure(*at, *why, me) for at, why in failed.items()])

    async def _flush(self, store: MetadataStore) -> None:
        until = self.loop.time() + FLUSH_SECONDS
        while self.loop.time() < until and (page := self.counters.take_unflushed(FLUSH_KEYS)):
            await self._flush_page(store, page, until)

    async def _flush_page(
        self, store: MetadataStore, page: dict[str | None, dict[str, int]], until: float
    ) -> None:
        missed: StoreError | None = None
        for namespace, counts in page.items():
            if self.loop.time() >= until:
                self.counters.put_back(namespace, counts)
                continue
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


def _gone_seconds(address: QualifiedKey) -> int:
    return HANDOFF_GONE_SECONDS if is_handoff(address[1]) else GONE_SECONDS


def _void(address: QualifiedKey, location: Location) -> Withdrawing:
    return Withdrawing(
        *address,
        location.node,
        GoneReason.OWNER_DEAD,
        exactly=location,
        gone_seconds=_gone_seconds(address),
    )
