"""The registrar: the node's one ordered writer to the store.

It keeps Redis true to the shelf: changes go into a backlog, which its publisher writes in batches.
It also beats, refreshes the directory, looks for pools, strikes off nodes that are long dead,
flushes counters, and writes all items and namespaces again every third of a record's life, and at
once when Redis lost its data. What fails is said in the log and tried again, bugs too: a registrar
that ended would leave a node that others take for dead and that never says why.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.backlog import AGAIN_PER_SECOND_MAX, Backlog, Change
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.counters import REMOVAL_REASONS, Counters
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.errands import Errands
from lookup_buffer.node.failed_fetches import FailedFetches
from lookup_buffer.node.heartbeat import Heartbeat, Pulse
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.invalidations import Invalidations
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.publisher import Publisher, Report
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.storage import Storage
from lookup_buffer.node.troubles import Troubles
from store import (
    DeviceLocation,
    Failure,
    Location,
    MetadataStore,
    PoolEndpoint,
    StoreCorrupt,
    StoreError,
)

AGAIN_PER_SECOND_FLEET = 20_000.0
"""What all nodes together may rewrite: a fifth of what one server takes. Shared out by the nodes
that live; but a walk of the inventory always ends before the next one begins."""

WALK_PAUSE_SECONDS = 60.0
"""After a server was lost all items are written again, but not more often: connections that come
and go must not keep the fleet writing."""

STRUCK_OFF_MAX = 8
"""Dead nodes that are struck off with one beat: every node does it, so a few are enough."""


@dataclass(slots=True)
class Registrar:
    """`changed`, `describe` and `pending` from any thread; the rest on the registrar's own."""

    storage: Storage
    shelf: Shelf
    directory: Directory
    identity: Identity
    counters: Counters
    record_ttl_seconds: float
    give_up: Callable[[ConfigError], None]
    """Told, on the registrar's thread, that the node has to end, and why."""
    report: Callable[[Sequence[Report]], None]
    """Told, on the registrar's thread, what the store said of hand-offs."""
    clock: Callable[[], float] = time.monotonic
    failed_fetches: FailedFetches = field(default_factory=FailedFetches)
    count_claims: Callable[[], int] = lambda: 0
    """How many claims engines of this node have; asked on the registrar's thread."""
    endpoints: Callable[[], tuple[PoolEndpoint, ...]] = tuple
    """Where others may take from this node's processes; asked likewise."""
    look_for_pools: Callable[[MetadataStore], None] = lambda _: None
    """Called with each beat; see `Sightings.look`."""
    store_up: bool = False
    """Whether the last turn succeeded."""
    failing: bool = False
    """Whether it failed."""
    _backlog: Backlog = field(init=False)
    _publisher: Publisher = field(init=False)
    _heartbeat: Heartbeat = field(init=False)
    _invalidations: Invalidations = field(init=False)
    _troubles: Troubles = field(init=False)
    _errands: Errands = field(init=False)
    _breaker: Breaker = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _closing: threading.Event = field(default_factory=threading.Event)
    _namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    _undescribed: set[str] = field(default_factory=set)
    _thread: threading.Thread | None = None
    _beat_at: float = 0.0
    _walked_at: float = 0.0
    _walk_due: bool = False
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
        self._thread = threading.Thread(target=self._run, name="lb-registrar", daemon=True)
        self._thread.start()

    def changed(
        self,
        address: QualifiedKey,
        reason: str,
        claim_token: str | None = None,
        void: tuple[Location, ...] = (),
    ) -> None:
        """The item at `address` appeared (reason "") or went (why).

        `claim_token` is of the claim under which it was produced, which its publication drops;
        `void` are locations of nodes that do not have it, which are withdrawn before.
        """
        if reason in REMOVAL_REASONS:
            self.counters.add(reason)
        self._backlog.add(Change(address, reason, claim_token, void))
        self._wake.set()

    def describe(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Publish the clear text of a namespace, now and whenever Redis lost it."""
        with self._lock:
            if self._namespaces.get(fingerprint) != parts:
                self._namespaces[fingerprint] = parts
                self._undescribed.add(fingerprint)
                self._wake.set()

    def ask_for_devices(self, device_of: Callable[[Item, str], DeviceLocation | None]) -> None:
        """What is published beside a copy from now on."""
        self._publisher.device_of = device_of

    def pending(self) -> int:
        """How many addresses are still to be written."""
        return len(self._backlog)

    @property
    def breaker_open(self) -> bool:
        """Whether the store failed so often that it is left alone for a moment."""
        return self._breaker.open

    @property
    def established(self) -> bool:
        """Whether this node beats under its id, so that others can find what it holds."""
        return self._heartbeat.established

    def close(self) -> None:
        """Leave the fleet: flush what can be flushed and take the beat back. Bounded."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    # -- the thread

    def _run(self) -> None:
        breaker = self._breaker
        self._walked_at = self._beat_at = self.clock()
        while not self._closing.is_set():
            try:
                self._wait()
                if breaker.allows():
                    self._take_turn(self.storage.store())
                    self.store_up, self.failing = True, False
                    breaker.succeeded()
            except StoreError as error:
                self._failed()
                self._troubles.tell("what this node holds is not kept up in the store", error)
                self._revive()
            except ConfigError as error:
                self.give_up(error)
                return  # and leave nothing: what stands there is another's
            except Exception as error:  # noqa: BLE001 -- top of a thread that others live by
                self._failed()
                self._troubles.tell_bug("the registrar failed and goes on", error)
        self._leave()

    def _take_turn(self, store: MetadataStore) -> None:
        if self.clock() >= self._beat_at:
            began = self.clock()
            self._beat(store, began)
            self._beat_at = began + self._heartbeat.pause_seconds()
        if self._heartbeat.established:
            for namespace in list(self._undescribed):
                trouble = f"namespace {namespace} is not described"
                self._errands.run(trouble, partial(self._describe, store, namespace))
            self._publisher.write(store, until=self._beat_at)

    def _failed(self) -> None:
        self.store_up, self.failing = False, True
        self.counters.add("store_failures")
        self._breaker.failed()

    def _revive(self) -> None:
        with self._troubles.told("the embedded server", StoreError):
            self.storage.revive()  # else tried again with the next turn

    def _wait(self) -> None:
        if not self._breaker.allows():
            self._closing.wait(0.05)
            return
        seconds = self._beat_at - self.clock()
        wake = self._closing  # changes do not wake who may not publish yet
        if self._heartbeat.established:
            wake = self._wake
            due = self._backlog.wait_seconds()
            seconds = seconds if due is None else min(seconds, due)
        if seconds > 0:
            wake.wait(seconds)
        self._wake.clear()

    def _beat(self, store: MetadataStore, began: float) -> None:
        self.shelf.remove_expired()
        was_established = self._heartbeat.established
        pulse = self._heartbeat.beat(store)
        if pulse is Pulse.NEW:
            self._errands.wake()
        if pulse is Pulse.NEW and was_established:
            self.directory.store_lost_data()
        self.directory.refresh(store)
        if pulse is Pulse.WATCHING:
            return  # others' tensors may be had meanwhile
        with self._troubles.told("what was invalidated is not heard of", StoreError):
            # It never rests: who invalidates takes two beats of a node as a sign that it has heard.
            self._invalidations.heed(store)
        if pulse is Pulse.NEW or self.clock() - self._walked_at > self.record_ttl_seconds / 3:
            self._repeat_all()
        self._repeat_after_failover(store)
        errands = (
            ("this node is not described", self._describe_node),
            ("pools of other nodes are not looked for", self.look_for_pools),
            ("the dead are not struck off", self._strike_off),
            ("copies of the dead are not withdrawn", self._publisher.withdraw_void),
            ("failed fetches are not told", self._note_failures),
            ("counters wait", self._flush),
        )
        due = began + self._heartbeat.pause_seconds()
        self._errands.run_until(due, [(trouble, partial(do, store)) for trouble, do in errands])

    def _describe_node(self, store: MetadataStore) -> None:
        gauges, claims = self.shelf.gauges(), self.count_claims()
        store.describe_node(self.identity.info(gauges, claims, self.endpoints()))

    def _strike_off(self, store: MetadataStore) -> None:
        for node, boot in self.directory.long_dead()[:STRUCK_OFF_MAX]:
            store.leave(node, boot, reason="died")

    def _repeat_all(self) -> None:
        """Items and namespaces: both end where nobody renews them."""
        with self._lock:
            self._undescribed |= self._namespaces.keys()
        self._walked_at = self.clock()
        addresses = self.shelf.addresses()
        random.shuffle(addresses)  # so that a fleet that republishes spreads over the key space
        share = AGAIN_PER_SECOND_FLEET / max(1, self.directory.count_alive())
        needed = len(addresses) / (self.record_ttl_seconds / 3)
        self._backlog.repeat(addresses, max(needed, min(share, AGAIN_PER_SECOND_MAX)))

    def _repeat_after_failover(self, store: MetadataStore) -> None:
        """The last minute at once, for a replica lags; then all, for a server may be back empty."""
        failovers = store.failovers()
        if failovers > self._failovers:
            self._backlog.repeat_recent()
            self._walk_due = True
        self._failovers = failovers
        if self._walk_due and self.clock() - self._walked_at > WALK_PAUSE_SECONDS:
            self._walk_due = False
            self._repeat_all()

    def _describe(self, store: MetadataStore, fingerprint: str) -> None:
        parts = self._namespaces[fingerprint]
        try:
            store.describe_namespace(fingerprint, parts)
        except StoreCorrupt as error:  # something foreign stands there, and is left alone
            self._troubles.tell("a namespace is not described", error)
        with self._lock:
            if self._namespaces[fingerprint] is parts:  # else there is something newer to say
                self._undescribed.discard(fingerprint)

    def _note_failures(self, store: MetadataStore) -> None:
        failed = self.failed_fetches.take()
        if failed:
            me = self.identity.node
            store.note_failures([Failure(*at, *why, me) for at, why in failed.items()])

    def _flush(self, store: MetadataStore) -> None:
        counters, hits = self.counters.take_unflushed()
        by_namespace: dict[str, dict[str, int]] = {}
        for (namespace, key), count in hits.items():
            by_namespace.setdefault(namespace, {})[key] = count
        missed: StoreError | None = None
        left: dict[QualifiedKey, int] = {}
        # Where something foreign stands in their place they are lost, and nothing else is.
        try:
            if counters:
                with self._troubles.told("counters are lost", StoreCorrupt):
                    store.add_stats(self.identity.node, counters)
                counters = {}
        except StoreError as error:
            missed = error
        for namespace, keys in by_namespace.items():
            try:
                with self._troubles.told("hits are lost", StoreCorrupt):
                    store.add_hits(namespace, keys)
            except StoreError as error:
                missed = error
                left |= {(namespace, key): count for key, count in keys.items()}
        if missed is not None:
            self.counters.put_back(counters, left)
            raise missed

    def _leave(self) -> None:
        if not self._heartbeat.established:
            return
        try:
            store = self.storage.store()
            self._flush(store)
            store.leave(self.identity.node, self.identity.boot, reason="stopped")
        except StoreError:
            pass  # we are going; others will notice that we no longer beat
