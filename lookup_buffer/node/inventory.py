"""What the arena holds: items, reservations and pins; their allocations, shares and eviction.

Pure bookkeeping: no I/O, no lock, no thread; the clock is an argument. Called only by `shelf`,
under its lock. `Inventory` decides what may be evicted, `Room` where items lie, `Shares` how many
bytes readers, writers and hand-offs may hold. The rest can be evicted, so room can be made.

Bytes are charged when a reservation is made. They are released exactly once: when the item is gone
and its last pin is released. Hand-offs are never evicted, so they have their own share. Pinning one
charges nothing: a taker, which makes room, is never refused. A loan (a copy of another node's
hand-off) is never returned by a look-up.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.key import QualifiedKey
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.allocator import Allocator
from store import GoneReason


@dataclass(slots=True, eq=False)
class Item:
    """One tensor in the arena. `ready` once its bytes are complete and verified.

    An item that is `gone` from the start is a loan: a copy that exists only for its pins.
    """

    address: QualifiedKey
    header: TensorHeader
    offset: int
    generation: int
    origin: str
    """'local' when a client of this node inserted it, else the node it was fetched from."""
    last_used: float
    expires_at: float | None
    ready: bool = False
    checksum: int = 0
    pins: int = 0
    gone: bool = False
    handoff_bytes: int = 0
    """Bytes charged to the share of hand-offs; 0 if it is not a hand-off of this node."""
    device: str = ""
    """The device on which the inserting client computed it; empty if unknown."""
    wanted: bool = False
    """A hand-off that is charged like a pin, because its taker waits: see `reserve_handoff`."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def is_handoff(self) -> bool:
        """Whether it is a hand-off of this node; False for a loan of another node's."""
        return self.handoff_bytes > 0


class Room:
    """Where items lie in the arena, and in which order they may be evicted.

    Not thread-safe. All sizes that it returns are rounded as `Allocator` rounds them.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._allocator = Allocator(capacity_bytes)
        self._at: dict[int, Item] = {}
        self._by_use: OrderedDict[int, Item] = OrderedDict()
        """By offset, the items that may be evicted unless they are pinned; least recently used
        first."""

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    def rounded_bytes(self, nbytes: int) -> int:
        """The bytes that an item of `nbytes` occupies."""
        return self._allocator.rounded_bytes(nbytes)

    def find(self, nbytes: int) -> int | None:
        """Allocate `nbytes`; returns the offset, or None if no gap is large enough."""
        return self._allocator.allocate(nbytes)

    def in_the_way(self, nbytes: int) -> list[Item] | None:
        """The items to evict so that `find` succeeds; None if no eviction suffices.

        They are neighbours. Among all such runs, the most recently used item of this one was
        used least recently: see `Allocator.eviction_window`.
        """
        window = self._allocator.eviction_window(nbytes, self._oldest_first())
        return None if window is None else [self._at[offset] for offset in window]

    def settle(self, item: Item) -> None:
        """Register the item at its offset, which `find` returned."""
        self._at[item.offset] = item

    def used(self, item: Item) -> None:
        """Mark the item as the most recently used. From the first call on it may be evicted."""
        self._by_use[item.offset] = item
        self._by_use.move_to_end(item.offset)

    def free(self, item: Item) -> None:
        """Free the bytes of the item."""
        del self._at[item.offset]
        self._by_use.pop(item.offset, None)
        self._allocator.free(item.offset)

    def _oldest_first(self) -> Iterator[tuple[float, int]]:
        for offset, item in self._by_use.items():
            if not item.pins:
                yield item.last_used, offset


HELD_FRACTION: Final = 1 / 3
"""Share of the arena for pins and reservations together. One item alone may exceed it."""
HANDOFF_FRACTION: Final = 1 / 2
"""Share of the arena for all hand-offs together: they are never evicted."""


@dataclass(slots=True)
class Shares:
    """The bytes charged to readers, writers and hand-offs, and their limits. Not thread-safe."""

    capacity_bytes: int
    pinned_bytes: int = 0
    reserved_bytes: int = 0
    handoff_bytes: int = 0
    wanted_bytes: int = 0
    """Bytes of hand-offs beyond their share whose takers wait: charged like pins."""

    def check_held(self, nbytes: int) -> None:
        """Raise BufferFull if pins and reservations would exceed their share."""
        held_bytes = self.pinned_bytes + self.reserved_bytes + self.wanted_bytes
        # An item of 0 bytes always passes; otherwise its writer could be refused the pin at commit.
        if nbytes and held_bytes and held_bytes + nbytes > self.capacity_bytes * HELD_FRACTION:
            raise BufferFull(
                f"{held_bytes} bytes are pinned or being written; {nbytes} more exceed a third of "
                f"the arena of {self.capacity_bytes} bytes; release views or raise capacity_bytes"
            )

    def check_handoff_size(self, nbytes: int) -> None:
        """Raise TensorTooLarge for a hand-off that exceeds the share of all of them."""
        if nbytes > self.capacity_bytes * HANDOFF_FRACTION:
            raise TensorTooLarge(
                f"a hand-off of {nbytes} bytes exceeds half of the arena of "
                f"{self.capacity_bytes} bytes; raise capacity_bytes"
            )

    def takes_handoff(self, nbytes: int, *, without: int = 0) -> bool:
        """Whether the share has room for `nbytes` once `without` bytes of it are released."""
        used_bytes = self.handoff_bytes - without
        return used_bytes + nbytes <= self.capacity_bytes * HANDOFF_FRACTION

    def check_handoff(self, nbytes: int) -> None:
        """Raise BufferFull if hand-offs would exceed their share."""
        if not self.takes_handoff(nbytes):
            raise BufferFull(
                f"hand-offs use {self.handoff_bytes} bytes; {nbytes} more exceed half of the arena "
                f"of {self.capacity_bytes} bytes; wait for takers or raise capacity_bytes"
            )

    def charge_handoff(self, nbytes: int, *, wanted: bool) -> None:
        if wanted:
            self.wanted_bytes += nbytes
        else:
            self.handoff_bytes += nbytes


@dataclass(slots=True)
class Pin:
    """A reader's hold on an item, owned by a session. With ranks it is a ticket."""

    item: Item
    owner: int
    ranks: set[int] | None
    """Ranks that have not reported done yet; None if the owner releases the pin itself."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of an inventory at one moment, in numbers."""

    items: int
    used_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    handoff_bytes: int
    pins: int
    capacity_bytes: int


@dataclass(slots=True)
class Inventory:
    """All items of one arena. Not thread-safe."""

    capacity_bytes: int
    clock: Callable[[], float]
    on_gone: Callable[[QualifiedKey], None] = lambda _: None
    """Called when an item can no longer be found, before its bytes may be given to another."""
    _items: dict[QualifiedKey, Item] = field(default_factory=dict)
    _mortal: dict[QualifiedKey, Item] = field(default_factory=dict)
    """The complete items that expire."""
    _pins: dict[int, Pin] = field(default_factory=dict)
    room_came: bool = False
    """Whether bytes were freed, or became evictable, since the caller set this to False."""
    _generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _pin_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _removed: list[tuple[Item, str]] = field(default_factory=list)
    _room: Room = field(init=False)
    _shares: Shares = field(init=False)

    def __post_init__(self) -> None:
        self._shares = Shares(self.capacity_bytes)
        self._room = Room(self.capacity_bytes)

    # -- look-up

    def find(self, address: QualifiedKey) -> Item | None:
        """The complete item at `address`, marked as used now; None if there is none.

        An expired item is removed.
        """
        item = self._items.get(address)
        if item is None or not item.ready:
            return None
        now = self.clock()
        if item.expires_at is not None and item.expires_at <= now:
            self.remove(item, GoneReason.EXPIRED)
            return None
        item.last_used = now
        if not item.is_handoff:
            self._room.used(item)
        return item

    def peek(self, address: QualifiedKey) -> Item | None:
        """As `find`, but does not mark the item as used and does not remove an expired one."""
        item = self._items.get(address)
        return item if item is not None and item.ready else None

    def holds(self, address: QualifiedKey) -> bool:
        """Whether `address` is in use, by a complete item or by a reservation."""
        return address in self._items

    def items(self) -> list[Item]:
        """All complete items."""
        return [item for item in self._items.values() if item.ready]

    # -- write

    def reserve(
        self, address: QualifiedKey, header: TensorHeader, *, origin: str, ttl_seconds: float | None
    ) -> Item:
        """Reserve room for an item; evicts the oldest items if needed. Then commit or abandon.

        Raises:
            TensorTooLarge: it exceeds the whole arena.
            BufferFull: pins and reservations would exceed their share, or evicting all that may
                be evicted does not make enough room.
        """
        assert address not in self._items, "the caller looks first"
        self._check_size(header.nbytes)
        self._shares.check_held(header.nbytes)
        item = self._place(address, header, origin, ttl_seconds)
        self._items[address] = item
        self._shares.reserved_bytes += item.nbytes
        return item

    def reserve_handoff(
        self, address: QualifiedKey, header: TensorHeader, *, ttl_seconds: float, wanted: bool
    ) -> Item:
        """Reserve room for a hand-off, or for its next generation. It is found once committed.

        If the share cannot hold both, an unpinned item at the same address is removed.
        `wanted`: a taker waits, so the item will not stay. It may then use the share of pins, so
        that a full share of hand-offs blocks no taker, which makes room in it.

        Raises:
            TensorTooLarge: it exceeds the share of hand-offs.
            BufferFull: that share (or, if `wanted`, also that of pins) is used up, or evicting all
                that may be evicted does not make enough room.
        """
        charged_bytes = self._room.rounded_bytes(header.nbytes)
        shares = self._shares
        shares.check_handoff_size(charged_bytes)
        old = self._items.get(address)
        if (
            old is not None
            and old.pins == 0
            and not shares.takes_handoff(charged_bytes)
            and shares.takes_handoff(charged_bytes, without=old.handoff_bytes)
        ):
            self.remove(old, "replaced")
        as_pin = wanted and not shares.takes_handoff(charged_bytes)
        if as_pin:
            shares.check_held(charged_bytes)
        else:
            shares.check_handoff(charged_bytes)
        item = self._place(address, header, "local", ttl_seconds)
        item.handoff_bytes, item.wanted = charged_bytes, as_pin
        shares.charge_handoff(charged_bytes, wanted=as_pin)
        return item

    def offered(self, address: QualifiedKey, header: TensorHeader) -> Item:
        """A hand-off without room yet. Its generation is lower than the one it gets with room."""
        generation, now = next(self._generations), self.clock()
        return Item(address, header, 0, generation, "local", now, None, gone=True)

    def reserve_loan(self, address: QualifiedKey, header: TensorHeader, *, origin: str) -> Item:
        """Reserve room for a loan: a copy of another node's hand-off, kept only by its pins.

        Raises:
            As `reserve`.
        """
        self._check_size(header.nbytes)
        self._shares.check_held(header.nbytes)
        item = self._place(address, header, origin, None)
        item.gone = True
        self._shares.reserved_bytes += item.nbytes
        return item

    def commit(self, item: Item, checksum: int) -> None:
        """The bytes of a reservation are complete: from now on readers can find the item.

        Reserved bytes become pinned bytes without a check if the writer pins at once. A hand-off
        becomes a new generation and replaces the item at its address.
        """
        if item.is_handoff:
            replaced = self._items.get(item.address)
            if replaced is not None:
                self.remove(replaced, "replaced")
            item.generation = next(self._generations)  # in the order in which they become available
            self._items[item.address] = item
        else:
            self._shares.reserved_bytes -= item.nbytes
            if not item.gone:
                self._room.used(item)
        item.checksum = checksum
        item.ready = True
        item.last_used = self.clock()
        if item.expires_at is not None and not item.gone:
            self._mortal[item.address] = item

    def abandon(self, item: Item) -> None:
        """Release a reservation."""
        if not item.is_handoff:
            self._shares.reserved_bytes -= item.nbytes
        if self._items.get(item.address) is item:
            del self._items[item.address]
        item.gone = True
        self._free(item)

    def remove(self, item: Item, reason: str) -> None:
        """Remove a complete item; its bytes stay until its last pin is released."""
        if item.gone:
            return
        item.gone = True
        del self._items[item.address]
        self._mortal.pop(item.address, None)
        self.on_gone(item.address)
        self._removed.append((item, reason))
        if item.pins == 0:
            self._free(item)

    def remove_expired(self) -> None:
        """Remove all items whose time to live is over."""
        now = self.clock()
        for item in list(self._mortal.values()):
            if item.expires_at is not None and item.expires_at <= now:
                self.remove(item, GoneReason.EXPIRED)

    @property
    def anything_removed(self) -> bool:
        return bool(self._removed)

    def take_removed(self) -> list[tuple[Item, str]]:
        """Items removed since the last call, and why. Their records are still to be withdrawn."""
        removed, self._removed = self._removed, []
        return removed

    # -- pins

    def pin(self, item: Item, owner: int, ranks: Iterable[int] | None = None) -> int:
        """Pin `item` for `owner`; returns the id of the pin (the ticket).

        Raises:
            BufferFull: pins and reservations together would exceed their share of the arena.
        """
        if item.pins == 0 and not item.is_handoff:
            self._shares.check_held(item.nbytes)
            self._shares.pinned_bytes += item.nbytes
        item.pins += 1
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = Pin(item, owner, None if ranks is None else set(ranks))
        return pin_id

    def unpin(self, pin_id: int, owner: int) -> None:
        """Release a pin. It is no error if the pin is absent or has another owner."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.owner != owner:
            return
        del self._pins[pin_id]
        item = pin.item
        item.pins -= 1
        if item.pins == 0:
            self.room_came = True
            if not item.is_handoff:
                self._shares.pinned_bytes -= item.nbytes
            if item.gone:
                self._free(item)

    def done(self, pin_id: int, rank: int) -> None:
        """One rank has its copy; after the last rank the pin is released."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.ranks is None:
            return
        pin.ranks.discard(rank)
        if not pin.ranks:
            self.unpin(pin_id, pin.owner)

    def pins_of(self, owner: int) -> list[int]:
        """The ids of the pins of `owner`."""
        return [pin_id for pin_id, pin in self._pins.items() if pin.owner == owner]

    def gauges(self) -> Gauges:
        return Gauges(
            items=len(self._items),
            used_bytes=self._room.used_bytes,
            pinned_bytes=self._shares.pinned_bytes,
            reserved_bytes=self._shares.reserved_bytes,
            handoff_bytes=self._shares.handoff_bytes + self._shares.wanted_bytes,
            pins=len(self._pins),
            capacity_bytes=self.capacity_bytes,
        )

    # -- room

    def _check_size(self, nbytes: int) -> None:
        if self._room.rounded_bytes(nbytes) > self._room.capacity_bytes:
            raise TensorTooLarge(
                f"a tensor of {nbytes} bytes exceeds the arena of "
                f"{self.capacity_bytes} bytes; raise capacity_bytes"
            )

    def _place(
        self, address: QualifiedKey, header: TensorHeader, origin: str, ttl_seconds: float | None
    ) -> Item:
        offset = self._room.find(header.nbytes)
        if offset is None:
            offset = self._evict_for(header.nbytes)
        now = self.clock()
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        item = Item(address, header, offset, next(self._generations), origin, now, expires_at)
        self._room.settle(item)
        return item

    def _evict_for(self, nbytes: int) -> int:
        in_the_way = self._room.in_the_way(nbytes)
        if in_the_way is None:
            raise BufferFull(
                f"no memory for {nbytes} bytes: everything that could be evicted is pinned or "
                "being written; release views or raise capacity_bytes"
            )
        for item in in_the_way:
            self.remove(item, GoneReason.EVICTED)
        offset = self._room.find(nbytes)
        assert offset is not None, "they made the room"
        return offset

    def _free(self, item: Item) -> None:
        self.room_came = True
        self._shares.charge_handoff(-item.handoff_bytes, wanted=item.wanted)
        self._room.free(item)
