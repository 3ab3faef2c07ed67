"""RedisStore: the contract on Redis (7.0 or newer) or Valkey: one server, Sentinel or a cluster.

Every write is a script or a single command on keys that share a hash tag, so that a cluster needs
no other code. Runs in whatever thread calls. Knows key names only through store.layout.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from store import layout
from store.answers import (
    Beat,
    ClaimAnswer,
    ClaimState,
    NodeInfo,
    Publication,
    Publishing,
    ServerInfo,
    Withdrawing,
)
from store.base import MetadataStore
from store.connection import Part
from store.deployment import open_topology
from store.errors import NodeTaken, StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from store.inspection import Inspection
from store.link import Link, Script
from store.mirror import Mirror
from store.record import (
    LOCATIONS_MAX,
    Record,
    check_namespace,
    check_node,
    check_token,
)
from store.url import StoreUrl

_PAGE = 1000  # keys in one round trip: about a millisecond of the server's time


class RedisStore(MetadataStore):
    """See MetadataStore.

    The first script after a start of the server takes a second round trip.
    """

    def __init__(
        self,
        address: StoreUrl,
        *,
        call_timeout_seconds: float,
        connect_timeout_seconds: float,
    ) -> None:
        self._link = Link(open_topology(address, call_timeout_seconds, connect_timeout_seconds))
        self._publish = Script("publish")
        self._withdraw = Script("withdraw")
        self._claim = Script("claim")
        self._release = Script("release")
        self._beat = Script("beat")
        self._leave = Script("leave")
        self._hits = Script("hits")
        self._stats = Script("stats")

    def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        for publishing in publishings:
            publishing.record.check()
            publishing.location.check()
        answers = self._link.run_many(self._publish, [_publish_call(one) for one in publishings])
        return [_publication(answer) for answer in answers]

    def locate(self, namespace: str, keys: Sequence[str]) -> list[Record | None]:
        check_namespace(namespace)
        found: list[Record | None] = []
        for start in range(0, len(keys), _PAGE):
            page = keys[start : start + _PAGE]
            replies = self._link.read_hashes([layout.record(namespace, key) for key in page])
            for key, fields in zip(page, replies, strict=True):
                found.append(layout.read_record(namespace, key, fields))
        return found

    def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        for one in withdrawings:
            check_namespace(one.namespace)
        answers = self._link.run_many(self._withdraw, [_withdraw_call(one) for one in withdrawings])
        return [_withdrawn(answer) for answer in answers]

    def claim(
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
        granted, current, current_state, milliseconds, fields = self._link.run(
            self._claim,
            (layout.claim(namespace, key), layout.record(namespace, key)),
            (holder, token, state.value, _milliseconds(lease_seconds)),
        )
        return ClaimAnswer(
            granted=granted == 1,
            holder=_text(current),
            state=ClaimState(_text(current_state)),
            remaining_seconds=milliseconds / 1000,
            record=layout.read_record(
                namespace, key, dict(zip(fields[::2], fields[1::2], strict=True))
            ),
        )

    def release_claim(self, namespace: str, key: str, *, token: str) -> bool:
        check_namespace(namespace)
        return bool(self._link.run(self._release, (layout.claim(namespace, key),), (token,)) == 1)

    def beat(self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None) -> bool:
        check_node(node, boot)
        replaced = f"{replacing.boot}:{replacing.sequence}" if replacing else ""
        answer = self._link.run(self._beat, (layout.NODES,), (node, boot, sequence, replaced))
        taken = layout.read_beat(answer) if isinstance(answer, bytes) else None
        if taken is not None:
            raise NodeTaken(node, taken)
        return bool(answer == 1)

    def leave(self, node: str, boot: str) -> None:
        if self._link.run(self._leave, (layout.NODES,), (node, boot)) == 1:
            # One command each: in a cluster these lie on different servers.
            self._link.batch([("UNLINK", layout.node(node)), ("UNLINK", layout.stats(node))])

    def beats(self) -> dict[str, Beat]:
        (fields,) = self._link.read_hashes([layout.NODES])
        found = ((name, layout.read_beat(value)) for name, value in fields.items())
        return {_text(name): beat for name, beat in found if beat}

    def describe_node(self, info: NodeInfo) -> None:
        check_node(info.node, info.boot)
        name = layout.node(info.node)
        fields = layout.node_fields(info)
        self._link.batch([("HSET", name, *fields), ("EXPIRE", name, layout.NODE_SECONDS)])

    def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        replies = self._link.read_hashes([layout.node(node) for node in nodes])
        found = (layout.read_node(*pair) for pair in zip(nodes, replies, strict=True))
        return {info.node: info for info in found if info}

    def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        check_namespace(fingerprint)
        if parts:
            fields = [text for pair in parts.items() for text in pair]
            self._link.batch([("HSET", layout.namespace(fingerprint), *fields)])

    def namespaces(self) -> dict[str, dict[str, str]]:
        described = {}
        for names in self._link.walk(layout.namespace("*")):
            for name, fields in zip(names, self._link.read_hashes(names), strict=True):
                parts = {_text(part): _text(value) for part, value in fields.items()}
                if parts:
                    described[_text(name).rpartition(":")[2]] = parts
        return described

    def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        check_namespace(namespace)
        head = (layout.HITS_MAX, layout.HITS_SECONDS)
        self._add(self._hits, layout.hits(namespace), head, hits)

    def hits(self, namespace: str, keys: Sequence[str]) -> list[int]:
        check_namespace(namespace)
        if not keys:
            return []
        (scores,) = self._link.batch([("ZMSCORE", layout.hits(namespace), *keys)])
        return [_hits(score) for score in scores]

    def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        self._add(self._stats, layout.stats(node), (layout.STATS_SECONDS,), counters)

    def stats(self) -> dict[str, dict[str, int]]:
        nodes = list(self.beats())
        replies = self._link.read_hashes([layout.stats(node) for node in nodes])
        found = zip(nodes, map(layout.read_counters, replies), strict=True)
        return {node: counters for node, counters in found if counters}

    def scan(self, namespace: str | None = None, *, limit: int | None = None) -> Iterator[Record]:
        if namespace is not None:
            check_namespace(namespace)
        return self._scan(namespace, limit)

    def _scan(self, namespace: str | None, limit: int | None) -> Iterator[Record]:
        left = limit
        for names in self._link.walk(layout.records(namespace)):
            for name, fields in zip(names, self._link.read_hashes(names), strict=True):
                if left is not None and left <= 0:
                    return
                record = layout.read_named_record(name, fields)
                if record:
                    left = None if left is None else left - 1
                    yield record

    def gone(self, namespace: str, key: str) -> str | None:
        check_namespace(namespace)
        (reason,) = self._link.batch([("GET", layout.gone(namespace, key))])
        return None if reason is None else _text(reason)

    def server_info(self) -> ServerInfo:
        infos = [layout.read_server_info(_text(t)) for t in self._link.each_server(("INFO",))]
        return replace(
            infos[0],
            maxmemory_bytes=sum(info.maxmemory_bytes for info in infos),
            used_memory_bytes=sum(info.used_memory_bytes for info in infos),
        )

    def failovers(self) -> int:
        return self._link.topology.failovers()

    def ping(self) -> float:
        start = time.perf_counter()
        self._link.each_server(("PING",))
        return time.perf_counter() - start

    def mirror(self, loop: asyncio.AbstractEventLoop, dialler: Executor) -> Mirror:
        """A mirror of this store's records for `loop`, on whose thread this is called.

        `dialler` is a thread or more, to connect on. Close the mirror before the store.
        """
        return Mirror(loop, self._link.topology, dialler)

    def inspection(self) -> Inspection:
        """A closer look at the servers, for people."""
        return Inspection(self._link)

    def close(self) -> None:
        self._link.close()

    def _add(
        self, script: Script, key: str, head: tuple[int, ...], counts: Mapping[str, int]
    ) -> None:
        """Run a script that takes names and increments, in pages that do not hold the server."""
        pairs = list(counts.items())
        for start in range(0, len(pairs), _PAGE):
            page = [part for pair in pairs[start : start + _PAGE] for part in pair]
            self._link.run(script, (key,), (*head, *page))


def _publish_call(publishing: Publishing) -> tuple[Sequence[str], Sequence[Part]]:
    record, location = publishing.record, publishing.location
    item = (record.namespace, record.key)
    return (
        (layout.record(*item), layout.claim(*item), layout.gone(*item)),
        (
            f"at:{location.node}",
            location.text,
            _milliseconds(publishing.ttl_seconds),
            publishing.claim_token or "",
            LOCATIONS_MAX,
            f"{record.created:.3f}",
            *layout.identity_fields(record),
        ),
    )


def _withdraw_call(withdrawing: Withdrawing) -> tuple[Sequence[str], Sequence[Part]]:
    item, exactly = (withdrawing.namespace, withdrawing.key), withdrawing.exactly
    expected = exactly.text if exactly else ""
    if exactly and exactly.node != withdrawing.node:
        expected = "another node's"  # which no location reads
    return (
        (layout.record(*item), layout.gone(*item)),
        (
            layout.key_field(withdrawing.key),
            f"at:{withdrawing.node}",
            expected,
            withdrawing.reason,
            layout.GONE_SECONDS,
        ),
    )


def _publication(answer: Any) -> Publication:
    """What one call of the script among many came to."""
    if isinstance(answer, StoreFull):
        return Publication.REFUSED
    if isinstance(answer, StoreUnavailable):
        return Publication.UNREACHED
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return Publication.CONFLICT  # something of somebody else's under our name
    if isinstance(answer, StoreError):
        raise answer
    return Publication(answer.decode())


def _withdrawn(answer: Any) -> bool | None:
    """The same for a withdrawal; None where its server was not reached."""
    if isinstance(answer, StoreUnavailable):
        return None
    if isinstance(answer, StoreCorrupt) and answer.wrong_type:
        return False
    if isinstance(answer, StoreError):
        raise answer
    return bool(answer == 1)


def _hits(score: bytes | None) -> int:
    """A score as nodes write it; by hand it may be anything, infinite too."""
    return int(min(max(float(score or 0), 0.0), 2.0**63))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
