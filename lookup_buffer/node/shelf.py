"""The shelf: the arena and its inventory under one lock, for all threads of the node.

The loop pins and unpins, payload threads write. The lock is held for bookkeeping only, never
while bytes are copied or hashed.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from xxhash import xxh3_64_intdigest

from lookup_buffer.errors import BufferFull
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.inventory import Gauges, Inventory, Item
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.index import LocalIndex
from lookup_buffer.shm.memory import Arena, Mapping, copy_bytes
from store import GoneReason


@dataclass(frozen=True, slots=True)
class Held:
    """An item and the ticket that holds it."""

    ticket: int
    item: Item


class Shelf:
    """Thread-safe. `on_change(address, reason)` is called, without the lock, for each item that
    appeared (reason "") or went (why)."""

    def __init__(
        self,
        capacity_bytes: int,
        on_change: Callable[[QualifiedKey, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self.local_index = LocalIndex(capacity_bytes)
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._inventory = Inventory(capacity_bytes, clock, self.local_index.remove)
        self._on_room: Callable[[], None] | None = None
        self._offers: dict[QualifiedKey, Item] = {}

    # -- read

    def hold(
        self, address: QualifiedKey, owner: int, ranks: Iterable[int] | None = None
    ) -> Held | None:
        """Pin the complete item at `address` for `owner`; None where there is none.

        Raises:
            BufferFull: too much is pinned already.
        """
        with self._lock:
            item = self._inventory.find(address)
            ticket = None if item is None else self._inventory.pin(item, owner, ranks)
        self._report()
        return None if item is None or ticket is None else Held(ticket, item)

    def holds(self, address: QualifiedKey) -> bool:
        """Whether a complete item lies at `address`."""
        with self._lock:
            return self._inventory.find(address) is not None

    def holds_each(self, addresses: Sequence[QualifiedKey]) -> list[bool]:
        """The same for many at once."""
        with self._lock:
            find = self._inventory.find
            return [find(address) is not None for address in addresses]

    def taken(self, address: QualifiedKey) -> bool:
        """Whether `address` has an item or is being written."""
        with self._lock:
            return self._inventory.holds(address)

    def touch(self, address: QualifiedKey) -> Item | None:
        """A client read the item by the board: mark it as used. None where it has gone since."""
        with self._lock:
            return self._inventory.find(address)

    def release(self, tickets: Iterable[int], owner: int) -> None:
        """Let go of tickets; those of other owners are left alone."""
        with self._lock:
            for ticket in tickets:
                self._inventory.unpin(ticket, owner)
        self._report()

    def done(self, tickets: Iterable[int], rank: int) -> None:
        with self._lock:
            for ticket in tickets:
                self._inventory.done(ticket, rank)
        self._report()

    def holds_pins(self, owner: int) -> bool:
        with self._lock:
            return bool(self._inventory.pins_of(owner))

    def release_all(self, owner: int) -> None:
        with self._lock:
            for ticket in self._inventory.pins_of(owner):
                self._inventory.unpin(ticket, owner)
        self._report()

    def bytes_of(self, item: Item) -> memoryview:
        """The item's bytes. The caller holds it."""
        return self.arena.view[item.offset : item.offset + item.nbytes]

    def remaining_seconds(self, item: Item) -> float | None:
        """What is left of the item's time to live; None where it has no end."""
        return None if item.expires_at is None else max(0.0, item.expires_at - self._clock())

    # -- write

    def reserve(
        self, address: QualifiedKey, header: TensorHeader, *, origin: str, ttl_seconds: float | None
    ) -> Item | None:
        """Room to write into, or None where the address is taken. Then commit or abandon.

        An item that has expired does not take its address any more.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve`.
        """
        try:
            with self._lock:
                if self._inventory.find(address) or self._inventory.holds(address):
                    return None
                return self._inventory.reserve(
                    address, header, origin=origin, ttl_seconds=ttl_seconds
                )
        finally:
            self._report()

    def reserve_handoff(
        self, address: QualifiedKey, header: TensorHeader, *, ttl_seconds: float, wanted: bool
    ) -> Item:
        """Room for the next generation of a hand-off. Then commit or abandon.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve_handoff`.
        """
        try:
            with self._lock:
                reserve = partial(
                    self._inventory.reserve_handoff,
                    address, header, ttl_seconds=ttl_seconds, wanted=wanted,
                )  # fmt: skip
                try:
                    return reserve()
                except BufferFull:
                    self._inventory.remove_expired()
                    return reserve()
        finally:
            self._report()

    def reserve_loan(self, address: QualifiedKey, header: TensorHeader, *, origin: str) -> Item:
        """Room for a copy that only its pins keep. Then commit or abandon.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve`.
        """
        try:
            with self._lock:
                return self._inventory.reserve_loan(address, header, origin=origin)
        finally:
            self._report()

    def commit(self, item: Item, checksum: int, owner: int) -> int:
        """Make a written item visible, unless it is a loan; the answer is a ticket that holds it
        for `owner`."""
        with self._lock:
            self._inventory.commit(item, checksum)
            is_loan = item.gone
            if item.expires_at is None and not is_loan:
                self.local_index.add(item.address, item.header, item.offset)
            ticket = self._inventory.pin(item, owner)
        self._report()
        if not is_loan:
            self._on_change(item.address, "")
        return ticket

    def pin(self, item: Item, owner: int, ranks: Iterable[int] | None = None) -> Held:
        """One more pin on an item that is held, be it a loan.

        Raises:
            BufferFull: see `hold`.
        """
        with self._lock:
            return Held(self._inventory.pin(item, owner, ranks), item)

    def abandon(self, item: Item) -> None:
        with self._lock:
            self._inventory.abandon(item)
        self._report()

    def when_room(self, tell: Callable[[], None] | None) -> None:
        """From now on call `tell`, on any thread, when bytes were freed or may be evicted."""
        self._on_room = tell

    def fill(self, item: Item, source: Mapping | None) -> int:
        """Copy a reservation's bytes from the start of `source`; the answer is their checksum.

        What has no bytes needs no source, and has a checksum all the same.

        The checksum is taken of the copy, so what is read later is what was checked, whatever a
        client does to its staging area meanwhile.
        """
        if source is not None:
            copy_bytes(self.arena.address + item.offset, source.address, item.nbytes)
        return xxh3_64_intdigest(self.bytes_of(item))

    def remove(self, item: Item, reason: str) -> None:
        with self._lock:
            self._inventory.remove(item, reason)
        self._report()

    def remove_expired(self) -> None:
        with self._lock:
            self._inventory.remove_expired()
        self._report()

    def remove_namespace(self, namespace: str, reason: str, *, fetched_only: bool = False) -> None:
        """All complete items of a namespace; or only those that came from another node."""
        with self._lock:
            for item in self._inventory.items():
                if item.address[0] == namespace and not (fetched_only and item.origin == "local"):
                    self._inventory.remove(item, reason)
        self._report()

    def offer(self, address: QualifiedKey, header: TensorHeader) -> None:
        """There will be an item at `address`, when there is room: see `published`."""
        with self._lock:
            self._offers[address] = self._inventory.offered(address, header)
        self._on_change(address, "")

    def retract(self, address: QualifiedKey) -> None:
        """Idempotent."""
        with self._lock:
            offered = self._offers.pop(address, None)
        if offered is not None:
            self._on_change(address, GoneReason.RETRACTED)

    # -- inspect

    def published(self, address: QualifiedKey) -> Item | None:
        """What the store is to know of `address`: the complete item, or else what is offered,
        whose checksum is 0."""
        with self._lock:
            return self._inventory.peek(address) or self._offers.get(address)

    def peek(self, address: QualifiedKey) -> Item | None:
        """The complete item at `address`, without marking it as used."""
        with self._lock:
            return self._inventory.peek(address)

    def addresses(self) -> list[QualifiedKey]:
        with self._lock:
            return [*(item.address for item in self._inventory.items()), *self._offers]

    def gauges(self) -> Gauges:
        with self._lock:
            return self._inventory.gauges()

    def close(self) -> None:
        self.arena.close()
        self.local_index.close()

    def _report(self) -> None:
        """Tell what the last change did, without the lock."""
        inventory = self._inventory
        if inventory.anything_removed:
            with self._lock:
                removed = inventory.take_removed()
            for item, reason in removed:
                self._on_change(item.address, reason)
        on_room = self._on_room
        if inventory.room_came:
            inventory.room_came = False
            if on_room is not None:
                on_room()
