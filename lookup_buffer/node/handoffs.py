"""The hand-offs that this node owns: which taker gets one, and when it is removed.

The node on which a hand-off was inserted is its owner, and the owner alone decides. An item that no
taker has is READY. A taker gets a lease: it copies and verifies, and its acknowledgement removes
the item. Until then the item becomes READY again if the taker gives it back, or if the taker's
session or the lease ends. Other takers queue meanwhile.

    insert → READY ──take──► leased ──acknowledge──► removed (WON)
               ▲               │
               └──given back, taker gone, lease expired

Takers are sessions of this node (`takes`) and connections of other nodes (`Askers`). Each of
these has one connection, which identifies it; when that ends, the leases that its clients did not
acknowledge are given back. Everything runs on the loop's thread.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.links import Link
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Holds, Leave, Take, parse
from lookup_buffer.times import REMEMBERED_SECONDS
from store import GoneReason

TTL_SECONDS = 300.0
"""How long a hand-off waits for its taker, if its producer gave no time to live."""
BYTES_PER_SECOND_MIN = 16e6
"""A lease is extended by the item's size over this rate: that of the slowest transfer that is
accepted."""
HANDOFF_OWNER = -3
"""Owner of the pins on leased items."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """One taker's lease on one generation; `token` is the lease id."""

    token: int
    address: QualifiedKey
    held: Held
    taker: Hashable
    seconds: float
    until: float
    won: bool = False
    end: asyncio.TimerHandle | None = None


Tell = Callable[[Lease | None], None]
"""Called with the lease, or with None if there is no item to wait for."""


@dataclass(slots=True, eq=False)
class Bid:
    """A queued taker."""

    address: QualifiedKey
    taker: Hashable
    tell: Tell
    is_gone: Callable[[], bool] = lambda: False
    """Whether its taker is being cancelled, and is to be skipped."""


@dataclass(slots=True)
class Handoffs:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    counters: Counters
    lease_seconds: float
    _leases: dict[int, Lease] = field(default_factory=dict)
    """By lease id. Won leases stay for a while, since the winner may repeat its acknowledgement."""
    _current: dict[QualifiedKey, Lease] = field(default_factory=dict)
    """The lease on the item that is found at the address."""
    _lines: dict[QualifiedKey, deque[Bid]] = field(default_factory=dict)
    _offers: dict[QualifiedKey, list[Callable[[], object]]] = field(default_factory=dict)
    _held_back: set[QualifiedKey] = field(default_factory=set)

    # -- takers

    def take(
        self,
        address: QualifiedKey,
        taker: Hashable,
        tell: Tell,
        *,
        patient: bool,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Bid | None:
        """Take the item at `address`, or queue for it if `patient`.

        `tell` is called once, perhaps before this returns: with a lease, or with None as soon as
        there is nothing to wait for on this node. Returns the bid for `cancel`; None if `tell` was
        called.

        Raises:
            ProtocolError: the key is shared; an item with many readers cannot be taken.
        """
        if not is_handoff(address[1]):
            raise ProtocolError("only a hand-off can be taken; this key has no request id")
        bid = Bid(address, taker, tell, is_gone)
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

    def take_now(self, address: QualifiedKey, taker: Hashable) -> Lease | None:
        """As `take`, without queueing."""
        leases: list[Lease | None] = []
        self.take(address, taker, leases.append, patient=False)
        return leases[0]

    async def take_queued(self, address: QualifiedKey, taker: Hashable) -> Lease | None:
        """As `take`; queue until there is nothing to wait for on this node."""
        told: asyncio.Future[Lease | None] = self.loop.create_future()
        tell = partial(self._tell, told)
        bid = self.take(address, taker, tell, patient=True, is_gone=told.done)
        try:
            return await told
        except asyncio.CancelledError:
            if bid is not None:
                self.cancel(bid)
            if not told.cancelled():
                self._give_back_told(told.result())
            raise

    def _tell(self, told: "asyncio.Future[Lease | None]", lease: Lease | None) -> None:
        if told.done():  # its taker is being cancelled
            self._give_back_told(lease)
        else:
            told.set_result(lease)

    def _give_back_told(self, lease: Lease | None) -> None:
        if lease is not None:
            self.give_back(lease.token)

    def cancel(self, bid: Bid) -> None:
        """Leave the queue; `tell` is not called. Idempotent."""
        line = self._lines.get(bid.address)
        if line is not None and bid in line:
            line.remove(bid)
            if not line:
                del self._lines[bid.address]

    def acknowledge(self, token: int) -> bool:
        """Whether the lease was valid: the item is then the taker's, and removed. Repeated
        requests get the same answer for the time of the lease and REMEMBERED_SECONDS more."""
        lease = self._leases.get(token)
        if lease is None:
            return False
        if lease.won:
            return True
        if (
            self.loop.time() >= lease.until
        ):  # the timer is late, because this node was busy or stopped
            self._give_back(lease)
            return False
        lease.won = True
        if lease.end is not None:
            lease.end.cancel()
        lease.end = self.loop.call_later(lease.seconds + REMEMBERED_SECONDS, self._over, lease)
        item = lease.held.item
        namespace, key = lease.address
        _log.info(
            "hand-off taken: %s, generation %d, namespace %s", key, item.generation, namespace
        )
        self.counters.add("handoffs_taken")
        self.shelf.remove(item, GoneReason.TAKEN)
        self._let_go(lease)
        return True

    def give_back(self, token: int) -> None:
        """The taker declines the item. An unknown or expired lease id is no error."""
        lease = self._leases.get(token)
        if lease is not None and not lease.won:
            self._give_back(lease)

    def end(self, taker: Hashable) -> None:
        """The taker is gone: its leased items are READY again, and its bids are cancelled."""
        for line in list(self._lines.values()):
            for bid in [bid for bid in line if bid.taker == taker]:
                self.cancel(bid)
        for lease in [lease for lease in self._leases.values() if lease.taker == taker]:
            self.give_back(lease.token)

    # -- producers

    def hold_back(self, address: QualifiedKey) -> None:
        """Lease nothing at `address` until `arrived`: it is not yet known whether the item is
        this node's. Takers queue."""
        self._held_back.add(address)

    def arrived(self, address: QualifiedKey) -> None:
        """A new generation is available at `address`, or a held-back one is settled."""
        self._held_back.discard(address)
        self._serve(address)

    def holds(self, address: QualifiedKey) -> bool:
        """Whether there is an item, leased or not."""
        return self.shelf.holds(address)

    def concerns(self, address: QualifiedKey) -> bool:
        """Whether there is an item, an offer, or a taker in the queue."""
        return address in self._offers or address in self._lines or self.shelf.holds(address)

    def leased(self, address: QualifiedKey) -> bool:
        """Whether a taker has the item now, so that it may become READY again."""
        lease = self._current.get(address)
        return lease is not None and not lease.held.item.gone

    def wanted(self, address: QualifiedKey) -> bool:
        """Whether a taker is queued for it."""
        return address in self._lines

    def offer(
        self, address: QualifiedKey, header: TensorHeader, on_wanted: Callable[[], object]
    ) -> None:
        """An insert for `address` waits for space: call `on_wanted` when a taker requests it, until
        `withdraw`. The offer is published for takers on other nodes."""
        self._offers.setdefault(address, []).append(on_wanted)
        self.shelf.offer(address, header)

    def withdraw(self, address: QualifiedKey, on_wanted: Callable[[], object]) -> None:
        offers = self._offers.get(address, [])
        if on_wanted in offers:
            offers.remove(on_wanted)
        if not offers:
            self._offers.pop(address, None)
            self.shelf.retract(address)
            self._serve(address)  # takers that waited for this offer get None

    # -- leases

    def _serve(self, address: QualifiedKey) -> None:
        """Lease the item to the first in the queue, or call all with None if there is nothing to
        wait for."""
        while (line := self._lines.get(address)) and address not in self._held_back:
            if line[0].is_gone():
                self.cancel(line[0])
                continue
            held = self.shelf.hold(address, HANDOFF_OWNER)
            if held is None:
                if address in self._offers:
                    for on_wanted in list(self._offers[address]):
                        on_wanted()
                    return  # the insert is admitted, or its offer withdrawn
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


BIDS_MAX: Final = 4096
"""Bound on the queued takers of one other node."""


@dataclass(slots=True)
class Askers:
    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    counters: Counters
    _takes: dict[Connection, dict[int, "asyncio.Task[None]"]] = field(default_factory=dict)
    """The queued takers of each node, by the id of their `Take`."""

    def admit(self, link: Link, on_end: Callable[[], None]) -> Connection:
        """Serve requests on `link` until it ends; then call `on_end`."""

        def ended(connection: Connection, error: LookupBufferError | None) -> None:
            if isinstance(error, ProtocolError):
                self.counters.add("protocol_errors")
            self._takes.pop(connection, None)
            self.handoffs.end(connection)
            on_end()

        connection = Connection(self.loop, link.stream, self._on_message, ended, link.macs)
        self._takes[connection] = {}
        return connection

    def close(self) -> None:
        for connection in list(self._takes):
            connection.end(None)

    def _on_message(self, connection: Connection, message: Any) -> None:
        match parse(message):
            case Take() as request:
                self._take(connection, request)
            case Acknowledge() as request:
                won = self.handoffs.acknowledge(request.token)
                connection.send({"id": request.id, "state": "won" if won else "lost"})
            case GiveBack() as request:
                self.handoffs.give_back(request.token)
            case Holds() as request:
                held = self.handoffs.holds((request.namespace, request.key))
                connection.send({"id": request.id, "state": "present" if held else "absent"})
            case Leave() as request:
                take = self._takes[connection].pop(request.take, None)
                if take is not None:
                    take.cancel()
                    connection.send({"id": request.take, "state": "absent"})
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    def _take(self, connection: Connection, request: Take) -> None:
        takes, address = self._takes[connection], (request.namespace, request.key)
        if len(takes) >= BIDS_MAX:
            raise ProtocolError(f"more than {BIDS_MAX} takers of one node are queued")
        lease = self.handoffs.take_now(address, connection)
        if lease is not None or not request.wait_seconds:
            _tell(connection, request, lease)
            return
        take = connection.start(self._queue(connection, request))
        if take is not None:
            takes[request.id] = take

    async def _queue(self, connection: Connection, request: Take) -> None:
        address = (request.namespace, request.key)
        lease = await self.handoffs.take_queued(address, connection)
        self._takes[connection].pop(request.id, None)
        _tell(connection, request, lease)


def _tell(connection: Connection, request: Take, lease: Lease | None) -> None:
    if lease is None:
        connection.send({"id": request.id, "state": "absent"})
        return
    item = lease.held.item
    connection.send(
        {
            "id": request.id,
            "state": "leased",
            "token": lease.token,
            "lease_seconds": lease.seconds,
            "generation": item.generation,
            "checksum": item.checksum,
            "nbytes": item.nbytes,
        }
    )
