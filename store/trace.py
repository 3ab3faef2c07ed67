"""Traces: everything that the servers hold about one key, to explain why it is a miss.

Used by commands for people only, never by an engine.
"""

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from store import layout, record_fields
from store.answers import Address, Claim, ClaimState, Departure, Gone, Trace
from store.base import Traces
from store.client import Client, fields_of
from store.errors import StoreCorrupt, StoreError
from store.record import check_namespace
from store.replies import Command

HOTTEST_CHARACTERS_MAX = 256 << 10
"""Of all names that `hottest` returns: two keys of vLLM in each of 1,000 namespaces."""
_PAGE = 100  # keys in one round trip, with ten commands each
_SPACES_PAGE = 32  # namespaces in one round trip: with the longest keys a reply of 2.6 MB
_NAME = re.compile(r"lb:(?:rec|claim|gone|fail):([A-Za-z0-9._-]{1,128}):\{([^{}]+)\}\Z")
_SPECIAL = re.compile(r"[*?\[\]\\]")


class RedisTraces(Traces):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def of(self, addresses: Sequence[Address]) -> list[Trace]:
        for namespace, _ in addresses:
            check_namespace(namespace)
        traces: list[Trace] = []
        for start in range(0, len(addresses), _PAGE):
            page = addresses[start : start + _PAGE]
            commands = [command for address in page for command in _commands(*address)]
            replies = await self._client.try_batch(commands)
            count = len(commands) // len(page)
            for i, address in enumerate(page):
                traces.append(_trace(*address, replies[i * count : (i + 1) * count]))
        return traces

    async def find(self, part: str) -> AsyncIterator[Address]:
        """A key whose name is a hash is found by its record only."""
        escaped = _SPECIAL.sub(lambda match: "\\" + match[0], part)
        async for names in self._client.walk(f"lb:*:{{*{escaped}*}}"):
            for name in names:
                match = _NAME.match(name.decode("utf-8", "replace"))
                if match and part in match[2] and layout.key_name(match[2]) == match[2]:
                    yield match[1], match[2]
        async for name, fields in self._client.walk_hashes(f"lb:rec:*:{{{layout.HASHED}*"):
            record = record_fields.read_named_record(name, fields)
            if record and part in record.key:
                yield record.namespace, record.key

    async def hottest(self, namespaces: Sequence[str], most: int) -> dict[Address, int]:
        found: dict[Address, int] = {}
        for start in range(0, len(namespaces), _SPACES_PAGE):
            page = namespaces[start : start + _SPACES_PAGE]
            commands: list[Command] = [
                ("ZRANGE", layout.hits(space), 0, most - 1, "REV", "WITHSCORES") for space in page
            ]
            for space, reply in zip(page, await self._client.try_batch(commands), strict=True):
                if isinstance(reply, StoreError) and not _is_foreign(reply):
                    raise reply
                for name, score in _scored([] if _is_foreign(reply) else reply):
                    found[space, name.decode("utf-8", "replace")] = layout.read_hits(score)
            found = hottest_of(found)
        return found

    async def departures(self, nodes: Sequence[str]) -> dict[str, Departure]:
        commands: list[Command] = []
        for node in nodes:
            left = layout.left(node)
            commands += [("GET", left), ("PTTL", left), ("PTTL", layout.node(node))]
        replies = await self._client.batch(commands) if commands else []
        departures = {}
        for i, node in enumerate(nodes):
            value, left_for, described_for = replies[3 * i : 3 * i + 3]
            reason, _, boot = (value or b"").decode("utf-8", "replace").partition(":")
            departures[node] = Departure(
                reason,
                boot,
                _ago(layout.LEFT_SECONDS, left_for),
                _ago(layout.NODE_SECONDS, described_for) if described_for > 0 else None,
            )
        return departures


def hottest_of(hits: Mapping[Address, int]) -> dict[Address, int]:
    """Those with the most hits, whose names have HOTTEST_CHARACTERS_MAX together."""
    left = HOTTEST_CHARACTERS_MAX
    kept = {}
    for address in sorted(hits, key=lambda one: (-hits[one], one)):
        characters = sum(map(len, address))
        if characters <= left:
            left -= characters
            kept[address] = hits[address]
    return kept


def _scored(reply: Sequence[Any]) -> Iterator[tuple[bytes, Any]]:
    """Pairs of member and score: RESP3 sends pairs, RESP2 a flat list."""
    if reply and isinstance(reply[0], list):
        yield from ((member, score) for member, score in reply)
    else:
        yield from zip(reply[::2], reply[1::2], strict=True)


def _commands(namespace: str, key: str) -> list[Command]:
    record, claim = layout.record(namespace, key), layout.claim(namespace, key)
    gone, fail = layout.gone(namespace, key), layout.fail(namespace, key)
    return [
        ("HGETALL", record), ("TYPE", record), ("PTTL", record),
        ("GET", claim), ("PTTL", claim), ("GET", gone), ("PTTL", gone),
        ("GET", fail), ("PTTL", fail), ("ZMSCORE", layout.hits(namespace), key),
    ]  # fmt: skip


def _trace(namespace: str, key: str, replies: Sequence[Any]) -> Trace:
    for reply in replies:
        if isinstance(reply, StoreError) and not _is_foreign(reply):
            raise reply
    answers: list[Any] = [None if _is_foreign(reply) else reply for reply in replies]
    hash_, kind, lives, claim, claimed_for, gone, gone_for, fail, failed_for, scores = answers
    fields = fields_of(hash_ or [])
    record = record_fields.read_record(namespace, key, fields)
    unreadable = ""
    if record is None and fields:
        unreadable = record_fields.unreadable(layout.record(namespace, key).encode(), fields)
    elif record is None and kind not in (b"none", b"hash"):  # a HASH here was written since HGETALL
        unreadable = f"a {kind.decode()}"
    return Trace(
        namespace,
        key,
        record,
        unreadable,
        max(0, lives) / 1000,
        _claim(claim, claimed_for),
        _gone(gone, gone_for),
        layout.read_failure(namespace, key, fail) if fail else None,
        _ago(layout.FAIL_SECONDS, failed_for) if fail else 0.0,
        layout.read_hits(scores[0]) if scores else 0,
    )


def _is_foreign(reply: object) -> bool:
    return isinstance(reply, StoreCorrupt) and reply.wrong_type


def _claim(value: bytes | None, milliseconds: int) -> Claim | None:
    if value is None or milliseconds <= 0:
        return None
    holder, _, rest = value.decode("utf-8", "replace").rpartition(":")[0].rpartition(":")
    try:
        return Claim(holder, ClaimState(rest), milliseconds / 1000)
    except ValueError:
        return None  # not written by a node; the next claimant overwrites it


def _gone(value: bytes | None, milliseconds: int) -> Gone | None:
    if value is None:
        return None
    reason, _, node = value.decode("utf-8", "replace").partition(":")
    return Gone(reason, node, max(0, milliseconds) / 1000)


def _ago(life_seconds: float, milliseconds: int) -> float:
    """Seconds since a key was written with a TTL of `life_seconds`, from its remaining TTL."""
    return max(0.0, life_seconds - max(0, milliseconds) / 1000)
