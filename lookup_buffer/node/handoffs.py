"""The hand-offs that this node owns: when one has space, which taker gets it, when it is removed.

The node on which a hand-off was inserted is its owner, and the owner alone decides. An item that no
taker has is READY. A taker gets a lease: it copies and verifies, and its acknowledgement removes
the item. Until then the item becomes READY again if the taker gives it back, or if the taker's
session or the lease ends. Other takers queue meanwhile.

    insert → READY ──take──► leased ──acknowledge──► removed (WON)
               ▲               │
               └──given back, taker gone, lease expired

A hand-off is never evicted, so its insert beyond their share waits until others are taken.
Meanwhile it is offered: if its taker requests it, it may use the share of pins, because it will not
stay. So a full share blocks neither takers nor the writers they wait for. There is no order:
whatever fits is admitted. One attempt to find room may take 40 ms, so they are made one after
the other (`Turns`).

Takers are sessions of this node (`takes`) and connections of other nodes (`Askers`, admitted by
`peers`). The lease's token is what a taker acknowledges with, also a client. Everything runs on the
loop's thread.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.arena import Arena, Evicting
from lookup_buffer.node.connection import Connection, new_peers_pending
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.items import Item, Pin
from lookup_buffer.node.links import Link
from lookup_buffer.node.owned import Owned
from lookup_buffer.node.shares import Shares
from lookup_buffer.node.turns import Steps, Turns, granted
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import (
    Acknowledge,
    GiveBack,
    Holds,
    Leave,
    OwnerReply,
    Take,
    parse,
)
from lookup_buffer.times import PEER_PROGRESS_SECONDS, REMEMBERED_SECONDS
from store import GoneReason

TTL_SECONDS = 300.0
"""How long a hand-off waits for its taker, if its producer gave no time to live."""
BYTES_PER_SECOND_MIN = 16e6
"""A lease is extended by the item's size over this rate. If the item is still being sent then, over
a slow network, the lease lasts until the end of that, and as long again."""
HANDOFF_OWNER = -3
"""Owner of the pins on leased items."""
WON_MAX: Final = 16_384
"""Bound on the won leases that are remembered, of all takers: each has its key, of up to 4 KB."""
ABSENT: Final = OwnerReply("absent")
TAKES_MAX: Final = 4096
"""Bound on the queued takers of one other node."""
TAKE_BYTES: Final = 4 << 10
"""About what one of them occupies, beside the text of its key: 3 KB measured."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """One taker's lease on one generation; `token` is its id, which cannot be guessed."""

    token: int
    held: Pin
    taker: Hashable
    seconds: float
    end: asyncio.TimerHandle
    won: bool = False
    is_sent: bool = False
    """Whether it was being sent to another node when it last ran out."""

    @property
    def until(self) -> float:
        return self.end.when()


@dataclass(slots=True, eq=False)
class Arrival:
    """One insert of a hand-off, until it is settled."""

    address: QualifiedKey
    header: TensorHeader
    ttl_seconds: float | None
    until: float
    """It waits so long for room, by the loop's clock."""
    admitted: "asyncio.Future[Item]"
    """Its memory."""
    end: asyncio.TimerHandle | None = None
    """Of its wait, if it is or was offered."""
    refusal: str = ""
    """Why there was no room."""

    @property
    def nbytes(self) -> int:
        return self.header.nbytes


@dataclass(slots=True)
class Handoffs:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    counters: Counters
    lease_seconds: float
    on_offer: Callable[[QualifiedKey], None] = lambda _: None
    """Called when takers have something to wait for there, and may queue."""
    _leases: Owned[Lease] = field(default_factory=Owned)
    """By token. Won leases stay for a while, since the winner may repeat its acknowledgement."""
    _won: dict[int, Lease] = field(default_factory=dict)
    """Those of them, the oldest first."""
    _queues: "dict[QualifiedKey, OrderedDict[asyncio.Future[Lease | None], Hashable]]" = field(
        default_factory=dict
    )
    """The queued takers, and where each receives its lease: None if there is none to wait for."""
    _offers: dict[QualifiedKey, dict[Arrival, None]] = field(default_factory=dict)
    """The inserts that found no space, until they are settled."""
    _held_back: set[QualifiedKey] = field(default_factory=set)
    _turns: Turns = field(init=False)
    """Of the attempts to find space."""
    _wanted: set[QualifiedKey] = field(default_factory=set)
    """Where one of them is to be made for a taker."""
    _looking: bool = False
    """All that are offered are being tried."""
    _untried: deque[Arrival] = field(default_factory=deque)
    """Those of them that are still to be tried."""
    _refused_bytes: int | None = None
    """For so many there was no room since that began."""
    _rooms: int = 0
    """How often room came."""
    _looked_at: int = 0
    """How often it had come when that began."""

    def __post_init__(self) -> None:
        self._turns = Turns(self.loop)
        self.arena.on_room = self._room_came

    # -- takers

    def take(self, address: QualifiedKey, taker: Hashable) -> Lease | None:
        """Lease the item at `address`, if it is READY. While takers are queued it is not: they are
        served as soon as it is.

        Raises:
            ProtocolError: the key is shared; an item with many readers cannot be taken.
        """
        if not is_handoff(address[1]):
            raise ProtocolError("only a hand-off can be taken; this key has no request id")
        return self._lease(address, taker)

    async def queue(
        self, address: QualifiedKey, taker: Hashable, until: float | None = None
    ) -> Lease | None:
        """As `take`; queue as long as there is anything to wait for on this node, until `until` by
        the loop's clock.

        Raises:
            ProtocolError: see `take`.
            TimeoutError: it was queued until the deadline.
        """
        lease = self.take(address, taker)
        is_late = until is not None and self.loop.time() >= until
        if lease is not None or is_late or not self._is_awaited(address):
            return lease
        told: asyncio.Future[Lease | None] = self.loop.create_future()
        self._queues.setdefault(address, OrderedDict())[told] = taker
        try:
            return await granted(told, until, self._decline)
        finally:
            self._leave(address, told)

    def acknowledge(self, token: int, taker: Hashable | None = None) -> bool:
        """Whether the lease was valid: the item is then the taker's, and removed. Repeated
        requests get the same answer for the time of the lease and REMEMBERED_SECONDS more, unless
        WON_MAX others are won meanwhile.

        A session acknowledges only leases of its own: it is `taker`. Another node may repeat its
        acknowledgement on a new connection.
        """
        lease = self._find(token, taker)
        if lease is None or lease.won:
            return lease is not None
        if self.loop.time() >= lease.until:  # the timer is late: this node was busy or stopped
            self._give_back(lease)
            return False
        lease.won = True
        lease.end.cancel()
        lease.end = self.loop.call_later(lease.seconds + REMEMBERED_SECONDS, self._over, token)
        self._won[token] = lease
        if len(self._won) > WON_MAX:
            self._forget(next(iter(self._won.values())))
        item = lease.held.item
        namespace, key = item.address
        _log.info(
            "hand-off taken: %s, generation %d, namespace %s", key, item.generation, namespace
        )
        self.counters.add("handoffs_taken")
        self.arena.remove(item, GoneReason.TAKEN)
        self._let_go(lease)
        return True

    def give_back(self, token: int, taker: Hashable | None = None) -> None:
        """The taker declines the item. An unknown or expired token is no error. `taker`: see
        `acknowledge`."""
        lease = self._find(token, taker)
        if lease is not None and not lease.won:
            self._give_back(lease)

    def end(self, taker: Hashable) -> None:
        """The taker is gone, and its queued requests are cancelled: its leased items are READY
        again."""
        for lease in self._leases.of(taker):
            self.give_back(lease.token)

    def leased(self, address: QualifiedKey) -> bool:
        """Whether a taker has the item now, so that it may become READY again."""
        item = self.arena.peek(address)
        return item is not None and item.is_leased

    # -- producers

    async def admit(self, arrival: Arrival) -> Item:
        """Its memory. If there is no room, it is offered until there is. Call `landed` once the
        insert is settled, and its takers are served.

        Raises:
            TensorTooLarge: see `Arena.reserve_handoff`.
            BufferFull: there is no room until its deadline.
        """
        self._turns.add(Steps(partial(self._try_first, arrival)))
        return await granted(arrival.admitted, None, self.arena.abandon)

    def landed(self, arrival: Arrival) -> None:
        """End its offer, if there was one. Idempotent."""
        address = arrival.address
        offers = self._offers.get(address, {})
        if arrival not in offers:
            return
        del offers[arrival]
        if arrival.end is not None:
            arrival.end.cancel()
        if not offers:
            del self._offers[address]
            self.arena.retract(address)
            self._serve(address)  # takers that waited for this offer get None

    def hold_back(self, address: QualifiedKey) -> None:
        """Lease nothing at `address` until `arrived`: it is not yet known whether the item is
        this node's. Takers queue."""
        self._held_back.add(address)

    def arrived(self, address: QualifiedKey) -> None:
        """A new generation is available at `address`, or a held-back one is settled."""
        self._held_back.discard(address)
        self._serve(address)

    # -- space

    def _reserve(self, arrival: Arrival, *, wanted: bool) -> Item:
        """`wanted`: a taker waits for it."""
        ttl_seconds = TTL_SECONDS if arrival.ttl_seconds is None else arrival.ttl_seconds
        try:
            return self.arena.reserve_handoff(
                arrival.address, arrival.header, ttl_seconds=ttl_seconds, wanted=wanted
            )
        except BufferFull as error:
            arrival.refusal = str(error)
            raise

    def _try_first(self, arrival: Arrival) -> None:
        """Again until what has expired and what can be evicted is gone; then it is offered."""
        if arrival.admitted.done():  # it was dropped
            return
        before = self._rooms
        try:
            arrival.admitted.set_result(
                self._reserve(arrival, wanted=arrival.address in self._queues)
            )
        except BufferFull as error:
            if self.arena.remove_expired() or isinstance(error, Evicting):
                self._turns.add(Steps(partial(self._try_first, arrival)))
            elif self.loop.time() >= arrival.until:
                self._refuse(arrival)
            else:
                self._offer(arrival)
                if self._rooms > before:  # the attempt made some
                    self._begin_look()
        except LookupBufferError as error:
            arrival.admitted.set_exception(error)

    def _offer(self, arrival: Arrival) -> None:
        arrival.end = self.loop.call_at(arrival.until, self._refuse, arrival)
        self._offers.setdefault(arrival.address, {})[arrival] = None
        self.arena.offer(arrival.address, arrival.header)  # published, for takers on other nodes
        self.on_offer(arrival.address)

    def _refuse(self, arrival: Arrival) -> None:
        if not arrival.admitted.done():
            arrival.admitted.set_exception(BufferFull(arrival.refusal))

    def _try(self, arrival: Arrival, *, wanted: bool) -> bool:
        """Returns whether it waits no longer for space."""
        try:
            if not arrival.admitted.done():  # else it was admitted, refused or dropped
                arrival.admitted.set_result(self._reserve(arrival, wanted=wanted))
        except BufferFull:
            return False
        return True

    def _want(self, address: QualifiedKey) -> None:
        """A taker waits for one of those that are offered there."""
        if address not in self._wanted:
            self._wanted.add(address)
            self._turns.add(Steps(partial(self._try_wanted, address)))

    def _try_wanted(self, address: QualifiedKey) -> None:
        """The smallest, unless one is admitted already: if it has no room, none has."""
        self._wanted.discard(address)
        offers = self._offers.get(address, {})
        if not any(_is_admitted(arrival) for arrival in offers):
            waiting = (each for each in offers if not each.admitted.done())
            smallest = min(waiting, key=lambda arrival: arrival.nbytes, default=None)
            if smallest is None or self._try(smallest, wanted=True):
                return
            if self.arena.remove_expired():
                self._want(address)

    def _room_came(self) -> None:
        self._rooms += 1
        self._begin_look()

    def _begin_look(self) -> None:
        if self._offers and not self._looking:
            self._looking = True
            self._turns.add(Steps(self._look))

    def _look(self) -> None:
        """Admit what fits of all that is offered."""
        self._looked_at, self._refused_bytes = self._rooms, None
        self.arena.remove_expired()  # after which there may be room once more
        for address in self._queues:
            if address in self._offers:
                self._want(address)
        self._untried.extend(chain.from_iterable(self._offers.values()))
        self._turns.add(Steps(self._look_on))

    def _look_on(self) -> bool:
        """Returns whether there are others to try."""
        if self._untried:
            self._look_at(self._untried.popleft())
            return True
        self._looking = False
        if self._rooms > self._looked_at:
            self._begin_look()
        return False

    def _look_at(self, arrival: Arrival) -> None:
        nbytes = arrival.nbytes
        if self._refused_bytes is not None and nbytes >= self._refused_bytes:
            return  # there was no room for a smaller one
        if self.arena.may_admit(arrival.address, nbytes) and not self._try(arrival, wanted=False):
            self._refused_bytes = nbytes

    # -- leases

    def _is_awaited(self, address: QualifiedKey) -> bool:
        """Whether there is an item, leased or not, or one may come."""
        return address in self._held_back or address in self._offers or self.arena.holds(address)

    def _serve(self, address: QualifiedKey) -> None:
        """Lease the item to the first in the queue, or answer all if there is nothing to wait
        for."""
        while queue := self._queues.get(address):
            told, taker = next(iter(queue.items()))
            if not told.done():  # else its taker is being cancelled
                lease = self._lease(address, taker)
                if lease is None and self._is_awaited(address):
                    return
                told.set_result(lease)
            self._leave(address, told)

    def _leave(self, address: QualifiedKey, told: "asyncio.Future[Lease | None]") -> None:
        queue = self._queues.get(address)
        if queue is not None:
            queue.pop(told, None)
            if not queue:
                del self._queues[address]

    def _lease(self, address: QualifiedKey, taker: Hashable) -> Lease | None:
        """A lease on the item, if it is READY. If it is only offered, space is made for it soon."""
        if address in self._held_back:
            return None
        item = self.arena.touch(address)
        if item is None and address in self._offers:
            self._want(address)
        if item is None or item.is_leased:
            return None
        held, item.is_leased = self.arena.pin(item, HANDOFF_OWNER), True
        token = secrets.randbits(63)
        seconds = self.lease_seconds + item.nbytes / BYTES_PER_SECOND_MIN
        end = self.loop.call_later(seconds, self._over, token)
        lease = Lease(token, held, taker, seconds, end)
        self._leases.put(taker, token, lease)
        return lease

    def _find(self, token: int, taker: Hashable | None) -> Lease | None:
        lease = self._leases.get(token)
        return lease if lease is not None and taker in (None, lease.taker) else None

    def _over(self, token: int) -> None:
        lease = self._leases[token]
        if lease.won:
            self._forget(lease)
            return
        was_sent = lease.is_sent
        lease.is_sent = lease.held.item.peer_pins > 0
        if lease.is_sent or was_sent:  # after its last byte the taker has one more lease
            seconds = PEER_PROGRESS_SECONDS if lease.is_sent else lease.seconds
            lease.end = self.loop.call_later(seconds, self._over, token)
        else:
            self._give_back(lease)

    def _forget(self, won: Lease) -> None:
        won.end.cancel()
        del self._won[won.token]
        self._leases.drop(won.taker, won.token)

    def _decline(self, lease: Lease | None) -> None:
        if lease is not None:
            self.give_back(lease.token)

    def _give_back(self, lease: Lease) -> None:
        self._leases.drop(lease.taker, lease.token)
        lease.end.cancel()
        self.counters.add("handoffs_returned")
        self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        lease.held.item.is_leased = False
        self.arena.release([lease.held.ticket], HANDOFF_OWNER)
        self._serve(lease.held.item.address)


def _is_admitted(arrival: Arrival) -> bool:
    """Whether it has its memory: it will be there, unless its client leaves."""
    admitted = arrival.admitted
    return admitted.done() and not admitted.cancelled() and admitted.exception() is None


@dataclass(slots=True)
class Askers:
    """The other nodes whose clients take hand-offs of this one."""

    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    counters: Counters
    _takes: dict[Connection, dict[int, "asyncio.Task[None]"]] = field(default_factory=dict)
    """The queued takers of each node, by the id of their `Take`."""
    pending: Shares = field(default_factory=new_peers_pending)
    """What other nodes make this one keep, by their connections: `peers` counts here as well."""
    _turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self._turns = Turns(self.loop)

    def __len__(self) -> int:
        """The number of their connections."""
        return len(self._takes)

    def admit(self, link: Link) -> Connection:
        """Serve requests on `link` until it ends."""
        connection = Connection(
            self.loop, link.stream, self, link.macs, pending=self.pending, turns=self._turns
        )
        self._takes[connection] = {}
        return connection

    def connections(self) -> list[Connection]:
        return list(self._takes)

    def close(self) -> None:
        for connection in self.connections():
            connection.end(None)

    def message_received(self, connection: Connection, message: Any) -> None:
        match parse(message):
            case Take() as request:
                self._take(connection, request)
            case Acknowledge() as request:
                won = self.handoffs.acknowledge(request.token)
                _reply(connection, request.id, OwnerReply("won" if won else "lost"))
            case GiveBack() as request:
                self.handoffs.give_back(request.token)
            case Holds() as request:
                held = self.handoffs.arena.holds((request.namespace, request.key))
                _reply(connection, request.id, OwnerReply("present") if held else ABSENT)
            case Leave() as request:
                take = self._takes[connection].pop(request.take, None)
                if take is not None:
                    take.cancel()
                    _reply(connection, request.take, ABSENT)
            case request:
                raise ProtocolError(f"{request.op} is not a request between nodes")

    def connection_lost(self, connection: Connection, error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self.counters.add("protocol_errors")
        self._takes.pop(connection, None)
        self.handoffs.end(connection)

    def _take(self, connection: Connection, request: Take) -> None:
        takes = self._takes[connection]
        if len(takes) >= TAKES_MAX:
            raise ProtocolError(f"more than {TAKES_MAX} takers of one node are queued")
        if request.id in takes:  # it would not be counted
            raise ProtocolError("the id of a taker that is queued")
        lease = self.handoffs.take((request.namespace, request.key), connection)
        if lease is not None or not request.wait_seconds:
            _reply(connection, request.id, _granted(lease))
            return
        size = TAKE_BYTES + len(request.key)
        if not self.pending.fits(connection, size):
            raise ProtocolError("too many takers of other nodes are queued")
        take = connection.start(self._queue(connection, request))
        if take is not None:
            takes[request.id] = take
            self.pending.add(connection, size)
            take.add_done_callback(lambda _: self.pending.add(connection, -size))

    async def _queue(self, connection: Connection, request: Take) -> None:
        lease = await self.handoffs.queue((request.namespace, request.key), connection)
        self._takes[connection].pop(request.id, None)
        _reply(connection, request.id, _granted(lease))


def _reply(connection: Connection, request_id: int, reply: OwnerReply) -> None:
    connection.send({"id": request_id} | reply._asdict())


def _granted(lease: Lease | None) -> OwnerReply:
    if lease is None:
        return ABSENT
    item = lease.held.item
    return OwnerReply(
        "leased", lease.token, lease.seconds, item.generation, item.checksum, item.nbytes
    )
