"""Lanes, as the node manages them: transfers from a device of another node to a device of this one.

The node moves none of these bytes. If a reader's process has a device pool (see `pools`) and a
process of another node has the tensor in its own, the node requests the reader's process to
receive it. If that fails or takes too long, the bytes come over the hosts within the same call.
Called by `desk` and `prefetch` on the loop's thread.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from lookup_buffer.config import parse_tcp
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.locate import Located, Locator
from lookup_buffer.node.pools import Pool, Pools
from lookup_buffer.node.session import Session
from lookup_buffer.protocol.fields import Fallback, MaybeFallback
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.protocol.messages import OpenPool, Received
from store import DeviceLocation, Location, Record

FIRST_TICKET: Final = 1 << 62
"""Tickets of lanes start here; those of `shelf` never get so high."""
BASE_SECONDS: Final = 1.0
BYTES_PER_SECOND: Final = 100e6
"""A transfer may take BASE_SECONDS plus its size over this rate; then the bytes are fetched over
the hosts. It is bounded, since a request fits into the reader's pool."""
UNDER_WAY_MAX: Final = 64
"""Bound on the transfers to one process at a time."""
OWN: Final = -1
"""The source of a tensor that the pool already had."""


@dataclass(slots=True, eq=False)
class _Held:
    """A ticket for a tensor that one reader's pools hold or are receiving."""

    ticket: int
    owner: Session
    address: QualifiedKey
    header: TensorHeader
    pools: list[Pool]
    waiting: set[Pool]
    sources: list[tuple[Location, DeviceLocation]]
    done: "asyncio.Future[MaybeFallback]"
    deadline: asyncio.TimerHandle | None = None
    source: int = OWN
    ranks: set[int] = field(default_factory=set)
    """Ranks that have not reported done."""


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
    """A random start for each run of the node: a pool may still have tickets of an earlier run."""

    def open(self, session: Session, request: OpenPool) -> None:
        """Register a session's pool; it replaces an earlier one."""
        self.close(session)
        self.pools.open(session, request)

    def close(self, session: Session) -> None:
        """The session is over, and its pool invalid. Idempotent."""
        pool = self.pools.close(session)
        for held in [held for held in self._held.values() if pool in held.waiting]:
            self._settle(held, Fallback.ENDED)

    # -- receiving

    async def find(
        self, session: Session, addresses: Sequence[QualifiedKey]
    ) -> dict[QualifiedKey, Located]:
        """Those of `addresses` that the pools of the session's process can receive."""
        if not addresses or not self.pools.of_readers(session):
            return {}
        found = {}
        located_each = await self.locator.locate(addresses)
        pools = self.pools.of_readers(session)  # some may have closed since the call
        for address, located in zip(addresses, located_each, strict=True):
            if not _may_come(address, located, pools):
                continue
            if reason := _refused(located, pools):
                self.counters.add(f"lane_fallbacks_{reason}")
            else:
                found[address] = located
        return found

    async def receive(
        self, session: Session, address: QualifiedKey, located: Located
    ) -> dict[str, Any] | None:
        """Receive one of those that `find` returned; its entry of a prefetch, or None if the
        transfer fails."""
        pools = self.pools.of_readers(session)
        reason = _refused(located, pools)
        if not reason:
            held = self._begin(session, pools, address, located)
            try:
                if not (reason := await held.done):
                    return self._entry(held, pools[0].lane)
            finally:
                if held.waiting:  # this request was cancelled
                    self._settle(held, Fallback.ENDED)
        self.counters.add(f"lane_fallbacks_{reason}")
        return None

    def _begin(
        self, session: Session, pools: list[Pool], address: QualifiedKey, located: Located
    ) -> _Held:
        record = located.record
        assert record is not None, "checked by `find`"
        header = TensorHeader.for_tensor(record.dtype, record.shape)
        ticket, sources = next(self._tickets), _on_devices(located)
        places = [(location, device) for location, _, device in sources]
        seconds = BASE_SECONDS + header.nbytes / BYTES_PER_SECOND
        held = _Held(
            ticket, session, address, header, list(pools), set(pools), places,
            self.loop.create_future(), ranks=set(session.ranks() or ()),
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
            if ticket in self._held:  # else a send failed and ended the ticket
                pool.session.anchor.send(message)
        return held

    def received(self, session: Session, request: Received) -> None:
        """A pool's result of one transfer."""
        held, pool = self._held.get(request.ticket), self.pools.of(session)
        if held is None or pool is None or pool not in held.waiting:
            return  # too late: the request to drop it was sent
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
        if not held.done.done():  # else its request was cancelled
            held.done.set_result(reason)

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
        """See `Shelf.release`; tickets that are not of lanes are ignored."""
        for ticket in tickets:
            held = self._held.get(ticket)
            if held is not None and held.owner is session and not held.waiting:
                self._let_go(held)

    def done(self, tickets: Iterable[int], rank: int) -> None:
        """A rank has copied the tensor; the last rank ends the ticket."""
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
        """The session's process has ended, or sent Goodbye."""
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
    """Whether these pools may receive it: a tensor for devices that another pool has."""
    record = located.record
    if record is None or not _is_for_devices(record):
        return False
    known = bool(pools) and all(address in pool.known for pool in pools)
    return bool(_on_devices(located) or (known and located.sources))


def _refused(located: Located, pools: Sequence[Pool]) -> MaybeFallback:
    """Why these pools cannot receive it now (a `Fallback`); "" if they can."""
    assert located.record is not None, "checked by the caller"
    if not pools:
        return Fallback.ENDED
    if any(located.record.nbytes > pool.capacity_bytes for pool in pools):
        return Fallback.NO_ROOM
    return Fallback.BUSY if any(pool.under_way >= UNDER_WAY_MAX for pool in pools) else ""


def _is_for_devices(record: Record) -> bool:
    """Whether a device pool can hold it. The record is only a hint, so it is checked."""
    if record.kind != "tensor" or record.nbytes == 0 or record.dtype not in DTYPES:
        return False
    return TensorHeader.for_tensor(record.dtype, record.shape).nbytes == record.nbytes


def _on_devices(located: Located) -> list[tuple[Location, str, DeviceLocation]]:
    """Copies on live nodes, with the node's host and the device copy of the same bytes."""
    if located.record is None or not located.record.devices:
        return []
    beside = {device.node: device for device in located.record.devices}
    found = []
    for location, endpoint in located.sources:
        if location.node in beside:
            with suppress(ValueError):  # the endpoint is no address
                found.append((location, parse_tcp(endpoint)[0], beside[location.node]))
    return found
