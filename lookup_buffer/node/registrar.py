"""The metadata writer: the only writer of this node's records, beats and statistics.

One task on the loop: it beats, refreshes the membership, reads invalidations and other
nodes' device pools, removes nodes that died long ago, flushes counters, and lets `publisher` write
the dirty set (`backlog`). All items and namespaces are written again every third of a record's
life, and at once after Redis lost its data. Failures, bugs included, are logged and retried: if
this task ended, other nodes would judge this one dead without a reason in the log. `node.py` starts
it; `shelf` (through `node.py`) reports changes from any thread, `claims` and `announcements` on the
loop's.
"""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.backlog import AGAIN_PER_SECOND_MAX, Backlog, Change
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.counters import REMOVAL_REASONS, Counters
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.errands import Errands
from lookup_buffer.node.heartbeat import Heartbeat, Pulse
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.invalidations import Invalidations
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.publisher import Publisher, Report
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.storage import Storage
from lookup_buffer.node.transfer import FailedFetches
from lookup_buffer.node.troubles import Troubles
from store import (
    DeviceLocation,
    Failure,
    Location,
    MetadataStore,
    PoolEndpoint,
    StoreCorrupt,
    StoreError,
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


@dataclass(slots=True)
class Registrar:
    """`changed` and `pending` may be called on any thread; the rest runs on the loop's."""

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
    _backlog: Backlog = field(init=False)
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
    _task: asyncio.Task[None] | None = None
    _thread_id: int = field(default_factory=threading.get_ident)
    """The loop's."""
    _beat_at: float = 0.0
    _walked_at: float = 0.0
    _walk_due: bool = False
    _must_repeat: bool = False
    """The store has lost its data."""
    _beat_failed: bool = False
    """Since the last beat that succeeded."""
    _failovers: int = 0

    def __post_init__(self) -> None:
        self._backlog = Backlog(self.clock)
        self._heartbeat = Heartbeat(self.identity, self.clock)
        self._invalidations = Invalidations(self.shelf, self.clock)
        self._troubles = Troubles(self.clock)
        self._errands = Errands(self._troubles, self.clock)
        self._breaker = Breaker(self.clock)
        self._publisher = Publisher(
            self.shelf, self.directory, self.identity, self.counters, self._backlog,
            self.record_ttl_seconds, self.report, self.clock,
        )  # fmt: skip

    def start(self) -> None:
        self._thread_id = threading.get_ident()
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
        self._backlog.add(Change(address, reason, claim_token, void))
        if threading.get_ident() == self._thread_id:
            self._wake.set()
        else:
            call_from_thread(self.loop, self._wake.set)

    def describe(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Publish the parts of a namespace, now and whenever Redis lost them."""
        if self._namespaces.get(fingerprint) != parts:
            self._namespaces[fingerprint] = parts
            self._undescribed.add(fingerprint)
            self._wake.set()

    def ask_for_devices(self, device_of: Callable[[Item, str], DeviceLocation | None]) -> None:
        """Set the function that gives the device location beside a copy."""
        self._publisher.device_of = device_of

    def pending(self) -> int:
        """The number of addresses still to be written."""
        return len(self._backlog)

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
            retried = self._backlog.retry()
        if self._heartbeat.established:
            for namespace in list(self._undescribed):
                trouble = f"the description of namespace {namespace} was not written; retried"
                await self._errands.run(trouble, partial(self._describe, store, namespace))
            missed = await self._publisher.write(store, until=self._beat_at)
            if missed:
                servers = ", ".join(sorted(missed))
                error = StoreUnavailable(f"servers of the cluster were not reached: {servers}")
                self._troubles.log("some items were not published; retried with each beat", error)
            self._backlog.retry_all(retried - missed)

    def _failed(self) -> None:
        self.store_up, self.failing = False, True
        self.counters.add("store_failures")
        self._breaker.failed()

    async def _revive(self) -> None:
        with self._troubles.logged("the embedded server was not restarted; retried", StoreError):
            await self.storage.revive()

    async def _wait(self) -> None:
        seconds = self._beat_at - self.clock()
        due = self._backlog.wait_seconds()
        if not self._breaker.allows():
            seconds = BREAKER_SECONDS
        elif self._heartbeat.established and due is not None:
            seconds = min(seconds, due)
        until = self.clock() + seconds
        while (left := until - self.clock()) > 0 and not self._is_closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
            self._wake.clear()
            if self._heartbeat.established and self._breaker.allows():
                return  # otherwise changes do not end the wait

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
        random.shuffle(addresses)  # so that a fleet that republishes spreads over the key space
        share = AGAIN_PER_SECOND_FLEET / max(1, self.directory.count_alive())
        needed = len(addresses) / (self.record_ttl_seconds / 3)
        self._backlog.repeat(addresses, max(needed, min(share, AGAIN_PER_SECOND_MAX)))

    def _repeat_after_failover(self, store: MetadataStore) -> None:
        """Write recent changes again at once, since a replica lags; then all, since a server may
        have returned empty."""
        failovers = store.failovers()
        if failovers > self._failovers:
            self._backlog.repeat_recent()
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
            await self._flush(store)
            await store.leave(self.identity.node, self.identity.boot, reason="stopped")
        except StoreError:
            pass  # other nodes will detect that this one no longer beats
