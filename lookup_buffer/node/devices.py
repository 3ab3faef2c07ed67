"""Device pools of this node's processes, and lanes: transfers from a device of another node to one
of this one.

A pool belongs to a session and ends with it. A copy that a pool offers is published beside the
node's own copy and removed with that. The node moves none of these bytes. If a reader's process has
a pool and a process of another node has the tensor in its own, the node requests the reader's
process to receive it. If that fails or takes too long, the bytes come over the hosts within the
same call.

`Sightings` reads other nodes' pools from their descriptions in the store, so that a reader's pool
connects to another pool when that is first seen, and not only when it needs a tensor of it (see
`device.pairs`). Only a node with a receiving pool reads, a few nodes with each beat. Called by
`server`, `prefetch` and `registrar` on the loop's thread.
"""

import asyncio
import random
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from lookup_buffer.config import parse_address
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import TICKET_BITS, Arena
from lookup_buffer.node.connection import Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.items import Item, pin_size
from lookup_buffer.node.locate import Located, Locator
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.owned import Owned
from lookup_buffer.node.shares import Shares
from lookup_buffer.node.turns import granted
from lookup_buffer.protocol.fields import Fallback, MaybeFallback
from lookup_buffer.protocol.header import DTYPES, TensorHeader
from lookup_buffer.protocol.messages import Offer, OpenPool, Prepare, Received, Retract, SeenPool
from lookup_buffer.shm.index import digest_of
from store import POOLS_MAX, DeviceLocation, Location, MetadataStore, NodeInfo, PoolEndpoint, Record

OFFERS_MAX: Final = 16_384
"""Bound on the copies that all pools offer, see `shares`: of one at most half as many."""
OFFERS_OWN: Final = 8
KNOWN_MAX: Final = 65_536
"""Bound on the keys that all pools are assumed to have received, see `shares`."""
KNOWN_OWN: Final = 8
LANE_TICKET: Final = 1 << TICKET_BITS
"""Tickets of lanes have this bit; those of `arena` do not. The others are as random: see there."""
BASE_SECONDS: Final = 1.0
BYTES_PER_SECOND: Final = 100e6
"""A transfer may take BASE_SECONDS plus its size over this rate; then the bytes are fetched over
the hosts. It is bounded, since a request fits into the reader's pool."""
UNDER_WAY_MAX: Final = 64
"""Bound on the transfers to one process at a time."""
OWN: Final = -1
"""The source of a tensor that the pool already had."""
NODES_A_BEAT: Final = 16
"""Descriptions read with one beat: bounds the load of a large fleet on the store."""
SEEN_MAX: Final = 256
"""Bound on the known pools; readers get the others from the records that name them."""
Boot = tuple[str, str]
"""A node's id and its boot id."""


@dataclass(slots=True, eq=False)
class Pool:
    """One session's pool."""

    session: Session
    opened: OpenPool
    received: Shares
    """Counts what all pools received."""
    told: set[str] = field(default_factory=set)
    """Ids of other nodes' pools that its process has received."""
    _known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Digests of what it received, newest last; it may have evicted some of it."""
    under_way: "set[_Held]" = field(default_factory=set)
    """What it is receiving."""
    offered: set[QualifiedKey] = field(default_factory=set)

    def let_go(self, tickets: list[int], keys: list[QualifiedKey]) -> None:
        """Send its process the request to drop these; see `protocol/messages.py`."""
        message = {"event": "let_go", "tickets": tickets, "keys": [list(key) for key in keys]}
        self.session.anchor.send(message)

    def tell_of(self, seen: Mapping[str, SeenPool]) -> None:
        """Send its process the changes of the fleet's pools with the same lane and library."""
        kind = (self.opened.lane, self.opened.library)
        alike = (at for at in seen.values() if (at.lane, at.library) == kind)
        there = [at for at in alike if at.pool not in self.told]
        gone = [pool for pool in self.told if pool not in seen]
        if there or gone:
            self.told.update(at.pool for at in there)
            self.told.difference_update(gone)
            message = {"event": "pools", "there": [list(at) for at in there], "gone": gone}
            self.session.anchor.send(message)

    def note(self, address: QualifiedKey) -> None:
        """It received this key. Of what is too much the oldest is forgotten."""
        self.forget(address)
        while not self.received.fits(self):
            self._known.popitem(last=False)
            self.received.add(self, -1)
        self._known[digest_of(*address)] = None
        self.received.add(self)

    def knows(self, address: QualifiedKey) -> bool:
        """Whether it received this key."""
        return digest_of(*address) in self._known

    def forget(self, address: QualifiedKey) -> None:
        """It does not have this key."""
        digest = digest_of(*address)
        if digest in self._known:
            del self._known[digest]
            self.received.add(self, -1)

    def close(self) -> None:
        self.received.add(self, -len(self._known))
        self._known.clear()


@dataclass(frozen=True, slots=True)
class _Offered:
    mark: int
    generation: int
    """The generation of the node's copy at the time of the offer. 0: of the copy that its client
    is inserting."""

    def stands_beside(self, item: Item) -> bool:
        if self.generation == 0:
            return item.origin == "local"
        return self.generation == item.generation


@dataclass(slots=True)
class Pools:
    arena: Arena
    endpoints: tuple[PoolEndpoint, ...] = ()
    """Pools from which other nodes may receive; part of the node's description."""
    has_readers: bool = False
    """Whether one of the pools receives."""
    _pools: dict[Session, Pool] = field(default_factory=dict)
    shares: Shares = field(
        default_factory=lambda: Shares("offers of a device", OFFERS_MAX, OFFERS_OWN)
    )
    _offers: dict[QualifiedKey, dict[Pool, _Offered]] = field(default_factory=dict)
    _received: Shares = field(
        default_factory=lambda: Shares("keys that a device received", KNOWN_MAX, KNOWN_OWN)
    )

    def open(self, session: Session, request: OpenPool) -> None:
        """Register a session's pool; the session has none yet."""
        self._pools[session] = Pool(session, request, self._received)
        self._count()

    def close(self, session: Session) -> Pool | None:
        """The session is over, and its pool invalid. Returns that pool. Idempotent."""
        pool = self._pools.pop(session, None)
        if pool is not None:
            pool.close()
            self._count()
            for address in list(pool.offered):
                self._retract(address, pool)
        return pool

    def _count(self) -> None:
        opened = [pool.opened for pool in self._pools.values()]
        self.has_readers = any(one.receives for one in opened)
        offering = (one for one in opened if one.offers)
        named = (PoolEndpoint(one.lane, one.library, one.port, one.pool) for one in offering)
        self.endpoints = tuple(dict.fromkeys(named))[:POOLS_MAX]

    def tell_readers(self, seen: Mapping[str, SeenPool]) -> None:
        """Send the fleet's pools, by id, to the processes that receive."""
        for pool in list(self._pools.values()):  # a failed send ends the session and its pool
            if pool.opened.receives:
                pool.tell_of(seen)

    def of(self, session: Session) -> Pool | None:
        return self._pools.get(session)

    def prepare(self, session: Session, request: Prepare) -> None:
        pool, address = self._pools.get(session), (request.namespace, request.key)
        if pool is not None and self.arena.peek(address) is None:  # else it will not be stored
            self._add(address, pool, _Offered(request.mark, 0))

    def offer(self, session: Session, request: Offer) -> None:
        pool, address = self._pools.get(session), (request.namespace, request.key)
        item = self.arena.peek(address)
        if pool is None:
            return
        if item is None or item.checksum != request.checksum:
            # The arena has no such copy and will not get it: the pool must drop this one, and keep
            # what is inserted next.
            self._retract(address, pool)
            pool.let_go([], [address])
            return
        known = self._offers.get(address, {}).get(pool)
        if not self._add(address, pool, _Offered(request.mark, item.generation)):
            pool.let_go([], [address])
        elif known is None or known.mark != request.mark or not known.stands_beside(item):
            self.arena.on_change(address, "")  # its publication is out of date

    def _add(self, address: QualifiedKey, pool: Pool, offered: _Offered) -> bool:
        """Returns whether it is offered; a pool that offers too much already does not."""
        offers = self._offers.get(address, {})
        if pool not in offers:
            if not self.shares.fits(pool):
                return False
            self.shares.add(pool)
            pool.offered.add(address)
        self._offers[address] = offers | {pool: offered}
        return True

    def retract(self, session: Session, request: Retract) -> None:
        pool = self._pools.get(session)
        if pool is None:
            return
        for key in request.keys:
            address = (request.namespace, key)
            pool.forget(address)
            self._retract(address, pool)

    def _retract(self, address: QualifiedKey, pool: Pool) -> None:
        offers = self._offers.get(address, {})
        if offers.pop(pool, None) is None:
            return
        self.shares.add(pool, -1)
        pool.offered.discard(address)
        if not offers:
            del self._offers[address]
        if self.arena.peek(address) is not None:
            self.arena.on_change(address, "")  # its publication is out of date

    def offers(self, address: QualifiedKey) -> bool:
        """Whether a pool has a copy beside this one."""
        return address in self._offers

    def gone(self, address: QualifiedKey) -> None:
        """The node's copy was removed: drop the copies beside it, too."""
        for pool in self._offers.pop(address, ()):
            self.shares.add(pool, -1)
            pool.offered.discard(address)
            pool.let_go([], [address])

    def device_of(self, item: Item, node: str) -> DeviceLocation | None:
        """The device location to publish beside the copy `item`."""
        for pool, offered in self._offers.get(item.address, {}).items():
            if offered.stands_beside(item):
                at = pool.opened
                return DeviceLocation(node, offered.mark, at.lane, at.library, at.port, at.pool)
        return None

    def of_readers(self, session: Session) -> list[Pool]:
        """The pools of all ranks that read for this session; empty if one of them has none."""
        seat = session.seat
        if seat is None:
            own = self._pools.get(session)
            return [own] if own is not None and own.opened.receives else []
        by_rank: dict[int, Pool] = {}
        for pool in self._pools.values():
            other = pool.session.seat
            if other is None or other.engine_id != seat.engine_id or other.rank is None:
                continue
            if pool.opened.receives:
                by_rank[other.rank] = pool
        return list(by_rank.values()) if len(by_rank) == seat.world_size else []


@dataclass(slots=True, eq=False)
class _Held:
    """A ticket for a tensor that one reader's pools hold or are receiving."""

    ticket: int
    owner: Session
    address: QualifiedKey
    header: TensorHeader
    pools: list[Pool]
    waiting: set[Pool]
    """Those that are receiving it."""
    sources: list[tuple[Location, str, DeviceLocation]]
    done: "asyncio.Future[MaybeFallback]"
    ranks: set[int]
    """Ranks that have not reported done."""
    size: int
    """What it counts in the share of its session's pins."""
    source: int = OWN

    def settle(self, reason: MaybeFallback) -> None:
        if not self.done.done():
            self.done.set_result(reason)


@dataclass(slots=True)
class Lanes:
    loop: asyncio.AbstractEventLoop
    boot: str
    locator: Locator
    counters: Counters
    pools: Pools
    _held: Owned[_Held] = field(default_factory=Owned)

    def open(self, session: Session, request: OpenPool) -> None:
        """Register a session's pool; it replaces an earlier one."""
        self.close(session)
        self.pools.open(session, request)

    def close(self, session: Session) -> None:
        """The session is over, and its pool invalid. Idempotent."""
        pool = self.pools.close(session)
        for held in () if pool is None else pool.under_way:
            held.settle(Fallback.ENDED)

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
        pools, record = self.pools.of_readers(session), located.record
        ranks = session.ranks()
        reason, size = _refused(located, pools), pin_size(ranks)
        if not self.pools.arena.shares.fits(session.id, size):
            reason = Fallback.BUSY
        if not reason:
            assert record is not None, "checked by `find`"
            held = _Held(
                LANE_TICKET | secrets.randbits(TICKET_BITS), session, address,
                TensorHeader.for_tensor(record.dtype, record.shape), pools, set(pools),
                _on_devices(located), self.loop.create_future(), set(ranks or ()), size,
            )  # fmt: skip
            reason = await self._receive(held, [at.checksum for at, _ in located.sources])
            if not reason:
                return self._entry(held)
        self.counters.add(f"lane_fallbacks_{reason}")
        return None

    async def _receive(self, held: _Held, checksums: Sequence[int]) -> MaybeFallback:
        """Have its pools receive it. If that fails, they drop it."""
        reason: MaybeFallback = Fallback.ENDED
        seconds = BASE_SECONDS + held.header.nbytes / BYTES_PER_SECOND
        self._held.put(held.owner, held.ticket, held)
        self.pools.arena.shares.add(held.owner.id, held.size)
        for pool in held.pools:
            pool.under_way.add(held)
        try:
            self._request(held, checksums, seconds)
            reason = await granted(held.done, self.loop.time() + seconds)
        except TimeoutError:
            reason = Fallback.TIMEOUT
        finally:
            for pool in held.waiting:
                pool.under_way.discard(held)
            held.waiting.clear()
            if held.owner.has_ended:
                reason = reason or Fallback.ENDED
            if reason:
                self._let_go(held)
        if not reason:
            self.counters.hit_lane(held.address, held.header.nbytes)
            self.counters.spare(held.owner.encodes)
        return reason

    def _request(self, held: _Held, checksums: Sequence[int], seconds: float) -> None:
        message = {
            "event": "receive",
            "id": held.ticket,
            "namespace": held.address[0],
            "key": held.address[1],
            "header": held.header.to_fields(),
            "seconds": seconds,
            "checksums": list(checksums),
            "sources": [
                [host, *device[1:], location.checksum] for location, host, device in held.sources
            ],
        }
        for pool in held.pools:
            pool.session.anchor.send(message)

    def received(self, session: Session, request: Received) -> None:
        """A pool's result of one transfer."""
        held, pool = self._held.get(request.ticket), self.pools.of(session)
        if held is None or pool is None or pool not in held.waiting or held.done.done():
            return  # too late: it is requested to drop it
        if request.reason:
            pool.forget(held.address)
            held.settle(Fallback(request.reason))
            return
        held.waiting.discard(pool)
        pool.under_way.discard(held)
        pool.note(held.address)
        if 0 <= request.source - 1 < len(held.sources):
            held.source = request.source - 1
            self.counters.add(f"lane_received_{pool.opened.lane}")
            self.counters.add(f"bytes_lane_{pool.opened.lane}", held.header.nbytes)
        if not held.waiting:
            held.settle("")

    def _entry(self, held: _Held) -> dict[str, Any]:
        source = "local" if held.source == OWN else held.sources[held.source][0].node
        return {
            "state": "resident",
            "boot": self.boot,
            "ticket": held.ticket,
            "offset": 0,
            "generation": 0,
            "header": held.header.to_fields(),
            "source": source,
            "lane": held.pools[0].opened.lane,
        }

    # -- the end of tickets

    def release(self, tickets: Iterable[int], session: Session) -> None:
        """See `Arena.release`; tickets that are not of lanes are ignored."""
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
        return self._held.has(session)

    def release_all(self, session: Session) -> None:
        """The session's process has ended, or sent Goodbye."""
        for held in self._held.of(session):
            held.settle(Fallback.ENDED)
            self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        if held.ticket not in self._held:
            return
        self._held.drop(held.owner, held.ticket)
        self.pools.arena.shares.add(held.owner.id, -held.size)
        for pool in held.pools:
            pool.let_go([held.ticket], [])


def _may_come(address: QualifiedKey, located: Located, pools: Sequence[Pool]) -> bool:
    """Whether these pools may receive it: a tensor for devices that another pool has."""
    record = located.record
    if record is None or not _is_for_devices(record):
        return False
    known = bool(pools) and all(pool.knows(address) for pool in pools)
    return bool(_on_devices(located) or (known and located.sources))


def _refused(located: Located, pools: Sequence[Pool]) -> MaybeFallback:
    """Why these pools cannot receive it now (a `Fallback`); "" if they can."""
    assert located.record is not None, "checked by the caller"
    if not pools:
        return Fallback.ENDED
    if any(located.record.nbytes > pool.opened.pool_bytes for pool in pools):
        return Fallback.NO_ROOM
    return Fallback.BUSY if any(len(pool.under_way) >= UNDER_WAY_MAX for pool in pools) else ""


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
                found.append((location, parse_address(endpoint)[0], beside[location.node]))
    return found


@dataclass(slots=True)
class Sightings:
    directory: Directory
    pools: Pools
    _turn: list[Boot] = field(default_factory=list)
    """Nodes whose descriptions are still to be read in this round, the next one last."""
    _found: dict[Boot, tuple[SeenPool, ...]] = field(default_factory=dict)
    _seen: dict[str, SeenPool] = field(default_factory=dict)

    async def look(self, store: MetadataStore) -> None:
        """Read some descriptions, and send the changes to the readers' processes.

        Raises:
            StoreError: the store did not answer.
        """
        if not self.pools.has_readers:
            self._turn, self._found, self._seen = [], {}, {}
            return
        others = self.directory.others()
        await self._read(store, others)
        self._found = {boot: pools for boot, pools in self._found.items() if boot in others}
        found = {pool.pool: pool for pools in self._found.values() for pool in pools}
        seen = {name: found.pop(name) for name in self._seen if name in found}
        self._seen = dict([*seen.items(), *found.items()][:SEEN_MAX])
        self.pools.tell_readers(self._seen)

    async def _read(self, store: MetadataStore, others: set[Boot]) -> None:
        if not self._turn:  # a random order, so that not all nodes begin with the same ones
            self._turn = random.sample(sorted(others), len(others))
        due, self._turn = self._turn[-NODES_A_BEAT:], self._turn[:-NODES_A_BEAT]
        infos = await store.node_infos([node for node, _ in due])
        for node, boot in due:
            info = infos.get(node)
            # A missing description, or another boot's, is ignored: after the store lost its data
            # it returns within a second.
            if info is not None and info.boot == boot:
                self._found[node, boot] = _pools_of(info)


def _pools_of(info: NodeInfo) -> tuple[SeenPool, ...]:
    """The pools, with the node's host as theirs."""
    try:
        host, _ = parse_address(info.endpoint)
    except ValueError:
        return ()
    return tuple(SeenPool(host, *pool) for pool in info.pools)
