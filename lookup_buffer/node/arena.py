"""The arena's memory and what it holds: items, reservations and pins; their shares and eviction.

The bookkeeping belongs to the loop, and does no I/O; the clock is an argument. The threads
`lb-copy`, `lb-fetch` and `lb-send` only write and read bytes of what is reserved or pinned (`fill`,
`bytes_of`). `shm/allocator.py` decides where items lie, and which neighbours are evicted together.
Called by most modules here.

Bytes are charged when a reservation is made. They are released exactly once: when the item is gone
and its last pin is released. Pins and reservations have one share of the arena, hand-offs, which
are never evicted, another. What remains can be evicted, so room can be made. Pinning a hand-off
charges nothing: a taker, which makes room, is never refused. A loan (a copy of another node's
hand-off) is never returned by a look-up.

An item also takes memory of the node's own, its entry, however few its bytes are. Entries are
charged and released with the bytes, have a bound of their own, and are evicted to keep it.
"""

import itertools
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.expiring import Expiring
from lookup_buffer.node.items import Gauges, Item, Pin, entry_bytes_of, pin_size
from lookup_buffer.node.owned import Owned
from lookup_buffer.node.shares import Shares
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.shm.allocator import Allocator
from lookup_buffer.shm.index import LocalIndex
from lookup_buffer.shm.memory import SealedMemory
from lookup_buffer.times import Clock
from store import INVALIDATIONS_MAX, GoneReason

HELD_FRACTION: Final = 1 / 3
"""Share of the arena for pins and reservations together. One item alone may exceed it."""
HANDOFF_FRACTION: Final = 1 / 2
"""Share of the arena for all hand-offs together: they are never evicted."""
ENTRIES_FRACTION: Final = 1 / 32
"""The bound on all entries, relative to the arena: it is never reached by items of 40 KB. A walk of
the inventory may keep as many addresses of items that went meanwhile."""
ENTRIES_BYTES_MIN: Final = 128 << 20
"""What it is at least: 110,000 items with keys of 100 characters."""
PEER_OWNER: Final = -2
"""Owner of the pins on items that are being sent to other nodes."""
TICKET_BITS: Final = 62
"""Of a ticket, all random: whoever has one may report `Done` for it, which an engine's scheduler
passes on to its workers, and nobody learns another one from those that he has."""
PINS_MAX: Final = 131_072
"""Bound on the pins of all clients, see `shares`: of one at most half as many. Those of an engine
with many ranks count more: see `pin_size`."""
PINS_OWN: Final = 32
EXPIRED_PAGE: Final = 200
"""So many expired items are removed at once: about 6 ms."""
EVICTED_MAX: Final = 4000
"""So many items are evicted at once: about 0.1 s. An item of 130 MB takes the place of so many of
32 KB."""


class Evicting(BufferFull):
    """There will be room: what was in the way is being evicted, in parts. Try again."""


@dataclass(slots=True)
class _Vain:
    """For what size there is no window: it was searched for in vain since room came last. One
    search may examine a part of the arena only, see `Allocator.rounds`."""

    nbytes: int | None = None
    """The largest of these searches."""
    first_round: int = 0

    def forget(self) -> None:
        self.nbytes = None

    def add(self, nbytes: int, rounds: int) -> None:
        """One more search was in vain; `rounds`: before it."""
        if self.nbytes is None or self.covers(self.nbytes, rounds):
            self.nbytes, self.first_round = nbytes, rounds
        self.nbytes = max(self.nbytes, nbytes)

    def covers(self, nbytes: int, rounds: int) -> bool:
        """Whether there is none for so many."""
        if self.nbytes is None or nbytes < self.nbytes:
            return False
        return rounds >= self.first_round + 2


class Arena:
    """The arena of a node.

    `on_change(address, reason)` is called for each item that appeared (reason "") or was removed
    (why). It only notes that: it does not call this object.
    """

    def __init__(
        self,
        capacity_bytes: int,
        on_change: Callable[[QualifiedKey, str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self.memory = SealedMemory("lookup-buffer-arena", capacity_bytes)
        self.local_index = LocalIndex(capacity_bytes)
        self._allocator = Allocator(capacity_bytes)
        self._clock = clock
        self.on_change = on_change
        self.on_room: Callable[[], None] = lambda: None
        """Called when bytes were freed or became evictable: in the middle of that, so it only notes
        it."""
        self._items: dict[QualifiedKey, Item] = {}
        """What uses an address: complete items, and reservations of items that will be found."""
        self._by_use: OrderedDict[int, Item] = OrderedDict()
        """By offset, the items that may be evicted; least recently used first. A pinned one is not
        among them: the end of its last pin is a use."""
        self._invalidated_at: dict[str, float] = {}
        """By namespace, see `invalidate_copies`; INVALIDATIONS_MAX at most."""
        self._all_invalidated_at = -math.inf
        """The same of all namespaces."""
        self._expiring: Expiring[Item] = Expiring()
        """The complete items that have a time to live."""
        self._offers: dict[QualifiedKey, Item] = {}
        self._pins: Owned[Pin] = Owned()
        self.shares = Shares("pins", PINS_MAX, PINS_OWN)
        """The pins of clients, also those of lanes. The owners below 0 are parts of the node."""
        self._generations = itertools.count(1)
        self._pinned_bytes = self._reserved_bytes = 0
        self._entries_bytes_max = max(ENTRIES_BYTES_MIN, int(capacity_bytes * ENTRIES_FRACTION))
        self._entries_bytes = 0
        self._handoff_bytes = self._handoff_entries_bytes = 0
        self._wanted_bytes = 0
        """Bytes of hand-offs beyond their share whose takers wait: charged like pins."""
        self._vain = _Vain()

    # -- look up

    def touch(self, address: QualifiedKey) -> Item | None:
        """The complete item at `address`, marked as used now; None if there is none.

        An expired item is removed.
        """
        item = self._items.get(address)
        if item is None or not item.ready:
            return None
        now = self._clock()
        if item.expires_at is not None and item.expires_at <= now:
            self.remove(item, GoneReason.EXPIRED)
            return None
        item.last_used = now
        if not item.pins and not item.is_handoff:
            self._by_use.move_to_end(item.offset)
        return item

    def holds(self, address: QualifiedKey) -> bool:
        """Whether a complete item is at `address`; it is marked as used."""
        return self.touch(address) is not None

    def has_place(self, address: QualifiedKey) -> bool:
        """Whether an item is at `address`, or is being written that will be found there."""
        return self.holds(address) or address in self._items

    def peek(self, address: QualifiedKey) -> Item | None:
        """As `touch`, but does not mark the item as used and does not remove an expired one."""
        item = self._items.get(address)
        return item if item is not None and item.ready else None

    def published(self, address: QualifiedKey) -> Item | None:
        """What the store must have for `address`: the complete item, or else the offer, whose
        checksum is 0."""
        return self.peek(address) or self._offers.get(address)

    def addresses(self) -> list[QualifiedKey]:
        """All addresses for which `published` returns something."""
        return [*(address for address, item in self._items.items() if item.ready), *self._offers]

    def items_of(
        self, namespaces: Container[str] | None, *, fetched_only: bool = False
    ) -> list[Item]:
        """All complete items of these namespaces, or of all (None); `fetched_only`: only those from
        other nodes."""
        return [
            item
            for (space, _), item in self._items.items()
            if (namespaces is None or space in namespaces)
            and item.ready
            and not (fetched_only and item.origin == "local")
        ]

    def invalidate_copies(self, namespaces: Iterable[str] | None) -> None:
        """What is being fetched from other nodes of these namespaces, or of all (None), is not to
        be kept. Once it is remembered of too many, it counts for all."""
        now = self._clock()
        self._invalidated_at |= dict.fromkeys(namespaces or (), now)
        if namespaces is None or len(self._invalidated_at) > INVALIDATIONS_MAX:
            self._invalidated_at, self._all_invalidated_at = {}, now

    def is_invalid(self, item: Item, since: float) -> bool:
        """Whether the namespace of a reservation was invalidated at or after `since`, by the clock;
        never for a loan, which nobody finds."""
        at = self._invalidated_at.get(item.address[0], -math.inf)
        return not item.gone and max(at, self._all_invalidated_at) >= since

    def gauges(self) -> Gauges:
        return Gauges(
            items=len(self._items),
            used_bytes=self._allocator.used_bytes,
            pinned_bytes=self._pinned_bytes,
            reserved_bytes=self._reserved_bytes,
            handoff_bytes=self._handoff_bytes + self._wanted_bytes,
            pins=len(self._pins),
            capacity_bytes=self.memory.nbytes,
        )

    def remaining_seconds(self, item: Item) -> float | None:
        """What is left of the item's time to live, in seconds; None if it has none."""
        return None if item.expires_at is None else max(0.0, item.expires_at - self._clock())

    # -- pins

    def hold(
        self, address: QualifiedKey, owner: int, ranks: Collection[int] | None = None
    ) -> Pin | None:
        """Pin the complete item at `address` for `owner`; None if there is none.

        Raises:
            BufferFull: see `pin`.
        """
        item = self.touch(address)
        return None if item is None else self.pin(item, owner, ranks)

    def pin(self, item: Item, owner: int, ranks: Collection[int] | None = None) -> Pin:
        """Pin a complete item that is found or pinned; also a loan.

        Raises:
            BufferFull: pins and reservations would exceed their share, or this owner has too many
                pins.
        """
        if owner >= 0:
            self.shares.check(owner, pin_size(ranks))
        return self._pin(item, owner, ranks)

    def _pin(self, item: Item, owner: int, ranks: Collection[int] | None) -> Pin:
        if not item.pins and not item.is_handoff:
            self._check_held(item.nbytes)
            self._pinned_bytes += item.nbytes
            self._by_use.pop(item.offset, None)
        item.pins += 1
        ticket = secrets.randbits(TICKET_BITS)
        size = pin_size(ranks)
        pin = Pin(ticket, item, owner, None if ranks is None else set(ranks), size)
        self._pins.put(owner, ticket, pin)
        if owner == PEER_OWNER:
            item.peer_pins += 1
        self.shares.add(owner, size)
        return pin

    def release(self, tickets: Iterable[int], owner: int) -> None:
        """Release tickets; those that are absent or of other owners are ignored."""
        for ticket in tickets:
            pin = self._pins.get(ticket)
            if pin is not None and pin.owner == owner:
                self._unpin(pin)

    def done(self, tickets: Iterable[int], rank: int) -> None:
        """One rank has its copies; after the last rank of a ticket it is released."""
        for ticket in tickets:
            pin = self._pins.get(ticket)
            if pin is not None and pin.ranks is not None:
                pin.ranks.discard(rank)
                if not pin.ranks:
                    self._unpin(pin)

    def holds_pins(self, owner: int) -> bool:
        """Whether a pin of `owner` is not released."""
        return self._pins.has(owner)

    def release_all(self, owner: int) -> None:
        """Release all tickets of `owner`."""
        for pin in self._pins.of(owner):
            self._unpin(pin)

    def _unpin(self, pin: Pin) -> None:
        self._pins.drop(pin.owner, pin.ticket)
        self.shares.add(pin.owner, -pin.size)
        item = pin.item
        item.pins -= 1
        if pin.owner == PEER_OWNER:
            item.peer_pins -= 1
        if item.pins:
            return
        if not item.is_handoff:
            self._pinned_bytes -= item.nbytes
        if item.gone:
            self._free(item)
            return
        if not item.is_handoff:
            item.last_used = self._clock()
            self._by_use[item.offset] = item
        self._room_came()

    # -- write

    def reserve(
        self,
        address: QualifiedKey,
        header: TensorHeader,
        *,
        origin: str,
        ttl_seconds: float | None,
        loan: bool = False,
    ) -> Item | None:
        """Memory to write into; evicts the oldest items if needed. Then commit or abandon.

        None if the address is in use, by an item that has not expired or by a reservation. `loan`:
        a copy of another node's hand-off, kept only by its pins; it uses no address, and has no
        time to live.

        Raises:
            TensorTooLarge: it exceeds the whole arena.
            Evicting: EVICTED_MAX were evicted, and more have to be.
            BufferFull: pins and reservations would exceed their share, or evicting all that may
                be evicted does not make enough room.
        """
        if not loan and (self.touch(address) or address in self._items):
            return None
        if self._allocator.rounded_bytes(header.nbytes) > self._allocator.capacity_bytes:
            raise TensorTooLarge(
                f"a tensor of {header.nbytes} bytes exceeds the arena of "
                f"{self.memory.nbytes} bytes; raise capacity_bytes"
            )
        self._check_held(header.nbytes)
        item = self._place(address, header, origin, None if loan else ttl_seconds)
        item.gone = loan
        if not loan:
            self._items[address] = item
        self._reserved_bytes += item.nbytes
        return item

    def reserve_handoff(
        self, address: QualifiedKey, header: TensorHeader, *, ttl_seconds: float, wanted: bool
    ) -> Item:
        """Memory for the next generation of a hand-off, which is found once committed. Then commit
        or abandon.

        If the share cannot hold both, an unpinned item at the same address is removed.
        `wanted`: a taker waits, so the item will not stay. It may then use the share of pins, so
        that a full share of hand-offs blocks no taker, which makes room in it.

        Raises:
            TensorTooLarge: it exceeds the share of hand-offs.
            Evicting: EVICTED_MAX were evicted, and more have to be.
            BufferFull: that share (or, if `wanted`, also that of pins) is used up, or evicting all
                that may be evicted does not make enough room; what has expired was not removed.
        """
        nbytes = self._allocator.rounded_bytes(header.nbytes)
        if nbytes > self.memory.nbytes * HANDOFF_FRACTION:
            raise TensorTooLarge(
                f"a hand-off of {nbytes} bytes exceeds half of the arena of "
                f"{self.memory.nbytes} bytes; raise capacity_bytes"
            )
        self._replace_for(address, nbytes)
        fits = self._fits_handoffs(nbytes, entry_bytes_of(address))
        if not fits:
            if not wanted:
                raise BufferFull(
                    f"hand-offs use {self._handoff_bytes} bytes of the arena of "
                    f"{self.memory.nbytes} bytes, and {self._handoff_entries_bytes} of "
                    f"{self._entries_bytes_max} for bookkeeping; {nbytes} more exceed half; wait "
                    "for takers or raise capacity_bytes"
                )
            self._check_held(nbytes)
        item = self._place(address, header, "local", ttl_seconds)
        if fits:
            item.handoff_bytes = nbytes
            self._handoff_bytes += nbytes
            self._handoff_entries_bytes += item.entry_bytes
        else:
            item.wanted_bytes = nbytes
            self._wanted_bytes += nbytes
        return item

    def commit(self, item: Item, checksum: int, owner: int) -> Pin:
        """The bytes of a reservation are complete: from now on readers find the item, unless it is
        a loan. Returns a pin for `owner`, which is never refused.

        A hand-off becomes a new generation and replaces the item at its address.
        """
        if item.is_handoff:
            replaced = self._items.get(item.address)
            if replaced is not None:
                self.remove(replaced, "replaced")
            item.generation = next(self._generations)  # in the order in which they become available
            self._items[item.address] = item
        else:
            self._reserved_bytes -= item.nbytes
        item.checksum, item.last_used, item.ready = checksum, self._clock(), True
        pin = self._pin(item, owner, None)  # within the share, as the reservation was
        if not item.gone:
            self._list(item)
        return pin

    def abandon(self, item: Item) -> None:
        """Release a reservation."""
        if not item.is_handoff:
            self._reserved_bytes -= item.nbytes
        if self._items.get(item.address) is item:
            del self._items[item.address]
        item.gone = True
        self._free(item)

    def remove(self, item: Item, reason: str) -> None:
        """Remove a complete item; its bytes stay until its last pin is released. Idempotent."""
        if item.gone:
            return
        item.gone = True
        del self._items[item.address]
        if item.expires_at is not None:
            self._expiring.discard(item.generation)
        self.local_index.remove(item.address)
        if not item.pins:
            self._free(item)
        self.on_change(item.address, reason)

    def remove_expired(self) -> bool:
        """Remove up to EXPIRED_PAGE items whose time to live is over; no look-up finds the others.
        Returns whether there was one."""
        now = self._clock()
        for count in range(EXPIRED_PAGE):
            item = self._expiring.due(now)
            if item is None:
                return count > 0
            self.remove(item, GoneReason.EXPIRED)
        return True

    def offer(self, address: QualifiedKey, header: TensorHeader) -> None:
        """There will be a hand-off at `address` once there is room for it: see `published`. Its
        generation is lower than the one it gets with room."""
        generation, now = next(self._generations), self._clock()
        offered = Item(address, header, 0, generation, "local", now, None, gone=True)
        self._offers[address] = offered
        self.on_change(address, "")

    def retract(self, address: QualifiedKey) -> None:
        """Idempotent."""
        if self._offers.pop(address, None) is not None:
            self.on_change(address, GoneReason.RETRACTED)

    # -- bytes

    def bytes_of(self, item: Item) -> memoryview:
        """The item's bytes. The caller has reserved or pinned it. Any thread."""
        return self.memory.view[item.offset : item.offset + item.nbytes]

    def close(self) -> None:
        self.memory.close()
        self.local_index.close()

    # -- room

    def _check_held(self, nbytes: int) -> None:
        """Raise BufferFull if pins and reservations would exceed their share."""
        held_bytes = self._pinned_bytes + self._reserved_bytes + self._wanted_bytes
        # An item of 0 bytes always passes; otherwise its writer could be refused the pin at commit.
        if nbytes and held_bytes and held_bytes + nbytes > self.memory.nbytes * HELD_FRACTION:
            raise BufferFull(
                f"{held_bytes} bytes are pinned or being written; {nbytes} more exceed a third of "
                f"the arena of {self.memory.nbytes} bytes; release views or raise capacity_bytes"
            )

    def may_admit(self, address: QualifiedKey, nbytes: int) -> bool:
        """Whether the share of hand-offs may have room for this one, quickly: it may replace one
        at its address. False if `reserve_handoff` would refuse it, unless it is wanted."""
        return address in self._items or self._fits_handoffs(nbytes, entry_bytes_of(address))

    def _replace_for(self, address: QualifiedKey, nbytes: int) -> None:
        """Remove an unpinned hand-off at `address` if the share holds only one of the two, unless
        there is no place for the other one even then."""
        old, entry_bytes = self._items.get(address), entry_bytes_of(address)
        if old is None or old.pins or not old.handoff_bytes:
            return
        fits_alone = self._fits_handoffs(nbytes - old.handoff_bytes, 0)
        if not fits_alone or self._fits_handoffs(nbytes, entry_bytes):
            return
        first = {old.offset: -math.inf}
        ages = chain(
            ((age, at) for at, age in first.items()),
            ((item.last_used, at) for at, item in self._by_use.items()),
        )
        window = self._allocator.eviction_window(
            nbytes, ages, lambda at: first.get(at, self._last_use(at))
        )
        self._vain.forget()  # this search was of something else
        if window is not None:
            self.remove(old, "replaced")

    def _fits_handoffs(self, nbytes: int, entry_bytes: int) -> bool:
        """Whether the share of hand-offs has room for so much more."""
        bytes_max = self.memory.nbytes * HANDOFF_FRACTION
        entries_bytes_max = self._entries_bytes_max * HANDOFF_FRACTION
        return (
            self._handoff_bytes + nbytes <= bytes_max
            and self._handoff_entries_bytes + entry_bytes <= entries_bytes_max
        )

    def _place(
        self, address: QualifiedKey, header: TensorHeader, origin: str, ttl_seconds: float | None
    ) -> Item:
        entry_bytes = entry_bytes_of(address)
        self._evict_entries(entry_bytes)
        offset = self._allocator.allocate(header.nbytes)
        if offset is None:
            offset = self._evict_for(header.nbytes)
        self._entries_bytes += entry_bytes
        now = self._clock()
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        return Item(address, header, offset, next(self._generations), origin, now, expires_at)

    def _evict_entries(self, nbytes: int) -> None:
        """Evict the items that were used least recently until `nbytes` more of entries fit."""
        while self._entries_bytes + nbytes > self._entries_bytes_max:
            oldest = next(iter(self._by_use.values()), None)
            if oldest is None:
                raise BufferFull(
                    f"the items occupy {self._entries_bytes} bytes beside the arena, of at most "
                    f"{self._entries_bytes_max}: all are pinned, hand-offs or being written; "
                    "release views or raise capacity_bytes"
                )
            self.remove(oldest, GoneReason.EVICTED)

    def _evict_for(self, nbytes: int) -> int:
        """Evict neighbours and allocate `nbytes`. Of all runs that suffice, the most recently used
        item of this one was used least recently: see `Allocator.eviction_window`."""
        window = self._window_for(nbytes)
        if window is None:
            raise BufferFull(
                f"no memory for {nbytes} bytes: everything that could be evicted is pinned or "
                "being written; release views or raise capacity_bytes"
            )
        for at in window[:EVICTED_MAX]:
            self.remove(self._by_use[at], GoneReason.EVICTED)
        if len(window) > EVICTED_MAX:
            raise Evicting(f"room for {nbytes} bytes is being made; insert it again")
        offset = self._allocator.allocate(nbytes)
        assert offset is not None, "they made the room"
        return offset

    def _window_for(self, nbytes: int) -> list[int] | None:
        """The offsets of what is to be evicted; None if there is no such window. It is searched
        for only if there may be one."""
        rounds = self._allocator.rounds
        if self._vain.covers(nbytes, rounds):
            return None
        ages = ((item.last_used, at) for at, item in self._by_use.items())
        window = self._allocator.eviction_window(nbytes, ages, self._last_use)
        if window is None:
            self._vain.add(nbytes, rounds)
        return window

    def _last_use(self, offset: int) -> float | None:
        item = self._by_use.get(offset)
        return None if item is None else item.last_used

    def _list(self, item: Item) -> None:
        """Let readers find a complete item."""
        if item.expires_at is None:
            self.local_index.add(item.address, item.header, item.offset)
        else:
            self._expiring.add(item.expires_at, item.generation, item)
        self.on_change(item.address, "")

    def _free(self, item: Item) -> None:
        self._entries_bytes -= item.entry_bytes
        if item.handoff_bytes:
            self._handoff_bytes -= item.handoff_bytes
            self._handoff_entries_bytes -= item.entry_bytes
        self._wanted_bytes -= item.wanted_bytes
        self._by_use.pop(item.offset, None)
        self._allocator.free(item.offset)
        self._room_came()

    def _room_came(self) -> None:
        self._vain.forget()
        self.on_room()
