"""The metadata of Lookup Buffer in the memory of one process: `store_url="ram://NAME"`.

An example of a store that another package adds. It has what a node needs, and nothing for commands.
Processes do not share it, so it serves a single node.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from store import (
    LOCATIONS_MAX,
    Beat,
    ClaimAnswer,
    ClaimState,
    Found,
    Location,
    MetadataStore,
    NodeInfo,
    NodeTaken,
    Publication,
    Publishing,
    Record,
    Releasing,
    StoreUnavailable,
    StoreUrlError,
    Withdrawing,
    check_namespace,
    check_node,
    check_token,
)

SWEEP_SECONDS = 10.0


def open_store(url: str, **_: object) -> MetadataStore:
    """Open a new, empty store; the entry point. Neither time-outs nor passwords matter here."""
    if not url.partition("://")[2].isalnum():
        raise StoreUrlError("a URL of this store is ram://NAME, of letters and digits")
    return RamStore()


@dataclass(frozen=True)
class _Claim:
    holder: str
    state: ClaimState
    token: str


class RamStore(MetadataStore):
    """All calls run on one loop and wait for nothing, so there is no lock."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], tuple[Record, float]] = {}
        """A record and when it ends, by namespace and key; seconds of `time.monotonic`."""
        self._claims: dict[tuple[str, str], tuple[_Claim, float]] = {}
        self._beats: dict[str, Beat] = {}
        self._infos: dict[str, NodeInfo] = {}
        self._swept_at = time.monotonic()
        self._closed = False

    async def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        for one in publishings:
            one.check()
        self._check_open()
        self._sweep()
        return [self._publish(one) for one in publishings]

    async def look_up(self, items: Sequence[tuple[str, str]]) -> list[Found]:
        for namespace, _ in items:
            check_namespace(namespace)
        self._check_open()
        return [self._record(item) for item in items]

    async def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        for one in withdrawings:
            check_namespace(one.namespace)
        self._check_open()
        return [self._withdraw(one) for one in withdrawings]

    async def claim(
        self,
        namespace: str,
        key: str,
        *,
        holder: str,
        token: str,
        state: ClaimState,
        lease_seconds: float,
    ) -> ClaimAnswer:
        check_namespace(namespace)
        check_token(token)
        self._check_open()
        now, item = time.monotonic(), (namespace, key)
        held, until = self._claims.get(item, (None, now))
        if held is None or until <= now:
            held, until = _Claim(holder, state, token), now + lease_seconds
        elif held.token == token and state is ClaimState.ENCODING:
            first = held.holder if held.state is state else holder
            held, until = _Claim(first, state, token), now + lease_seconds
        self._claims[item] = held, until
        granted = held.token == token
        return ClaimAnswer(granted, held.holder, held.state, until - now, self._record(item))

    async def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        for one in releasings:
            check_namespace(one.namespace)
        self._check_open()
        return [self._release((one.namespace, one.key), one.token) for one in releasings]

    async def beat(
        self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None
    ) -> bool:
        check_node(node, boot)
        self._check_open()
        last = self._beats.get(node)
        if last is not None and last.boot != boot and last != replacing:
            raise NodeTaken(node, last)
        self._beats[node] = Beat(boot, sequence)
        return last is not None and last.boot == boot

    async def leave(self, node: str, boot: str, *, reason: str = "stopped") -> None:
        self._check_open()
        last = self._beats.get(node)
        if last is not None and last.boot == boot:
            del self._beats[node]
            self._infos.pop(node, None)

    async def beats(self) -> dict[str, Beat]:
        self._check_open()
        return dict(self._beats)

    async def describe_node(self, info: NodeInfo) -> None:
        info.check()
        self._check_open()
        self._infos[info.node] = info

    async def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        self._check_open()
        return {node: self._infos[node] for node in nodes if node in self._infos}

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    def _sweep(self) -> None:
        """Drop what has ended, now and then."""
        now = time.monotonic()
        if now > self._swept_at + SWEEP_SECONDS:
            self._swept_at = now
            self._records = {item: one for item, one in self._records.items() if one[1] > now}
            self._claims = {item: one for item, one in self._claims.items() if one[1] > now}

    def _record(self, item: tuple[str, str]) -> Record | None:
        record, until = self._records.get(item, (None, 0.0))
        return record if until > time.monotonic() else None

    def _publish(self, one: Publishing) -> Publication:
        item = (one.record.namespace, one.record.key)
        known = self._record(item)
        if known is not None and one.sole:
            others = [at for at in known.locations if at.node != one.location.node]
            if not all(at.is_offer for at in others):
                return Publication.OWNED
            known = known if _bytes_of(known) == _bytes_of(one.record) else None
        if known is not None and _bytes_of(known) != _bytes_of(one.record):
            return Publication.CONFLICT
        outcome, changed = _with_location(known or one.record._replace(locations=()), one)
        if outcome is not Publication.FULL:
            until = self._records[item][1] if known is not None else 0.0
            self._records[item] = changed, max(until, time.monotonic() + one.ttl_seconds)
        if one.claim_token is not None:
            self._release(item, one.claim_token)
        return outcome

    def _withdraw(self, one: Withdrawing) -> bool:
        item = (one.namespace, one.key)
        record = self._record(item)
        mine = [at for at in record.locations if at.node == one.node] if record else []
        if record is None or not mine or one.exactly not in (None, mine[0]):
            return False
        left = record._replace(
            locations=tuple(at for at in record.locations if at.node != one.node),
            devices=tuple(on for on in record.devices if on.node != one.node),
        )
        if left.locations:
            self._records[item] = left, self._records[item][1]
        else:
            del self._records[item]
        return True

    def _release(self, item: tuple[str, str], token: str) -> bool:
        held, until = self._claims.get(item, (None, 0.0))
        if held is None or held.token != token or until <= time.monotonic():
            return False
        del self._claims[item]
        return True


def _bytes_of(record: Record) -> tuple[object, ...]:
    """What two records of the same bytes have in common."""
    return record.dtype, record.shape, record.nbytes, record.kind


def _with_location(record: Record, one: Publishing) -> tuple[Publication, Record]:
    """ADDED, PRESENT or FULL, and the record after it."""
    mine = next((at for at in record.locations if at.node == one.location.node), None)
    if mine is None and len(record.locations) >= LOCATIONS_MAX:
        return Publication.FULL, record
    if mine is not None and _is_newer(mine, one.location):
        return Publication.PRESENT, record
    devices = tuple(on for on in record.devices if on.node != one.location.node)
    record = record._replace(devices=devices if one.device is None else (*devices, one.device))
    if mine == one.location:
        return Publication.PRESENT, record
    others = tuple(at for at in record.locations if at != mine)
    return Publication.ADDED, record._replace(locations=(*others, one.location))


def _is_newer(known: Location, location: Location) -> bool:
    return known.boot == location.boot and known.generation > location.generation
