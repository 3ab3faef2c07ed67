"""The hand-offs of this node: who takes one, and when it is really gone.

The node that a hand-off was inserted on is its owner, and the owner alone decides. What nobody has
taken is READY. A taker gets a lease: the item is his while he copies and verifies, and gone when
his acknowledgement counts. Until then it can become READY again: he gives it back, his session
ends, or the lease does. Everybody else who wants it stands in line meanwhile.

    insert → READY ──take──► leased ──acknowledge──► gone, WON
               ▲               │
               └──give back, end of the taker, end of the lease

Runs on the loop's thread. Takers are sessions of this node and the links of other nodes.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from lookup_buffer.errors import ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.times import REMEMBERED_SECONDS
from store import GoneReason

TTL_SECONDS = 300.0
"""How long a hand-off waits for its taker where its producer said nothing."""
BYTES_PER_SECOND_MIN = 16e6
"""A lease lasts longer by the item's size: as the slowest transfer that a link puts up with."""
HANDOFF_OWNER = -3
"""Owner of the pins that keep what is leased."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """One taker's hold on one generation; `token` is the proof of it."""

    token: int
    address: QualifiedKey
    held: Held
    taker: Hashable
    seconds: float
    until: float
    won: bool = False
    end: asyncio.TimerHandle | None = None


Tell = Callable[[Lease | None], None]
"""Told the lease, or None where there is nothing to be had."""


@dataclass(slots=True, eq=False)
class Bid:
    """One who stands in line."""

    address: QualifiedKey
    taker: Hashable
    tell: Tell


@dataclass(slots=True)
class Handoffs:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    counters: Counters
    lease_seconds: float
    _leases: dict[int, Lease] = field(default_factory=dict)
    """By token. What was won stays for a while: the winner may ask twice."""
    _current: dict[QualifiedKey, Lease] = field(default_factory=dict)
    """The lease on what can be found under the address."""
    _lines: dict[QualifiedKey, deque[Bid]] = field(default_factory=dict)
    _offers: dict[QualifiedKey, list[Callable[[], None]]] = field(default_factory=dict)
    _held_back: set[QualifiedKey] = field(default_factory=set)

    # -- takers

    def take(
        self, address: QualifiedKey, taker: Hashable, tell: Tell, *, patient: bool
    ) -> Bid | None:
        """Take the item at `address`, or, if `patient`, stand in line for it.

        `tell` is called once, maybe before this returns: with a lease, or with None as soon as
        there is nothing more to wait for here. The bid is what `cancel` takes; None once told.

        Raises:
            ProtocolError: the key is shared; what has many readers is taken by none.
        """
        if not is_handoff(address[1]):
            raise ProtocolError("only a hand-off can be taken")
        bid = Bid(address, taker, tell)
        self._lines.setdefault(address, deque()).append(bid)
        self._serve(address)
        line = self._lines.get(address)
        if line is None or bid not in line:
            return None
        if patient:
            return bid
        self.cancel(bid)
        tell(None)
        return None

    def cancel(self, bid: Bid) -> None:
        """Stand in line no longer; `tell` is not called. Idempotent."""
        line = self._lines.get(bid.address)
        if line is not None and bid in line:
            line.remove(bid)
            if not line:
                del self._lines[bid.address]

    def acknowledge(self, token: int) -> bool:
        """Whether the lease was good: the item is the taker's, and gone. The same answer again for
        as long as a lease lasts, and `REMEMBERED_SECONDS`."""
        lease = self._leases.get(token)
        if lease is None:
            return False
        if lease.won:
            return True
        if self.loop.time() >= lease.until:  # this node was busy, or stopped: the timer is late
            self._give_back(lease)
            return False
        lease.won = True
        if lease.end is not None:
            lease.end.cancel()
        lease.end = self.loop.call_later(lease.seconds + REMEMBERED_SECONDS, self._over, lease)
        item = lease.held.item
        namespace, key = lease.address
        _log.info("taken: %s, generation %d, namespace %s", key, item.generation, namespace)
        self.counters.add("handoffs_taken")
        self.shelf.remove(item, GoneReason.TAKEN)
        self._let_go(lease)
        return True

    def give_back(self, token: int) -> None:
        """The taker does not want it after all. A token that is over is no error."""
        lease = self._leases.get(token)
        if lease is not None and not lease.won:
            self._give_back(lease)

    def end(self, taker: Hashable) -> None:
        """The taker is gone: what he had taken is READY again, and he stands in no line."""
        for line in list(self._lines.values()):
            for bid in [bid for bid in line if bid.taker == taker]:
                self.cancel(bid)
        for lease in [lease for lease in self._leases.values() if lease.taker == taker]:
            self.give_back(lease.token)

    # -- producers

    def hold_back(self, address: QualifiedKey) -> None:
        """Until it has `arrived` nobody is given what lies at `address`: it is not settled yet
        whether it is this node's. Who wants it stands in line."""
        self._held_back.add(address)

    def arrived(self, address: QualifiedKey) -> None:
        """There is a new generation at `address`, or what was held back there is not to be had."""
        self._held_back.discard(address)
        self._serve(address)

    def holds(self, address: QualifiedKey) -> bool:
        """Whether there is one, be it leased."""
        return self.shelf.holds(address)

    def leased(self, address: QualifiedKey) -> bool:
        """Whether somebody has it just now, so that it may come back."""
        lease = self._current.get(address)
        return lease is not None and not lease.held.item.gone

    def wanted(self, address: QualifiedKey) -> bool:
        """Whether somebody stands in line for it."""
        return address in self._lines

    def offer(
        self, address: QualifiedKey, header: TensorHeader, on_wanted: Callable[[], None]
    ) -> None:
        """Somebody has an item for `address` and no room for it: call `on_wanted` when somebody
        asks. Until `withdraw`. The store is told, for takers of other nodes."""
        self._offers.setdefault(address, []).append(on_wanted)
        self.shelf.offer(address, header)

    def withdraw(self, address: QualifiedKey, on_wanted: Callable[[], None]) -> None:
        offers = self._offers.get(address, [])
        if on_wanted in offers:
            offers.remove(on_wanted)
        if not offers:
            self._offers.pop(address, None)
            self.shelf.retract(address)
            self._serve(address)  # who waited for that offer is told that there is none

    # -- leases

    def _serve(self, address: QualifiedKey) -> None:
        """Give who is first in line what can be had, or tell all of them that there is nothing."""
        while (line := self._lines.get(address)) and address not in self._held_back:
            held = self.shelf.hold(address, HANDOFF_OWNER)
            if held is None:
                if address in self._offers:
                    for on_wanted in list(self._offers[address]):
                        on_wanted()
                    return  # it arrives, or is withdrawn
                del self._lines[address]
                for bid in line:
                    bid.tell(None)
                return
            current = self._current.get(address)
            if current is not None and current.held.item is held.item:
                self.shelf.release([held.ticket], HANDOFF_OWNER)
                return
            bid = line.popleft()
            if not line:
                del self._lines[address]
            bid.tell(self._lease(address, held, bid.taker))

    def _lease(self, address: QualifiedKey, held: Held, taker: Hashable) -> Lease:
        seconds = self.lease_seconds + held.item.nbytes / BYTES_PER_SECOND_MIN
        token = secrets.randbits(63)
        lease = Lease(token, address, held, taker, seconds, self.loop.time() + seconds)
        lease.end = self.loop.call_later(seconds, self._over, lease)
        self._leases[token] = self._current[address] = lease
        return lease

    def _over(self, lease: Lease) -> None:
        if lease.won:
            del self._leases[lease.token]
        elif lease.token in self._leases:
            self._give_back(lease)

    def _give_back(self, lease: Lease) -> None:
        del self._leases[lease.token]
        if lease.end is not None:
            lease.end.cancel()
        self.counters.add("handoffs_returned")
        self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        if self._current.get(lease.address) is lease:
            del self._current[lease.address]
        self.shelf.release([lease.held.ticket], HANDOFF_OWNER)
        self._serve(lease.address)
