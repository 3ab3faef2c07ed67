"""Inspection: checks of the servers behind a store, for `doctor`.

Changes no data that others read.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Final

from store import layout, record_fields
from store.answers import Examined, Refused
from store.base import Inspection
from store.client import Client
from store.errors import StoreRefused
from store.replies import (
    REFUSALS,
    Command,
    Reply,
    code_of,
    text_of,
)
from store.server import Server
from store.tracking import TRACK, dial_tracked

_PROBE = "lb:doctor"
_SCRIPT = "return 1"

# Every command that the store and its scripts send, in an order that leaves nothing behind. (A
# script may do what its caller may do.)
PROBES: tuple[Command, ...] = (
    ("PING",),
    ("INFO", "server"),
    ("SCAN", 0, "MATCH", _PROBE, "COUNT", 1),
    ("TYPE", _PROBE),
    ("EXISTS", _PROBE),
    ("HSET", _PROBE, "field", 1),
    ("HINCRBY", _PROBE, "field", 1),
    ("HGET", _PROBE, "field"),
    ("HGETALL", _PROBE),
    ("HKEYS", _PROBE),
    ("HLEN", _PROBE),
    ("HSCAN", _PROBE, 0, "COUNT", 1),
    ("HDEL", _PROBE, "field"),
    ("ZINCRBY", _PROBE, 1, "member"),
    ("ZMSCORE", _PROBE, "member"),
    ("ZRANGE", _PROBE, 0, 0, "REV"),
    ("ZREMRANGEBYRANK", _PROBE, 0, 0),
    ("SET", _PROBE, 1, "EX", 1),
    ("GET", _PROBE),
    ("PTTL", _PROBE),
    ("EXPIRE", _PROBE, 1),
    ("PEXPIRE", _PROBE, 1000),
    ("PEXPIRETIME", _PROBE),
    ("DEL", _PROBE),
    ("UNLINK", _PROBE),
    ("EVAL", _SCRIPT, 1, _PROBE),
    ("EVALSHA", hashlib.sha1(_SCRIPT.encode()).hexdigest(), 1, _PROBE),
)
_READS: Final = frozenset(
    (
        *("PING", "INFO", "SCAN", "TYPE", "EXISTS", "GET", "PTTL", "PEXPIRETIME"),
        *("HGET", "HGETALL", "HKEYS", "HLEN", "HSCAN", "ZMSCORE", "ZRANGE"),
    )
)


class RedisInspection(Inspection):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def refused(self, *, read_only: bool = False, mirrored: bool = True) -> Refused | None:
        probes = [one for one in PROBES if not read_only or one[0] in _READS]
        tracking = [TRACK] if mirrored else []
        reasons: dict[str, str] = {}
        topology = self._client.topology
        for server in await topology.servers(topology.new_budget()):
            replies = [*await server.exchange(probes)]
            replies += [await _try_tracking(server) for _ in tracking]
            for command, reply in zip(probes + tracking, replies, strict=True):
                # Other errors are ignored: another server of a cluster holds that key, or a full
                # server refuses to write.
                if isinstance(reply, REFUSALS) and (
                    code_of(reply) == "NOPERM" or "unknown" in str(reply).lower()
                ):
                    reasons.setdefault(_name(command), text_of(reply))
        return Refused(tuple(reasons), next(iter(reasons.values()))) if reasons else None

    async def allowed_beyond_reads(self, *, mirrored: bool) -> Sequence[str]:
        refused = await self.refused()
        names = dict.fromkeys(map(_name, (*PROBES, TRACK)))
        needed = {*_READS, _name(TRACK)} if mirrored else _READS
        denied = {*needed, *(refused.commands if refused else ())}
        return [name for name in names if name not in denied]

    async def clock_ahead_seconds(self) -> float | None:
        """None if a server denies TIME: no node needs it, and few users have the right."""
        asked_at = time.time()
        try:
            replies = await self._client.each_server(("TIME",))
        except StoreRefused:
            return None
        now = (asked_at + time.time()) / 2
        return max((int(s) + int(us) / 1e6 - now for s, us in replies), key=abs)

    async def foreign_nodes(self) -> Mapping[str, str]:
        names = [layout.NODES.encode()]
        async for page in self._client.walk(layout.node("*")):
            names += page
        types = await self._client.batch([("TYPE", name) for name in names])
        return {
            name.decode("utf-8", "replace"): kind.decode()
            for name, kind in zip(names, types, strict=True)
            if kind not in (b"hash", b"none")
        }

    async def examine_records(self, limit: int) -> Examined:
        looked_at, unreadable = 0, {}
        async for names in self._client.walk(layout.records(None)):
            page = names[: limit - looked_at]
            looked_at += len(page)
            types = await self._client.batch([("TYPE", name) for name in page])
            hashes = await self._client.read_hashes(page)
            for name, kind, fields in zip(page, types, hashes, strict=True):
                if kind == b"none" or (kind == b"hash" and not fields):
                    continue  # it has just expired
                why = record_fields.unreadable(name, fields) if fields else f"a {kind.decode()}"
                if why:
                    unreadable[name.decode("utf-8", "replace")] = why
            if looked_at >= limit:
                break
        return Examined(looked_at, unreadable)


def _name(command: Command) -> str:
    return "CLIENT TRACKING" if command is TRACK else str(command[0])


async def _try_tracking(server: Server) -> Reply:
    try:
        connection, _ = await dial_tracked(server)
    except StoreRefused as error:
        return error.__cause__
    await connection.disconnect()
    return b"OK"
