"""InMemoryStore: the contract of `MetadataStore` in one process, without a server.

The model that the contract suites run against, and that `RedisStore` is compared with. Thread-safe:
one lock around plain dictionaries; no call waits for anything else. The scripts `publish.lua` and
`withdraw.lua` keep on a server the rules that the functions at the end of this file keep here.
"""

import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from store.answers import (
    COUNTER_MAX,
    GONE_SECONDS,
    Beat,
    ClaimAnswer,
    ClaimState,
    Failure,
    GoneReason,
    Invalidation,
    NodeInfo,
    Publication,
    Publishing,
    Releasing,
    ServerInfo,
    Withdrawing,
)
from store.base import BrowsableStore, Found
from store.blocking import BlockingStore, LoopRunner
from store.errors import NodeTaken, StoreUnavailable
from store.layout import (
    FAIL_SECONDS,
    HITS_MAX,
    HITS_SECONDS,
    INVALID_SECONDS,
    NAMESPACE_SECONDS,
    NODE_SECONDS,
    STATS_SECONDS,
)
from store.record import (
    LOCATIONS_MAX,
    DeviceLocation,
    Location,
    Record,
    check_namespace,
    check_node,
    check_token,
)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Item = tuple[str, str]  # namespace and key


class _Expiring(Generic[_Key, _Value]):
    """A dictionary whose entries expire. Sweeps keep the expired ones from being the majority."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[_Key, tuple[_Value, float]] = {}
        self._sweep_at = 1024
        self._swept_at_seconds = clock()

    def get(self, key: _Key) -> _Value | None:
        entry = self._entries.get(key)
        if entry is None or entry[1] <= self._clock():
            return None
        return entry[0]

    def remaining_seconds(self, key: _Key) -> float:
        entry = self._entries.get(key)
        return max(0.0, entry[1] - self._clock()) if entry else 0.0

    def put(self, key: _Key, value: _Value, seconds: float) -> None:
        self._entries[key] = (value, self._clock() + seconds)
        if len(self._entries) >= self._sweep_at:
            self._sweep()

    def has_room(self, entries_max: int) -> bool:
        """Whether one more fits. Sweeps once a second at most, since a sweep reads every entry."""
        if len(self._entries) >= entries_max and self._clock() >= self._swept_at_seconds + 1:
            self._sweep()
        return len(self._entries) < entries_max

    def replace(self, key: _Key, value: _Value) -> None:
        self._entries[key] = (value, self._entries[key][1])

    def drop(self, key: _Key) -> None:
        self._entries.pop(key, None)

    def items(self) -> list[tuple[_Key, _Value]]:
        now = self._clock()
        return [(key, value) for key, (value, end) in self._entries.items() if end > now]

    def _sweep(self) -> None:
        self._entries = {name: self._entries[name] for name, _ in self.items()}
        self._sweep_at = max(1024, 2 * len(self._entries))
        self._swept_at_seconds = self._clock()


@dataclass(frozen=True, slots=True)
class _Claim:
    holder: str
    state: ClaimState
    token: str


class InMemoryStore(BrowsableStore):
    """At `records_max` records a new one is REFUSED. `clock` counts seconds and never goes back."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, records_max: int = 1_000_000
    ) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._records_max = records_max
        self._records: _Expiring[_Item, Record] = _Expiring(clock)
        self._claims: _Expiring[_Item, _Claim] = _Expiring(clock)
        self._gone: _Expiring[_Item, str] = _Expiring(clock)
        self._invalid: _Expiring[str, Invalidation] = _Expiring(clock)
        self._failures: _Expiring[_Item, Failure] = _Expiring(clock)
        self._beats: dict[str, Beat] = {}
        self._infos: _Expiring[str, NodeInfo] = _Expiring(clock)
        self._namespaces: _Expiring[str, dict[str, str]] = _Expiring(clock)
        self._hits: _Expiring[str, dict[str, int]] = _Expiring(clock)
        self._stats: _Expiring[str, dict[str, int]] = _Expiring(clock)

    async def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        for publishing in publishings:
            publishing.check()
        with self._open():
            return [self._publish(publishing) for publishing in publishings]

    async def look_up(self, items: Sequence[tuple[str, str]]) -> list[Found]:
        for namespace, _ in items:
            check_namespace(namespace)
        with self._open():
            return [self._records.get(item) for item in items]

    async def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        for withdrawing in withdrawings:
            check_namespace(withdrawing.namespace)
        with self._open():
            return [self._withdraw(withdrawing) for withdrawing in withdrawings]

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
        item = (namespace, key)
        with self._open():
            held = self._claims.get(item)
            mine = held is not None and held.token == token
            if held is None or (mine and state is ClaimState.ENCODING):
                first = held.holder if held is not None and held.state is state else holder
                held, mine = _Claim(first, state, token), True
                self._claims.put(item, held, lease_seconds)
            left = self._claims.remaining_seconds(item)
            return ClaimAnswer(mine, held.holder, held.state, left, self._records.get(item))

    async def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        for releasing in releasings:
            check_namespace(releasing.namespace)
        with self._open():
            return [self._drop_claim((one.namespace, one.key), one.token) for one in releasings]

    async def beat(
        self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None
    ) -> bool:
        check_node(node, boot)
        with self._open():
            previous = self._beats.get(node)
            if previous and previous.boot != boot and previous != replacing:
                raise NodeTaken(node, previous)
            self._beats[node] = Beat(boot, sequence)
            return previous is not None and previous.boot == boot

    async def leave(self, node: str, boot: str, *, reason: str = "stopped") -> None:
        with self._open():
            previous = self._beats.get(node)
            if previous and previous.boot == boot:
                del self._beats[node]
                self._infos.drop(node)
                self._stats.drop(node)

    async def beats(self) -> dict[str, Beat]:
        with self._open():
            return dict(self._beats)

    async def describe_node(self, info: NodeInfo) -> None:
        info.check()
        with self._open():
            self._infos.put(info.node, info, NODE_SECONDS)

    async def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        with self._open():
            found = ((node, self._infos.get(node)) for node in nodes)
            return {node: info for node, info in found if info}

    async def node_ages(self, nodes: Sequence[str]) -> dict[str, float]:
        with self._open():
            left = {node: self._infos.remaining_seconds(node) for node in nodes}
            return {node: NODE_SECONDS - seconds for node, seconds in left.items() if seconds}

    async def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        check_namespace(fingerprint)
        with self._open():
            if parts:
                self._namespaces.put(fingerprint, dict(parts), NAMESPACE_SECONDS)

    async def namespaces(self) -> dict[str, dict[str, str]]:
        with self._open():
            return {name: dict(parts) for name, parts in self._namespaces.items()}

    async def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        check_namespace(namespace)
        with self._open():
            kept = self._hits.get(namespace) or {}
            for key, count in hits.items():
                kept[key] = kept.get(key, 0) + count
            most = sorted(kept.items(), key=lambda item: (item[1], item[0]), reverse=True)
            self._hits.put(namespace, dict(most[:HITS_MAX]), HITS_SECONDS)

    async def hits(self, namespace: str, keys: Sequence[str]) -> list[int]:
        check_namespace(namespace)
        with self._open():
            kept = self._hits.get(namespace) or {}
            return [kept.get(key, 0) for key in keys]

    async def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        with self._open():
            kept = self._stats.get(node) or {}
            for name, count in counters.items():
                kept[name] = min(kept.get(name, 0) + count, COUNTER_MAX)
            self._stats.put(node, kept, STATS_SECONDS)

    async def stats(self) -> dict[str, dict[str, int]]:
        with self._open():
            found = ((node, self._stats.get(node)) for node in self._beats)
            return {node: dict(counters) for node, counters in found if counters}

    async def scan(
        self, namespace: str | None = None, *, limit: int | None = None
    ) -> AsyncIterator[Record]:
        with self._open():
            found = [
                record
                for (of, _), record in self._records.items()
                if namespace is None or of == namespace
            ]
        for record in found[:limit]:
            yield record

    async def gone(self, namespace: str, key: str) -> str | None:
        check_namespace(namespace)
        with self._open():
            return self._gone.get((namespace, key))

    async def note_failures(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            check_namespace(failure.namespace)
        with self._open():
            for failure in failures:
                self._failures.put((failure.namespace, failure.key), failure, FAIL_SECONDS)

    async def failure(self, namespace: str, key: str) -> Failure | None:
        check_namespace(namespace)
        with self._open():
            return self._failures.get((namespace, key))

    async def mark_invalid(self, namespace: str, mark: Invalidation) -> None:
        check_namespace(namespace)
        mark.check()
        with self._open():
            self._invalid.put(namespace, mark, INVALID_SECONDS)

    async def invalidations(self) -> dict[str, Invalidation]:
        with self._open():
            return dict(self._invalid.items())

    async def clear(self, namespace: str) -> int:
        check_namespace(namespace)
        with self._open():
            items = [item for item, _ in self._records.items() if item[0] == namespace]
            for item in items:
                self._records.drop(item)
                self._gone.put(item, GoneReason.INVALIDATED, GONE_SECONDS)
            return len(items)

    async def server_info(self) -> ServerInfo:
        with self._open():
            return ServerInfo("memory", "", 0, 0, "noeviction", "standalone")

    def failovers(self) -> int:
        return 0

    async def ping(self) -> float:
        start = time.perf_counter()
        with self._open():
            return time.perf_counter() - start

    async def close(self) -> None:
        with self._lock:
            self._closed = True

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            yield

    def _publish(self, publishing: Publishing) -> Publication:
        record, token = publishing.record, publishing.claim_token
        item = (record.namespace, record.key)
        known = self._records.get(item)
        if known and publishing.sole:
            mine = publishing.location.node
            if any(at.node != mine and not at.is_offer for at in known.locations):
                return Publication.OWNED
            known = known if _agree(known, record) else None
        if known and not _agree(known, record):
            return Publication.CONFLICT
        if not known and not self._records.has_room(self._records_max):
            return Publication.REFUSED
        base = known or record._replace(locations=())
        outcome, changed = _with_copy(base, publishing)
        if outcome is not Publication.FULL:
            left = self._records.remaining_seconds(item) if known else 0.0
            life = max(publishing.ttl_seconds, left)
            self._records.put(item, changed, life)
            self._gone.drop(item)
        if token is not None:
            self._drop_claim(item, token)
        return outcome

    def _withdraw(self, withdrawing: Withdrawing) -> bool:
        item, node = (withdrawing.namespace, withdrawing.key), withdrawing.node
        record = self._records.get(item)
        mine = [at for at in record.locations if at.node == node] if record else []
        if not record and withdrawing.may_have_ended and self._gone.get(item) is None:
            self._gone.put(item, withdrawing.reason, withdrawing.gone_seconds)
        if not record or not mine or withdrawing.exactly not in (None, mine[0]):
            return False
        left = _without_copy(record, node)
        if left.locations:
            self._records.replace(item, left)
        else:
            self._records.drop(item)
            self._gone.put(item, withdrawing.reason, withdrawing.gone_seconds)
        return True

    def _drop_claim(self, item: _Item, token: str) -> bool:
        held = self._claims.get(item)
        if held is None or held.token != token:
            return False
        self._claims.drop(item)
        return True


def _agree(known: Record, record: Record) -> bool:
    """Whether two records of one key describe the same bytes."""
    ours, theirs = (record.dtype, record.shape), (known.dtype, known.shape)
    return (*ours, record.nbytes, record.kind) == (*theirs, known.nbytes, known.kind)


def _with_copy(record: Record, publishing: Publishing) -> tuple[Publication, Record]:
    """ADDED, PRESENT or FULL, and the record after the publication."""
    outcome, locations = _with_location(record.locations, publishing.location)
    devices = _with_device(record.devices, publishing, locations)
    return outcome, record._replace(locations=locations, devices=devices)


def _without_copy(record: Record, node: str) -> Record:
    """The record without the locations of `node`; perhaps without any location then."""
    return record._replace(
        locations=tuple(at for at in record.locations if at.node != node),
        devices=tuple(on for on in record.devices if on.node != node),
    )


def _with_location(
    known: tuple[Location, ...], location: Location
) -> tuple[Publication, tuple[Location, ...]]:
    others = tuple(at for at in known if at.node != location.node)
    if len(others) == len(known):
        if len(known) >= LOCATIONS_MAX:
            return Publication.FULL, known
    else:
        mine = next(at for at in known if at.node == location.node)
        if mine.boot == location.boot and mine.generation >= location.generation:
            return Publication.PRESENT, known
    return Publication.ADDED, (*others, location)


def _with_device(
    known: tuple[DeviceLocation, ...], publishing: Publishing, locations: tuple[Location, ...]
) -> tuple[DeviceLocation, ...]:
    """The devices; with the published one, if the published location is in the record now."""
    if publishing.location not in locations:  # an older generation
        return known
    others = tuple(on for on in known if on.node != publishing.location.node)
    return others if publishing.device is None else (*others, publishing.device)


class _AtOnce(LoopRunner):
    """Runs coroutines that wait for nothing, without a loop."""

    def run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: _Value = end.value
            return result
        raise AssertionError("it waits")

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        self.run(last)


class MemoryStore(BlockingStore):
    """An InMemoryStore for threads, as a node and its parts call a store."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(InMemoryStore(**limits))
        self._runner = _AtOnce()
