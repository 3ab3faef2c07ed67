"""Device pools of this node's processes, and which copies they hold.

A pool belongs to a session and ends with it. A copy that a pool offers is published beside the
node's own copy and removed with that. Called by `lanes` and `desk` on the loop's thread; methods
for any thread say so.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.protocol.messages import Offer, OpenPool, Prepare, Retract, SeenPool
from store import POOLS_MAX, DeviceLocation, PoolEndpoint

KNOWN_MAX: Final = 4096
"""Bound on the keys that a pool is assumed to have received."""


@dataclass(slots=True, eq=False)
class Pool:
    """One session's pool."""

    session: Session
    lane: str
    library: str
    port: int
    id: str
    capacity_bytes: int
    receives: bool
    offers: bool
    told: set[str] = field(default_factory=set)
    """Ids of other nodes' pools that its process has received."""
    known: OrderedDict[QualifiedKey, None] = field(default_factory=OrderedDict)
    """What it received, newest last; it may have evicted some of it."""
    under_way: int = 0

    def let_go(self, tickets: list[int], keys: list[QualifiedKey]) -> None:
        """Send its process the request to drop these; see `protocol/messages.py`."""
        message = {"event": "let_go", "tickets": tickets, "keys": [list(key) for key in keys]}
        self.session.anchor.send(message)

    def tell_of(self, seen: Mapping[str, SeenPool]) -> None:
        """Send its process the changes of the fleet's pools with the same lane and library."""
        alike = (at for at in seen.values() if (at.lane, at.library) == (self.lane, self.library))
        there = [at for at in alike if at.pool not in self.told]
        gone = [pool for pool in self.told if pool not in seen]
        if there or gone:
            self.told.update(at.pool for at in there)
            self.told.difference_update(gone)
            message = {"event": "pools", "there": [list(at) for at in there], "gone": gone}
            self.session.anchor.send(message)

    def note(self, address: QualifiedKey) -> None:
        """It received this key."""
        self.known[address] = None
        self.known.move_to_end(address)
        if len(self.known) > KNOWN_MAX:
            self.known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Offered:
    pool: Pool
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
    shelf: Shelf
    publish: Callable[[QualifiedKey], None]
    """Called with copies whose publication is out of date."""
    endpoints: tuple[PoolEndpoint, ...] = ()
    """Pools from which other nodes may receive; part of the node's description. Any thread."""
    has_readers: bool = False
    """Whether one of the pools receives. Any thread."""
    _pools: dict[Session, Pool] = field(default_factory=dict)
    _offers: dict[QualifiedKey, tuple[_Offered, ...]] = field(default_factory=dict)

    def open(self, session: Session, request: OpenPool) -> None:
        """Register a session's pool; the session has none yet."""
        self._pools[session] = Pool(
            session, request.lane, request.library, request.port, request.pool,
            request.pool_bytes, request.receives, request.offers,
        )  # fmt: skip
        self._count()

    def close(self, session: Session) -> Pool | None:
        """The session is over, and its pool invalid. Returns that pool. Idempotent."""
        pool = self._pools.pop(session, None)
        if pool is not None:
            self._count()
            for address in [at for at, offers in self._offers.items() if _has(offers, pool)]:
                self._retract(address, pool)
        return pool

    def _count(self) -> None:
        pools = self._pools.values()
        self.has_readers = any(pool.receives for pool in pools)
        offering = (pool for pool in pools if pool.offers)
        named = (PoolEndpoint(pool.lane, pool.library, pool.port, pool.id) for pool in offering)
        self.endpoints = tuple(dict.fromkeys(named))[:POOLS_MAX]

    def tell_readers(self, seen: Mapping[str, SeenPool]) -> None:
        """Send the fleet's pools, by id, to the processes that receive."""
        for pool in list(self._pools.values()):  # a failed send ends the session and its pool
            if pool.receives:
                pool.tell_of(seen)

    def of(self, session: Session) -> Pool | None:
        return self._pools.get(session)

    def prepare(self, session: Session, request: Prepare) -> None:
        pool, address = self._pools.get(session), (request.namespace, request.key)
        if pool is not None and self.shelf.peek(address) is None:  # else it will not be stored
            self._put(address, _Offered(pool, request.mark, 0))

    def offer(self, session: Session, request: Offer) -> None:
        pool, address = self._pools.get(session), (request.namespace, request.key)
        item = self.shelf.peek(address)
        if pool is None:
            return
        if item is None or item.checksum != request.checksum:
            # The arena has no such copy and will not get it: the pool must drop this one, and keep
            # what is inserted next.
            self._retract(address, pool)
            pool.let_go([], [address])
            return
        known = [o for o in self._offers.get(address, ()) if o.pool is pool]
        was_published = any(o.mark == request.mark and o.stands_beside(item) for o in known)
        self._put(address, _Offered(pool, request.mark, item.generation))
        if not was_published:
            self.publish(address)

    def _put(self, address: QualifiedKey, offered: _Offered) -> None:
        others = tuple(o for o in self._offers.get(address, ()) if o.pool is not offered.pool)
        self._offers[address] = (*others, offered)

    def retract(self, session: Session, request: Retract) -> None:
        pool = self._pools.get(session)
        if pool is None:
            return
        for key in request.keys:
            address = (request.namespace, key)
            pool.known.pop(address, None)
            self._retract(address, pool)

    def _retract(self, address: QualifiedKey, pool: Pool) -> None:
        offers = self._offers.get(address, ())
        left = tuple(offered for offered in offers if offered.pool is not pool)
        if len(left) == len(offers):
            return
        if left:
            self._offers[address] = left
        else:
            del self._offers[address]
        if self.shelf.peek(address) is not None:
            self.publish(address)

    def offers(self, address: QualifiedKey) -> bool:
        """Whether a pool has a copy beside this one. Any thread."""
        return address in self._offers

    def gone(self, address: QualifiedKey) -> None:
        """The node's copy was removed: drop the copies beside it, too."""
        for offered in self._offers.pop(address, ()):
            offered.pool.let_go([], [address])

    def device_of(self, item: Item, node: str) -> DeviceLocation | None:
        """The device location to publish beside the copy `item`. Any thread."""
        for offered in self._offers.get(item.address, ()):
            if offered.stands_beside(item):
                pool = offered.pool
                return DeviceLocation(
                    node, offered.mark, pool.lane, pool.library, pool.port, pool.id
                )
        return None

    def of_readers(self, session: Session) -> list[Pool]:
        """The pools of all ranks that read for this session; empty if one of them has none."""
        seat = session.seat
        if seat is None:
            own = self._pools.get(session)
            return [own] if own is not None and own.receives else []
        by_rank: dict[int, Pool] = {}
        for pool in self._pools.values():
            other = pool.session.seat
            if other is None or other.engine_id != seat.engine_id or other.rank is None:
                continue
            if pool.receives:
                by_rank[other.rank] = pool
        return list(by_rank.values()) if len(by_rank) == seat.world_size else []


def _has(offers: tuple[_Offered, ...], pool: Pool) -> bool:
    return any(offered.pool is pool for offered in offers)
