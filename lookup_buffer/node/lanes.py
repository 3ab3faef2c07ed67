"""Lanes, as the node sees them: what comes here from a device elsewhere, past the hosts' memory.

The node moves none of these bytes. What readers want that have a pool on a device (see `pools`),
and another node's process has in its own, the node tells their processes to receive. Where that
fails or takes too long, the bytes come over the hosts, in the same call. On the loop's thread.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from lookup_buffer.config import parse_tcp
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.locator import Located, Locator
from lookup_buffer.node.pools import Pool, Pools
from lookup_buffer.node.session import Session
from lookup_buffer.protocol.fields import Fallback, MaybeFallback
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.protocol.messages import OpenPool, Received
from store import DeviceLocation, Location, Record

FIRST_TICKET: Final = 1 << 62
"""No ticket of a lane is less: no shelf counts so far."""
BASE_SECONDS: Final = 1.0
BYTES_PER_SECOND: Final = 100e6
"""How long the bytes may take by a lane; then they are fetched over the hosts. It has a bound: what
is asked for fits into the reader's pool."""
UNDER_WAY_MAX: Final = 64
"""Bound on what one process is asked to receive at a time."""
OWN: Final = -1
"""The source of what the pool had already."""


@dataclass(slots=True, eq=False)
class _Held:
    """A ticket: what the pools of one reader bring here, or hold."""

    ticket: int
    owner: Session
    address: QualifiedKey
    header: TensorHeader
    pools: list[Pool]
    waiting: set[Pool]
    sources: list[tuple[Location, DeviceLocation]]
    settle: Callable[["_Held", MaybeFallback], None]
    deadline: asyncio.TimerHandle | None = None
    source: int = OWN
    ranks: set[int] = field(default_factory=set)
    """That are still to say done."""


Taken = Callable[[QualifiedKey, dict[str, Any]], None]
"""Told how an entry of a prefetch stands that came by a lane."""


@dataclass(slots=True)
class Lanes:
    loop: asyncio.AbstractEventLoop
    boot: str
    locator: Locator
    counters: Counters
    pools: Pools
    _held: dict[int, _Held] = field(default_factory=dict)
    _tickets: Iterator[int] = field(
        default_factory=lambda: count(FIRST_TICKET + secrets.randbits(61))
    )
    """From somewhere else in each life of the node: a pool keeps what an earlier one promised."""

    def open(self, session: Session, request: OpenPool) -> None:
        """A session's pool; a second one of a session takes the place of its first."""
        self.close(session)
        self.pools.open(session, request)

    def close(self, session: Session) -> None:
        """The session is over, and its pool void. Idempotent."""
        pool = self.pools.close(session)
        for held in [held for held in self._held.values() if pool in held.waiting]:
            self._settle(held, Fallback.ENDED)

    # -- receiving

    def bring(
        self,
        session: Session,
        addresses: list[QualifiedKey],
        taken: Taken,
        rest: Callable[[list[QualifiedKey]], None],
    ) -> None:
        """Have those of `addresses` received that the pools of the session's process can receive:
        `taken` each; and give the others, and those that do not come, to `rest`."""
        if not addresses or not self.pools.of_readers(session):
            rest(addresses)
            return
        self.locator.ask(addresses, partial(self._located, session, addresses, taken, rest))

    def _located(
        self,
        session: Session,
        addresses: Sequence[QualifiedKey],
        taken: Taken,
        rest: Callable[[list[QualifiedKey]], None],
        found: list[Located],
    ) -> None:
        left = []
        pools = self.pools.of_readers(session)  # not all that there were before may be there now
        for address, located in zip(addresses, found, strict=True):
            if session.over or not _may_come(address, located, pools):
                left.append(address)
            elif reason := _refused(located, pools):
                self.counters.add(f"lane_fallbacks_{reason}")
                left.append(address)
            else:

                def settle(
                    held: _Held,
                    reason: MaybeFallback,
                    address: QualifiedKey = address,
                    lane: str = pools[0].lane,
                ) -> None:
                    if reason:
                        self.counters.add(f"lane_fallbacks_{reason}")
                        rest([address])
                    else:
                        taken(address, self._entry(held, lane))

                self._receive(session, pools, address, located, settle)
        if left:
            rest(left)

    def _receive(
        self,
        session: Session,
        pools: list[Pool],
        address: QualifiedKey,
        located: Located,
        settle: Callable[[_Held, MaybeFallback], None],
    ) -> None:
        record = located.record
        assert record is not None, "looked at by the caller"
        header = TensorHeader.for_tensor(record.dtype, record.shape)
        ticket, sources = next(self._tickets), _on_devices(located)
        places = [(location, device) for location, _, device in sources]
        seconds = BASE_SECONDS + header.nbytes / BYTES_PER_SECOND
        held = _Held(
            ticket, session, address, header, list(pools), set(pools), places, settle,
            ranks=set(session.ranks() or ()),
        )  # fmt: skip
        self._held[ticket] = held
        held.deadline = self.loop.call_later(seconds, self._settle, held, Fallback.TIMEOUT)
        message = {
            "event": "receive",
            "id": ticket,
            "namespace": address[0],
            "key": address[1],
            "header": header.to_fields(),
            "seconds": seconds,
            "checksums": [location.checksum for location, _ in located.sources],
            "sources": [
                [host, *device[1:], location.checksum] for location, host, device in sources
            ],
        }
        for pool in pools:
            pool.under_way += 1
        for pool in pools:
            if ticket in self._held:  # else one has gone as it was told: nobody lets go any more
                pool.session.anchor.send(message)

    def received(self, session: Session, request: Received) -> None:
        """What a pool says of one reception."""
        held, pool = self._held.get(request.ticket), self.pools.of(session)
        if held is None or pool is None or pool not in held.waiting:
            return  # it came too late, and was told to let go
        if request.reason:
            pool.known.pop(held.address, None)
            self._settle(held, Fallback(request.reason))
            return
        held.waiting.discard(pool)
        pool.under_way -= 1
        pool.note(held.address)
        if 0 <= request.source - 1 < len(held.sources):
            held.source = request.source - 1
            self.counters.add(f"lane_received_{pool.lane}")
            self.counters.add(f"bytes_lane_{pool.lane}", held.header.nbytes)
        if not held.waiting:
            self._settle(held, "")

    def _settle(self, held: _Held, reason: MaybeFallback) -> None:
        assert held.deadline is not None
        held.deadline.cancel()
        for pool in held.waiting:
            pool.under_way -= 1
        held.waiting.clear()
        if held.owner.over and not reason:
            reason = Fallback.ENDED
        if reason:
            self._let_go(held)
        else:
            self.counters.hit_lane(held.address, held.header.nbytes)
            self.counters.spare(held.owner.encodes)
        held.settle(held, reason)

    def _entry(self, held: _Held, lane: str) -> dict[str, Any]:
        source = "local" if held.source == OWN else held.sources[held.source][0].node
        return {
            "state": "resident",
            "boot": self.boot,
            "ticket": held.ticket,
            "offset": 0,
            "generation": 0,
            "header": held.header.to_fields(),
            "source": source,
            "lane": lane,
        }

    # -- the end of tickets

    def release(self, tickets: Iterable[int], session: Session) -> None:
        """See `Shelf.release`; tickets that are not of lanes are left alone."""
        for ticket in tickets:
            held = self._held.get(ticket)
            if held is not None and held.owner is session and not held.waiting:
                self._let_go(held)

    def done(self, tickets: Iterable[int], rank: int) -> None:
        """A rank has taken what it was promised; the last one ends the ticket."""
        for ticket in tickets:
            held = self._held.get(ticket)
            if held is not None and not held.waiting:
                held.ranks.discard(rank)
                if not held.ranks:
                    self._let_go(held)

    def count_tickets(self) -> int:
        return len(self._held)

    def holds(self, session: Session) -> bool:
        return any(held.owner is session for held in self._held.values())

    def release_all(self, session: Session) -> None:
        """The process of the session has ended, or said goodbye."""
        for held in [held for held in self._held.values() if held.owner is session]:
            if held.waiting:
                self._settle(held, Fallback.ENDED)
            else:
                self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        if self._held.pop(held.ticket, None) is None:
            return
        for pool in held.pools:
            pool.let_go([held.ticket], [])


def _may_come(address: QualifiedKey, located: Located, pools: Sequence[Pool]) -> bool:
    """Whether it is something that pools have, and may be received by pools."""
    record = located.record
    if record is None or not _is_for_devices(record):
        return False
    known = bool(pools) and all(address in pool.known for pool in pools)
    return bool(_on_devices(located) or (known and located.sources))


def _refused(located: Located, pools: Sequence[Pool]) -> MaybeFallback:
    """Why these pools cannot receive it now (see `lane.Fallback`), "" where they can."""
    assert located.record is not None, "looked at by the caller"
    if not pools:
        return Fallback.ENDED
    if any(located.record.nbytes > pool.capacity_bytes for pool in pools):
        return Fallback.NO_ROOM
    return Fallback.BUSY if any(pool.under_way >= UNDER_WAY_MAX for pool in pools) else ""


def _is_for_devices(record: Record) -> bool:
    """Whether it is something to hold on a device. What a record says is a hint, and checked."""
    if record.kind != "tensor" or record.nbytes == 0 or record.dtype not in DTYPES:
        return False
    return TensorHeader.for_tensor(record.dtype, record.shape).nbytes == record.nbytes


def _on_devices(located: Located) -> list[tuple[Location, str, DeviceLocation]]:
    """Copies of nodes that live, their hosts, and where on a device the same bytes are."""
    if located.record is None or not located.record.devices:
        return []
    beside = {device.node: device for device in located.record.devices}
    found = []
    for location, endpoint in located.sources:
        if location.node in beside:
            with suppress(ValueError):  # the endpoint is no address
                found.append((location, parse_tcp(endpoint)[0], beside[location.node]))
    return found
