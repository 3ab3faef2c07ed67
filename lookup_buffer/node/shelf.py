"""The arena, its inventory and the local index.

The bookkeeping belongs to the loop. The threads `lb-copy`, `lb-fetch` and `lb-send` only write and
read bytes of what is reserved or pinned (`fill`, `bytes_of`). Called by most modules here.
"""

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
    """An item and the ticket of a pin on it."""

    ticket: int
    item: Item


class Shelf:
    """`on_change(address, reason)` is called for each item that appeared (reason "") or was removed
    (why)."""

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
        self._inventory = Inventory(capacity_bytes, clock, self.local_index.remove)
        self._on_room: Callable[[], None] | None = None
        self._offers: dict[QualifiedKey, Item] = {}

    # -- read

    def hold(
        self, address: QualifiedKey, owner: int, ranks: Iterable[int] | None = None
    ) -> Held | None:
        """Pin the complete item at `address` for `owner`; None if there is none.

        Raises:
            BufferFull: pins and reservations would exceed their share.
        """
        item = self._inventory.find(address)
        ticket = None if item is None else self._inventory.pin(item, owner, ranks)
        self._report()
        return None if item is None or ticket is None else Held(ticket, item)

    def holds(self, address: QualifiedKey) -> bool:
        """Whether a complete item is at `address`."""
        return self._inventory.find(address) is not None

    def holds_each(self, addresses: Sequence[QualifiedKey]) -> list[bool]:
        """As `holds`, for many addresses."""
        find = self._inventory.find
        return [find(address) is not None for address in addresses]

    def taken(self, address: QualifiedKey) -> bool:
        """Whether `address` has an item or is being written."""
        return self._inventory.holds(address)

    def touch(self, address: QualifiedKey) -> Item | None:
        """A client read the item through the local index: mark it as used. None if it is gone."""
        return self._inventory.find(address)

    def release(self, tickets: Iterable[int], owner: int) -> None:
        """Release tickets; those of other owners are ignored."""
        for ticket in tickets:
            self._inventory.unpin(ticket, owner)
        self._report()

    def done(self, tickets: Iterable[int], rank: int) -> None:
        for ticket in tickets:
            self._inventory.done(ticket, rank)
        self._report()

    def holds_pins(self, owner: int) -> bool:
        return bool(self._inventory.pins_of(owner))

    def release_all(self, owner: int) -> None:
        for ticket in self._inventory.pins_of(owner):
            self._inventory.unpin(ticket, owner)
        self._report()

    def bytes_of(self, item: Item) -> memoryview:
        """The item's bytes. The caller has pinned it."""
        return self.arena.view[item.offset : item.offset + item.nbytes]

    def remaining_seconds(self, item: Item) -> float | None:
        """What is left of the item's time to live, in seconds; None if it has none."""
        return None if item.expires_at is None else max(0.0, item.expires_at - self._clock())

    # -- write

    def reserve(
        self, address: QualifiedKey, header: TensorHeader, *, origin: str, ttl_seconds: float | None
    ) -> Item | None:
        """Memory to write into, or None if the address is in use. Then commit or abandon.

        An expired item no longer uses its address.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve`.
        """
        try:
            if self._inventory.find(address) or self._inventory.holds(address):
                return None
            return self._inventory.reserve(address, header, origin=origin, ttl_seconds=ttl_seconds)
        finally:
            self._report()

    def reserve_handoff(
        self, address: QualifiedKey, header: TensorHeader, *, ttl_seconds: float, wanted: bool
    ) -> Item:
        """Memory for the next generation of a hand-off. Then commit or abandon.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve_handoff`.
        """
        try:
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
        """Memory for a copy that is kept only by its pins. Then commit or abandon.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve`.
        """
        try:
            return self._inventory.reserve_loan(address, header, origin=origin)
        finally:
            self._report()

    def commit(self, item: Item, checksum: int, owner: int) -> int:
        """Make a written item visible, unless it is a loan. Returns the ticket of a pin for
        `owner`."""
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
        """Another pin on a pinned item; also for loans.

        Raises:
            BufferFull: see `hold`.
        """
        return Held(self._inventory.pin(item, owner, ranks), item)

    def abandon(self, item: Item) -> None:
        self._inventory.abandon(item)
        self._report()

    def when_room(self, tell: Callable[[], None] | None) -> None:
        """From now on call `tell` when bytes were freed or became evictable."""
        self._on_room = tell

    def fill(self, item: Item, source: Mapping | None, offset: int) -> int:
        """Copy a reservation's bytes from `offset` in `source`; returns their checksum.

        An item of 0 bytes needs no source, and has a checksum, too.

        The checksum is of the copy: whatever a client does to its staging area meanwhile, readers
        get the bytes that were checked.
        """
        if source is not None:
            copy_bytes(self.arena.address + item.offset, source.address + offset, item.nbytes)
        return xxh3_64_intdigest(self.bytes_of(item))

    def remove(self, item: Item, reason: str) -> None:
        self._inventory.remove(item, reason)
        self._report()

    def remove_expired(self) -> None:
        self._inventory.remove_expired()
        self._report()

    def remove_all(self, items: Iterable[Item], reason: str) -> None:
        for item in items:
            self._inventory.remove(item, reason)
        self._report()

    def items_of(self, namespace: str, *, fetched_only: bool = False) -> list[Item]:
        """All complete items of a namespace; `fetched_only`: only those from other nodes."""
        return [
            item
            for item in self._inventory.items()
            if item.address[0] == namespace and not (fetched_only and item.origin == "local")
        ]

    def offer(self, address: QualifiedKey, header: TensorHeader) -> None:
        """There will be an item at `address` once there is space for it: see `published`."""
        self._offers[address] = self._inventory.offered(address, header)
        self._on_change(address, "")

    def retract(self, address: QualifiedKey) -> None:
        """Idempotent."""
        offered = self._offers.pop(address, None)
        if offered is not None:
            self._on_change(address, GoneReason.RETRACTED)

    # -- inspect

    def published(self, address: QualifiedKey) -> Item | None:
        """What the store must have for `address`: the complete item, or else the offer, whose
        checksum is 0."""
        return self._inventory.peek(address) or self._offers.get(address)

    def peek(self, address: QualifiedKey) -> Item | None:
        """The complete item at `address`, without marking it as used."""
        return self._inventory.peek(address)

    def addresses(self) -> list[QualifiedKey]:
        return [*(item.address for item in self._inventory.items()), *self._offers]

    def gauges(self) -> Gauges:
        return self._inventory.gauges()

    def close(self) -> None:
        self.arena.close()
        self.local_index.close()

    def _report(self) -> None:
        """Call back for the last changes."""
        inventory = self._inventory
        if inventory.anything_removed:
            removed = inventory.take_removed()
            for item, reason in removed:
                self._on_change(item.address, reason)
        on_room = self._on_room
        if inventory.room_came:
            inventory.room_came = False
            if on_room is not None:
                on_room()
