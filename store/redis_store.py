"""RedisStore: the contract on Redis (7.0 or newer) or Valkey: standalone, Sentinel or Cluster.

Every write is a script or a single command on keys that share a hash tag, so a cluster needs no
other code. Key names come from store.layout only.
"""

import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from store import calls, layout, record_fields
from store.answers import (
    GONE_SECONDS,
    INVALIDATIONS_MAX,
    NODES_MAX,
    Beat,
    ClaimAnswer,
    Claiming,
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
from store.base import BrowsableStore, Forgotten, Found
from store.client import Client, Fields, Script
from store.errors import NodeTaken, StoreCorrupt, StoreFull, StoreUnavailable
from store.inspection import RedisInspection
from store.mirror import RedisMirror
from store.mirror_claims import RedisMirrorClaims
from store.record import Record, check_namespace, check_node, check_token
from store.topology import Topology
from store.trace import RedisTraces

if TYPE_CHECKING:
    from store.replies import Command

CLOCK_JUMP_SECONDS = 30.0
_PAGE = 1000  # keys in one round trip: about a millisecond of the server's time
_DESCRIPTIONS_PAGE = 32
"""Of 64 KiB at most: a server ends a connection to which it has to send much."""


class _ServerClock:
    """Compares a server's wall clock with this host's monotonic one."""

    def __init__(self) -> None:
        self._ahead = math.inf
        self._has_jumped = False

    def note(self, server: float, here: float) -> None:
        """If the server's clock has gone over CLOCK_JUMP_SECONDS further than the one here since
        the last call (by hand, by NTP, or since another server took over), what was to expire
        within that time has expired."""
        before, self._ahead = self._ahead, server - here
        self._has_jumped |= self._ahead - before > CLOCK_JUMP_SECONDS

    def take_jump(self) -> bool:
        """Whether it has jumped ahead since this was asked last."""
        jumped, self._has_jumped = self._has_jumped, False
        return jumped


class RedisStore(BrowsableStore):
    """See MetadataStore and BrowsableStore.

    After a restart of the server, the first run of each script takes a second round trip.
    """

    has_mirror = True

    def __init__(self, topology: Topology) -> None:
        self._client = Client(topology)
        self._publish = Script("publish")
        self._withdraw = Script("withdraw")
        self._claim = Script("claim")
        self._clear = Script("clear")
        self._release = Script("release")
        self._beat = Script("beat")
        self._clock = _ServerClock()
        self._leave = Script("leave")
        self._hits = Script("hits")
        self._stats = Script("stats")

    async def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        for publishing in publishings:
            publishing.check()
        answers = await self._client.run_many(
            self._publish, list(map(calls.publish_call, publishings))
        )
        return list(map(calls.publication, answers))

    async def look_up(self, items: Sequence[tuple[str, str]]) -> list[Found]:
        for namespace, _ in items:
            check_namespace(namespace)
        found: list[Found] = []
        budget = self._client.topology.new_budget()
        for start in range(0, len(items), _PAGE):
            page = items[start : start + _PAGE]
            names = [layout.record(*item) for item in page]
            try:
                found += map(_found, page, await self._client.find_hashes(names, budget))
            except StoreUnavailable as error:
                if not found:
                    raise
                return found + [error] * (len(items) - start)
        return found

    def place_of(self, namespace: str, key: str) -> str:
        return self._client.topology.place_of(layout.record(namespace, key))

    async def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        for one in withdrawings:
            check_namespace(one.namespace)
        answers = await self._client.run_many(
            self._withdraw, list(map(calls.withdraw_call, withdrawings))
        )
        return list(map(calls.removed, answers))

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
        claiming = Claiming(namespace, key, holder, token, state, lease_seconds)
        return calls.claim_answer(
            claiming, await self._client.run(self._claim, *calls.claim_call(claiming))
        )

    async def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        for one in releasings:
            check_namespace(one.namespace)
        answers = await self._client.run_many(
            self._release, list(map(calls.release_call, releasings))
        )
        return list(map(calls.removed, answers))

    async def beat(
        self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None
    ) -> bool:
        check_node(node, boot)
        replaced = f"{replacing.boot}:{replacing.sequence}" if replacing else ""
        with _naming_key(layout.NODES):
            answer = await self._client.run(
                self._beat, (layout.NODES,), (node, boot, sequence, replaced)
            )
        taken = layout.read_beat(answer) if isinstance(answer, bytes) else None
        if taken is not None:
            raise NodeTaken(node, taken)
        return bool(answer == 1) and not self._clock.take_jump()

    async def leave(self, node: str, boot: str, *, reason: str = "stopped") -> None:
        if await self._client.run(self._leave, (layout.NODES,), (node, boot)) == 1:
            # Single commands: in a cluster these keys are on different servers.
            left = ("SET", layout.left(node), f"{reason}:{boot}", "EX", layout.LEFT_SECONDS)
            with suppress(StoreFull):  # from the SET
                await self._client.batch(
                    [("UNLINK", layout.node(node)), ("UNLINK", layout.stats(node)), left]
                )

    async def beats(self) -> dict[str, Beat]:
        return layout.read_beats(await self._client.read_some(layout.NODES, NODES_MAX))

    async def describe_node(self, info: NodeInfo) -> None:
        info.check()
        name = layout.node(info.node)
        fields = layout.node_fields(info)
        with _naming_key(name):
            _, _, expires_at = await self._client.batch(
                [
                    ("HSET", name, *fields),
                    ("EXPIRE", name, layout.NODE_SECONDS),
                    ("PEXPIRETIME", name),  # which tells the time there: a user may not ask TIME
                ]
            )
        self._clock.note(expires_at / 1000 - layout.NODE_SECONDS, time.monotonic())

    async def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        replies = await self._client.read_hashes([layout.node(node) for node in nodes])
        found = (layout.read_node(*pair) for pair in zip(nodes, replies, strict=True))
        return {info.node: info for info in found if info}

    async def node_ages(self, nodes: Sequence[str]) -> dict[str, float]:
        if not nodes:
            return {}
        left = await self._client.batch([("PTTL", layout.node(node)) for node in nodes])
        seconds = layout.NODE_SECONDS
        return {node: seconds - ms / 1000 for node, ms in zip(nodes, left, strict=True) if ms > 0}

    async def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        check_namespace(fingerprint)
        if parts:
            fields = [text for pair in parts.items() for text in pair]
            name, life = layout.namespace(fingerprint), layout.NAMESPACE_SECONDS
            commands: list[Command] = [("HSET", name, *fields), ("EXPIRE", name, life)]
            with _naming_key(name):
                *_, count = await self._client.batch([*commands, ("HLEN", name)])
                if count > len(parts):  # there are other parts, of whoever described it before
                    await self._client.batch([("UNLINK", name), *commands])

    async def namespaces(self) -> dict[str, dict[str, str]]:
        described = {}
        async for names in self._client.walk(layout.namespace("*")):
            for start in range(0, len(names), _DESCRIPTIONS_PAGE):
                page = names[start : start + _DESCRIPTIONS_PAGE]
                for name, fields in zip(page, await self._client.read_hashes(page), strict=True):
                    parts = {_text(part): _text(value) for part, value in fields.items()}
                    if parts:
                        described[_text(name).rpartition(":")[2]] = parts
        return described

    async def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        check_namespace(namespace)
        head = (layout.HITS_MAX, layout.HITS_SECONDS)
        await self._add(self._hits, layout.hits(namespace), head, hits)

    async def hits(self, namespace: str, keys: Sequence[str]) -> list[int]:
        check_namespace(namespace)
        if not keys:
            return []
        (scores,) = await self._client.batch([("ZMSCORE", layout.hits(namespace), *keys)])
        return [layout.read_hits(score) for score in scores]

    async def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        await self._add(self._stats, layout.stats(node), (layout.STATS_SECONDS,), counters)

    async def stats(self) -> dict[str, dict[str, int]]:
        nodes = list(await self.beats())
        replies = await self._client.read_hashes([layout.stats(node) for node in nodes])
        found = zip(nodes, map(layout.read_counters, replies), strict=True)
        return {node: counters for node, counters in found if counters}

    async def scan(
        self, namespace: str | None = None, *, limit: int | None = None
    ) -> AsyncIterator[Record]:
        if namespace is not None:
            check_namespace(namespace)
        count = 0
        async for name, fields in self._client.walk_hashes(layout.records(namespace)):
            if limit is not None and count >= limit:
                break
            record = record_fields.read_named_record(name, fields)
            if record is not None:
                count += 1
                yield record

    async def gone(self, namespace: str, key: str) -> str | None:
        check_namespace(namespace)
        (reason,) = await self._client.batch([("GET", layout.gone(namespace, key))])
        return None if reason is None else _text(reason).partition(":")[0]

    async def note_failures(self, failures: Sequence[Failure]) -> None:
        for one in failures:
            check_namespace(one.namespace)
        life = ("EX", layout.FAIL_SECONDS)
        await self._client.batch(
            [
                ("SET", layout.fail(one.namespace, one.key), layout.fail_value(one), *life)
                for one in failures
            ]
        )

    async def failure(self, namespace: str, key: str) -> Failure | None:
        check_namespace(namespace)
        (value,) = await self._client.batch([("GET", layout.fail(namespace, key))])
        return None if value is None else layout.read_failure(namespace, key, value)

    async def mark_invalid(self, namespace: str, mark: Invalidation) -> None:
        check_namespace(namespace)
        mark.check()
        with _naming_key(layout.INVALID):
            await self._client.batch(
                [
                    ("HSET", layout.INVALID, namespace, mark.text),
                    ("EXPIRE", layout.INVALID, layout.INVALID_SECONDS),
                ]
            )

    async def invalidations(self) -> dict[str, Invalidation]:
        fields = await self._client.read_some(layout.INVALID, INVALIDATIONS_MAX)
        return layout.read_invalidations(fields)

    async def clear(self, namespace: str) -> int:
        check_namespace(namespace)
        count = 0
        async for names in self._client.walk(layout.records(namespace)):
            records = [name.decode("ascii", "ignore") for name in names]
            pairs = [(record, layout.gone_beside(record)) for record in records]
            cleared = await self._client.run_many(
                self._clear,
                [(pair, (f"{GoneReason.INVALIDATED}:", GONE_SECONDS)) for pair in pairs],
            )
            count += sum(map(bool, map(calls.removed, cleared)))
        return count

    async def server_info(self) -> ServerInfo:
        infos = [
            layout.read_server_info(_text(t)) for t in await self._client.each_server(("INFO",))
        ]
        return replace(
            infos[0],
            maxmemory_bytes=sum(info.maxmemory_bytes for info in infos),
            used_memory_bytes=sum(info.used_memory_bytes for info in infos),
        )

    def failovers(self) -> int:
        return self._client.topology.failovers()

    async def ping(self) -> float:
        start = time.perf_counter()
        await self._client.each_server(("PING",))
        return time.perf_counter() - start

    def mirror(
        self, forgotten: Forgotten = lambda _: None
    ) -> tuple[RedisMirror, RedisMirrorClaims]:
        mirror = RedisMirror(self._client.topology, forgotten)
        return mirror, RedisMirrorClaims(mirror, self._claim, self._release)

    def traces(self) -> RedisTraces:
        return RedisTraces(self._client)

    def inspection(self) -> RedisInspection:
        return RedisInspection(self._client)

    async def close(self) -> None:
        await self._client.topology.close()

    async def _add(
        self, script: Script, key: str, head: tuple[int, ...], counts: Mapping[str, int]
    ) -> None:
        """Run a script with names and increments, in pages that do not block the server for
        long.
        """
        pairs = list(counts.items())
        for start in range(0, len(pairs), _PAGE):
            page = [part for pair in pairs[start : start + _PAGE] for part in pair]
            with _naming_key(key):
                await self._client.run(script, (key,), (*head, *page))


@contextmanager
def _naming_key(name: str) -> Iterator[None]:
    """Add the key's name to a StoreCorrupt about a foreign value: the server does not report it."""
    try:
        yield
    except StoreCorrupt as error:
        if not error.wrong_type:
            raise
        named = StoreCorrupt(
            f"store: the value at {name} was not written by us; remove it with UNLINK: {error}"
        )
        named.wrong_type = True
        raise named from error


def _found(item: tuple[str, str], fields: Fields | StoreUnavailable) -> Found:
    """The result of reading one record's HASH."""
    if isinstance(fields, StoreUnavailable):
        return fields
    return record_fields.read_record(*item, fields)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
