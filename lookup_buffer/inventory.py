"""What the arena holds: items, reservations, pins, and who may be evicted.

Pure bookkeeping: no I/O, no lock, no thread; the clock is an argument. The node calls it under
its own lock. Bytes are charged when a reservation is made and released exactly once, when the
item has gone and its last pin with it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lookup_buffer.allocator import Allocator
from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.header import TensorHeader

HELD_FRACTION = 1 / 3
"""Share of the arena that pins and reservations may take together, so that there is always
something to evict. One item alone may exceed it."""

Address = tuple[str, str]
"""(namespace fingerprint, key text): what an item is found by."""


@dataclass(slots=True, eq=False)
class Item:
    """One tensor in the arena. `ready` once its bytes are complete and verified."""

    address: Address
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

    @property
    def nbytes(self) -> int:
        return self.header.nbytes


@dataclass(slots=True)
class Pin:
    """A reader's hold on an item, owned by a session; a ticket where ranks must report."""

    item: Item
    owner: int
    ranks: set[int] | None
    """Ranks that have not said done yet; None where the owner itself releases."""


@dataclass(frozen=True, slots=True)
class Gauges:
    items: int
    used_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    pins: int
    capacity_bytes: int


@dataclass(slots=True)
class Inventory:
    """All items of one arena. Not thread-safe."""

    capacity_bytes: int
    clock: Callable[[], float]
    on_gone: Callable[[Address], None] = lambda _: None
    """Called when an item can no longer be found, before its bytes may be given to another."""
    _items: dict[Address, Item] = field(default_factory=dict)
    _by_offset: dict[int, Item] = field(default_factory=dict)
    _pins: dict[int, Pin] = field(default_factory=dict)
    _pinned_bytes: int = 0
    _reserved_bytes: int = 0
    _generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _pin_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _removed: list[tuple[Item, str]] = field(default_factory=list)
    _allocator: Allocator = field(init=False)

    def __post_init__(self) -> None:
        self._allocator = Allocator(self.capacity_bytes)

    # -- look up

    def find(self, address: Address) -> Item | None:
        """The complete item at `address`, marked as used now; None where there is none."""
        item = self._items.get(address)
        if item is None or not item.ready:
            return None
        now = self.clock()
        if item.expires_at is not None and item.expires_at <= now:
            self.remove(item, "expired")
            return None
        item.last_used = now
        return item

    def peek(self, address: Address) -> Item | None:
        """As `find`, without marking it as used and without removing what has expired."""
        item = self._items.get(address)
        return item if item is not None and item.ready else None

    def holds(self, address: Address) -> bool:
        """Whether `address` is taken, be it by a complete item or by a reservation."""
        return address in self._items

    def items(self) -> list[Item]:
        """All complete items."""
        return [item for item in self._items.values() if item.ready]

    # -- write

    def reserve(
        self, address: Address, header: TensorHeader, *, origin: str, ttl_seconds: float | None
    ) -> Item:
        """Room for an item; evicts what is oldest where that is needed. Then commit or abandon.

        Raises:
            TensorTooLarge: it exceeds the whole arena.
            BufferFull: what could be evicted does not make the room.
        """
        assert address not in self._items, "the caller looks first"
        if self._allocator.rounded_bytes(header.nbytes) > self._allocator.capacity_bytes:
            raise TensorTooLarge(
                f"a tensor of {header.nbytes} bytes exceeds the arena of "
                f"{self.capacity_bytes} bytes; raise capacity_bytes"
            )
        self._check_held(header.nbytes)
        offset = self._allocator.allocate(header.nbytes)
        if offset is None:
            offset = self._evict_for(header.nbytes)
        now = self.clock()
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        item = Item(address, header, offset, next(self._generations), origin, now, expires_at)
        self._items[address] = self._by_offset[offset] = item
        self._reserved_bytes += item.nbytes
        return item

    def commit(self, item: Item, checksum: int) -> None:
        """The bytes of a reservation are complete: readers may have it from now on.

        Reserved bytes become pinned ones without a check when the writer pins at once.
        """
        self._reserved_bytes -= item.nbytes
        item.checksum = checksum
        item.ready = True
        item.last_used = self.clock()

    def abandon(self, item: Item) -> None:
        """Give a reservation back."""
        self._reserved_bytes -= item.nbytes
        item.gone = True
        del self._items[item.address]
        self._free(item)

    def remove(self, item: Item, reason: str) -> None:
        """Take a complete item away; its bytes stay until the last pin has gone."""
        if item.gone:
            return
        item.gone = True
        del self._items[item.address]
        self.on_gone(item.address)
        self._removed.append((item, reason))
        if item.pins == 0:
            self._free(item)

    def remove_expired(self) -> None:
        now = self.clock()
        for item in self.items():
            if item.expires_at is not None and item.expires_at <= now:
                self.remove(item, "expired")

    @property
    def anything_removed(self) -> bool:
        return bool(self._removed)

    def take_removed(self) -> list[tuple[Item, str]]:
        """Items removed since the last call, and why: they are still to be withdrawn."""
        removed, self._removed = self._removed, []
        return removed

    # -- pins

    def pin(self, item: Item, owner: int, ranks: Iterable[int] | None = None) -> int:
        """Hold `item` for `owner`; the answer is the pin's id (the ticket).

        Raises:
            BufferFull: pins and reservations together would exceed their share of the arena.
        """
        if item.pins == 0:
            self._check_held(item.nbytes)
            self._pinned_bytes += item.nbytes
        item.pins += 1
        pin_id = next(self._pin_ids)
        self._pins[pin_id] = Pin(item, owner, None if ranks is None else set(ranks))
        return pin_id

    def unpin(self, pin_id: int, owner: int) -> None:
        """Let go. A pin that is not there (any more), or is another's, is no error."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.owner != owner:
            return
        del self._pins[pin_id]
        item = pin.item
        item.pins -= 1
        if item.pins == 0:
            self._pinned_bytes -= item.nbytes
            if item.gone:
                self._free(item)

    def done(self, pin_id: int, rank: int) -> None:
        """One rank has taken its copy; after the last one the pin goes."""
        pin = self._pins.get(pin_id)
        if pin is None or pin.ranks is None:
            return
        pin.ranks.discard(rank)
        if not pin.ranks:
            self.unpin(pin_id, pin.owner)

    def pins_of(self, owner: int) -> list[int]:
        return [pin_id for pin_id, pin in self._pins.items() if pin.owner == owner]

    def gauges(self) -> Gauges:
        return Gauges(
            items=len(self._items),
            used_bytes=self._allocator.used_bytes,
            pinned_bytes=self._pinned_bytes,
            reserved_bytes=self._reserved_bytes,
            pins=len(self._pins),
            capacity_bytes=self.capacity_bytes,
        )

    # -- room

    def _check_held(self, nbytes: int) -> None:
        held_bytes = self._pinned_bytes + self._reserved_bytes
        # What has no bytes always passes, else its writer could be refused the pin at commit.
        if nbytes and held_bytes and held_bytes + nbytes > self.capacity_bytes * HELD_FRACTION:
            raise BufferFull(
                f"{held_bytes} bytes are pinned or being written; {nbytes} more exceed "
                f"a third of the arena of {self.capacity_bytes} bytes"
            )

    def _evict_for(self, nbytes: int) -> int:
        window = self._allocator.eviction_window(nbytes, self._last_use)
        if window is None:
            raise BufferFull(f"no room for {nbytes} bytes: what is left is pinned or being written")
        for offset in window:
            self.remove(self._by_offset[offset], "evicted")
        offset_found = self._allocator.allocate(nbytes)
        assert offset_found is not None, "the window makes the room"
        return offset_found

    def _last_use(self, offset: int) -> float | None:
        item = self._by_offset[offset]
        return item.last_used if item.ready and item.pins == 0 else None

    def _free(self, item: Item) -> None:
        del self._by_offset[item.offset]
        self._allocator.free(item.offset)
