"""What the arena holds: items, reservations, pins, and who may be evicted.

Pure bookkeeping: no I/O, no lock, no thread; the clock is an argument. The node calls it under
its own lock. Bytes are charged when a reservation is made and released exactly once, when the
item has gone and its last pin with it.

Hand-offs are never evicted, so they have a share of their own, and pinning one costs nothing: no
reader can be refused what would make room. What is on loan from another node is never found here.

Item: one tensor in the arena.

Room: where in the arena items lie, and which of them give way when there is no room.

Pure bookkeeping, like the inventory, which decides what may be evicted and what it means.

The shares of the arena: how many bytes of it readers, writers and hand-offs may hold.

What they leave can be evicted, so that there is always room to be made. Pure bookkeeping, as
`inventory`, whose items these bytes are.
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

    An item that is `gone` from the start is on loan: a copy for those who have it pinned.
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
    """What it takes of the share of hand-offs; 0 where it is none of ours."""
    device: str = ""
    """On what the client that inserted it had computed it; empty where nobody said."""
    wanted: bool = False
    """A hand-off that is charged like a pin, because its taker waits: see `reserve_handoff`."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes

    @property
    def is_handoff(self) -> bool:
        """Whether it is a hand-off of this node, and not what another has lent."""
        return self.handoff_bytes > 0


class Room:
    """Not thread-safe. All sizes reported here are rounded as `Allocator` has it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._allocator = Allocator(capacity_bytes)
        self._at: dict[int, Item] = {}
        self._by_use: OrderedDict[int, Item] = OrderedDict()
        """By offset: the items that may be evicted unless they are pinned, the least recently used
        first."""

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._allocator.used_bytes

    def rounded_bytes(self, nbytes: int) -> int:
        """What an item of so many bytes takes."""
        return self._allocator.rounded_bytes(nbytes)

    def find(self, nbytes: int) -> int | None:
        """The offset of so many bytes that are the caller's now; None where there are none."""
        return self._allocator.allocate(nbytes)

    def in_the_way(self, nbytes: int) -> list[Item] | None:
        """What has to go so that `find` has an answer; None where that would not do.

        Neighbours, of which the youngest was not used for longest: see
        `Allocator.eviction_window`.
        """
        window = self._allocator.eviction_window(nbytes, self._oldest_first())
        return None if window is None else [self._at[offset] for offset in window]

    def settle(self, item: Item) -> None:
        """The item lies at its offset, which was found for it."""
        self._at[item.offset] = item

    def used(self, item: Item) -> None:
        """The item was used later than all others. It may be evicted from the first time on."""
        self._by_use[item.offset] = item
        self._by_use.move_to_end(item.offset)

    def free(self, item: Item) -> None:
        """Its bytes are anybody's."""
        del self._at[item.offset]
        self._by_use.pop(item.offset, None)
        self._allocator.free(item.offset)

    def _oldest_first(self) -> Iterator[tuple[float, int]]:
        for offset, item in self._by_use.items():
            if not item.pins:
                yield item.last_used, offset


HELD_FRACTION: Final = 1 / 3
"""Share of the arena that pins and reservations may take together. One item alone may exceed it."""
HANDOFF_FRACTION: Final = 1 / 2
"""Share of the arena that hand-offs may take together: they are never evicted."""


@dataclass(slots=True)
class Shares:
    capacity_bytes: int
    pinned_bytes: int = 0
    reserved_bytes: int = 0
    handoff_bytes: int = 0
    wanted_bytes: int = 0
    """Of hand-offs for whose share there was no room and whose takers wait: held like pins."""

    def check_held(self, nbytes: int) -> None:
        """Raise BufferFull where pins and reservations would exceed their share."""
        held_bytes = self.pinned_bytes + self.reserved_bytes + self.wanted_bytes
        # What has no bytes always passes, else its writer could be refused the pin at commit.
        if nbytes and held_bytes and held_bytes + nbytes > self.capacity_bytes * HELD_FRACTION:
            raise BufferFull(
                f"{held_bytes} bytes are pinned or being written; {nbytes} more exceed "
                f"a third of the arena of {self.capacity_bytes} bytes"
            )

    def check_handoff_size(self, nbytes: int) -> None:
        """Raise TensorTooLarge for a hand-off that exceeds the share of all of them."""
        if nbytes > self.capacity_bytes * HANDOFF_FRACTION:
            raise TensorTooLarge(
                f"a hand-off of {nbytes} bytes exceeds half of the arena of "
                f"{self.capacity_bytes} bytes; raise capacity_bytes"
            )

    def takes_handoff(self, nbytes: int, *, without: int = 0) -> bool:
        """Whether the share has room for so much, were `without` bytes of it given back."""
        used_bytes = self.handoff_bytes - without
        return used_bytes + nbytes <= self.capacity_bytes * HANDOFF_FRACTION

    def check_handoff(self, nbytes: int) -> None:
        """Raise BufferFull where hand-offs would exceed their share."""
        if not self.takes_handoff(nbytes):
            raise BufferFull(
                f"hand-offs take {self.handoff_bytes} bytes; {nbytes} more exceed half of "
                f"the arena of {self.capacity_bytes} bytes"
            )

    def charge_handoff(self, nbytes: int, *, wanted: bool) -> None:
        if wanted:
            self.wanted_bytes += nbytes
        else:
            self.handoff_bytes += nbytes


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
    """Whether bytes were freed, or may be evicted, since somebody set this to False."""
    _generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _pin_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _removed: list[tuple[Item, str]] = field(default_factory=list)
    _room: Room = field(init=False)
    _shares: Shares = field(init=False)

    def __post_init__(self) -> None:
        self._shares = Shares(self.capacity_bytes)
        self._room = Room(self.capacity_bytes)

    # -- look up

    def find(self, address: QualifiedKey) -> Item | None:
        """The complete item at `address`, marked as used now; None where there is none."""
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
        """As `find`, without marking it as used and without removing what has expired."""
        item = self._items.get(address)
        return item if item is not None and item.ready else None

    def holds(self, address: QualifiedKey) -> bool:
        """Whether `address` is taken, be it by a complete item or by a reservation."""
        return address in self._items

    def items(self) -> list[Item]:
        """All complete items."""
        return [item for item in self._items.values() if item.ready]

    # -- write

    def reserve(
        self, address: QualifiedKey, header: TensorHeader, *, origin: str, ttl_seconds: float | None
    ) -> Item:
        """Room for an item; evicts what is oldest where that is needed. Then commit or abandon.

        Raises:
            TensorTooLarge: it exceeds the whole arena.
            BufferFull: what could be evicted does not make the room.
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
        """Room for a hand-off, or for its next generation: found only when it is committed.

        What has the address and is used by nobody gives way where the share would not hold both.
        `wanted`: its taker waits, so it will not stay. It may then take what pins may take, so that
        a full share keeps no taker from what makes room in it.

        Raises:
            TensorTooLarge: it exceeds the share of hand-offs.
            BufferFull: they have used it up, or what could be evicted does not make the room.
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
        """A hand-off for which there is no room, with a generation before the one that it gets."""
        generation, now = next(self._generations), self.clock()
        return Item(address, header, 0, generation, "local", now, None, gone=True)

    def reserve_loan(self, address: QualifiedKey, header: TensorHeader, *, origin: str) -> Item:
        """Room for a copy of another node's hand-off, which only its pins keep here.

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
        """The bytes of a reservation are complete: readers may have it from now on.

        Reserved bytes become pinned ones without a check when the writer pins at once. A hand-off
        becomes a new generation, in the place of what had its address.
        """
        if item.is_handoff:
            replaced = self._items.get(item.address)
            if replaced is not None:
                self.remove(replaced, "replaced")
            item.generation = next(self._generations)  # by the order in which they can be had
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
        """Give a reservation back."""
        if not item.is_handoff:
            self._shares.reserved_bytes -= item.nbytes
        if self._items.get(item.address) is item:
            del self._items[item.address]
        item.gone = True
        self._free(item)

    def remove(self, item: Item, reason: str) -> None:
        """Take a complete item away; its bytes stay until the last pin has gone."""
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
        now = self.clock()
        for item in list(self._mortal.values()):
            if item.expires_at is not None and item.expires_at <= now:
                self.remove(item, GoneReason.EXPIRED)

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
        if item.pins == 0 and not item.is_handoff:
            self._shares.check_held(item.nbytes)
            self._shares.pinned_bytes += item.nbytes
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
            self.room_came = True
            if not item.is_handoff:
                self._shares.pinned_bytes -= item.nbytes
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
            raise BufferFull(f"no room for {nbytes} bytes: what is left is pinned or being written")
        for item in in_the_way:
            self.remove(item, GoneReason.EVICTED)
        offset = self._room.find(nbytes)
        assert offset is not None, "they made the room"
        return offset

    def _free(self, item: Item) -> None:
        self.room_came = True
        self._shares.charge_handoff(-item.handoff_bytes, wanted=item.wanted)
        self._room.free(item)
