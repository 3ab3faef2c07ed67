"""The registrar: the node's one ordered writer to the store.

It keeps Redis true to the shelf. Changes only mark an address as dirty; what is written is what
the shelf holds at the moment of writing, so the newest state always wins and a backlog never
grows beyond the number of addresses. It also beats, refreshes the directory, flushes counters,
and marks all items again every third of a record's life, and at once when Redis lost its data.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.counters import Counters
from lookup_buffer.inventory import Address, Item
from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.storage import Storage
from store import Location, MetadataStore, NodeTaken, Publication, Record, StoreError, StoreFull

BEAT_SECONDS = 1.0
DIRTY_MAX = 1_000_000
"""Bound on addresses waiting to be written; past it the oldest withdrawals are forgotten, which
leaves records that name bytes we no longer have: a reader asks, hears so, and goes on."""


@dataclass(slots=True)
class Registrar:
    """`changed`, `describe` from any thread; everything else on the registrar's own."""

    storage: Storage
    shelf: Shelf
    directory: Directory
    identity: Identity
    counters: Counters
    record_ttl_seconds: float
    clock: Callable[[], float] = time.monotonic
    store_up: bool = False
    """Whether the last call to the store succeeded."""
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _dirty: dict[Address, str] = field(default_factory=dict)
    _namespaces: dict[str, dict[str, str]] = field(default_factory=dict)
    _undescribed: set[str] = field(default_factory=set)
    _closing: bool = False
    _thread: threading.Thread | None = None
    _sequence: int = 0
    _walked_at: float = 0.0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lb-registrar", daemon=True)
        self._thread.start()

    def changed(self, address: Address, reason: str) -> None:
        """The item at `address` appeared (reason "") or went (why)."""
        if reason in ("evicted", "expired"):
            self.counters.add(reason)
        with self._wake:
            self._dirty.pop(address, None)
            self._dirty[address] = reason
            if len(self._dirty) > DIRTY_MAX:
                del self._dirty[next(iter(self._dirty))]
            self._wake.notify()

    def describe(self, fingerprint: str, parts: dict[str, str]) -> None:
        """Publish the clear text of a namespace, now and whenever Redis lost it."""
        with self._wake:
            if self._namespaces.get(fingerprint) != parts:
                self._namespaces[fingerprint] = parts
                self._undescribed.add(fingerprint)
                self._wake.notify()

    def pending(self) -> int:
        """How many addresses are still to be written."""
        with self._wake:
            return len(self._dirty)

    def close(self) -> None:
        """Leave the fleet: flush what can be flushed and take the beat back. Bounded."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    # -- the thread

    def _run(self) -> None:
        breaker = Breaker(self.clock)
        beat_at = self.clock()
        self._walked_at = beat_at
        while not self._closing:
            self._wait(beat_at, breaker)
            if not breaker.allows():
                continue
            try:
                store = self.storage.store()
                if self.clock() >= beat_at:
                    self._beat(store)
                    beat_at = self.clock() + BEAT_SECONDS
                self._write_dirty(store, until=beat_at)
            except StoreError:
                self.store_up = False
                breaker.failed()
                self._revive()
            else:
                self.store_up = True
                breaker.succeeded()
        self._leave()

    def _revive(self) -> None:
        try:
            self.storage.revive()
        except StoreError:
            pass  # tried again with the next beat

    def _wait(self, beat_at: float, breaker: Breaker) -> None:
        with self._wake:
            idle = not self._dirty and not self._undescribed
            if self._closing:
                return
            if not breaker.allows():
                self._wake.wait(0.05)
            elif idle:
                self._wake.wait(max(0.0, beat_at - self.clock()))

    def _beat(self, store: MetadataStore) -> None:
        self.shelf.remove_expired()
        self._sequence += 1
        identity = self.identity
        beat = (identity.node, identity.boot, self._sequence)
        try:
            known = store.beat(*beat)
        except NodeTaken as taken:
            known = store.beat(*beat, replacing=taken.beat)
        if not known:
            self._undescribed |= self._namespaces.keys()
            self._mark_all()
        gauges = self.shelf.gauges()
        store.describe_node(identity.info(gauges))
        self.directory.refresh(store)
        if self.clock() - self._walked_at > self.record_ttl_seconds / 3:
            self._mark_all()
        self._flush(store)

    def _mark_all(self) -> None:
        self._walked_at = self.clock()
        addresses = self.shelf.addresses()
        random.shuffle(addresses)  # so that a fleet that republishes spreads over the key space
        with self._wake:
            for address in addresses:
                self._dirty.setdefault(address, "")

    def _flush(self, store: MetadataStore) -> None:
        counters, hits = self.counters.take_unflushed()
        by_namespace: dict[str, dict[str, int]] = {}
        for (namespace, key), count in hits.items():
            by_namespace.setdefault(namespace, {})[key] = count
        try:
            if counters:
                store.add_stats(self.identity.node, counters)
                counters = {}
            for namespace in list(by_namespace):
                store.add_hits(namespace, by_namespace[namespace])
                del by_namespace[namespace]
        except StoreError:
            left = {(ns, key): n for ns, keys in by_namespace.items() for key, n in keys.items()}
            self.counters.put_back(counters, left)
            raise

    def _write_dirty(self, store: MetadataStore, *, until: float) -> None:
        """Write addresses, oldest change first, at least one and until it is time to beat."""
        for fingerprint in list(self._undescribed):
            store.describe_namespace(fingerprint, self._namespaces[fingerprint])
            self._undescribed.discard(fingerprint)
        while True:
            with self._wake:
                if not self._dirty:
                    return
                address, reason = next(iter(self._dirty.items()))
                del self._dirty[address]
            try:
                self._write(store, address, reason)
            except StoreError:
                with self._wake:
                    self._dirty.setdefault(address, reason)
                raise
            if self.clock() >= until:
                return

    def _write(self, store: MetadataStore, address: Address, reason: str) -> None:
        item = self.shelf.peek(address)
        if item is None:
            store.withdraw(*address, self.identity.node, reason=reason or "gone")
            return
        try:
            outcome = store.publish(
                self._record(item), self._location(item), ttl_seconds=self._ttl_seconds(item)
            )
        except StoreFull:
            self.counters.add("publish_refused")
            return
        if outcome is Publication.CONFLICT:
            self.counters.add("publish_conflict")

    def _record(self, item: Item) -> Record:
        header = item.header
        namespace, key = item.address
        location = self._location(item)
        return Record(
            namespace=namespace,
            key=key,
            dtype=header.dtype,
            shape=header.shape,
            nbytes=header.nbytes,
            kind=header.kind,
            created=time.time(),
            locations=(location,),
        )

    def _location(self, item: Item) -> Location:
        return Location(self.identity.node, self.identity.boot, item.generation, item.checksum)

    def _ttl_seconds(self, item: Item) -> float:
        remaining = self.shelf.remaining_seconds(item)
        if remaining is None:
            return self.record_ttl_seconds
        # Never longer than what is renewed: the record of a dead holder ends by itself.
        return min(self.record_ttl_seconds, max(remaining, 0.001))

    def _leave(self) -> None:
        try:
            store = self.storage.store()
            self._flush(store)
            store.leave(self.identity.node, self.identity.boot)
        except StoreError:
            pass  # we are going; others will notice that we no longer beat
