"""Inspection: checks of the servers behind a store, for `doctor`.

Changes no data that others read. Runs on the caller's thread.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from store import layout, record_fields
from store.connection import TRACK, Command, Connection, ErrorReply, pack
from store.errors import StoreRefused
from store.link import Link
from store.server import Server

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
    ("HDEL", _PROBE, "field"),
    ("ZINCRBY", _PROBE, 1, "member"),
    ("ZMSCORE", _PROBE, "member"),
    ("ZREMRANGEBYRANK", _PROBE, 0, 0),
    ("SET", _PROBE, 1, "EX", 1),
    ("GET", _PROBE),
    ("PTTL", _PROBE),
    ("EXPIRE", _PROBE, 1),
    ("PEXPIRE", _PROBE, 1000),
    ("DEL", _PROBE),
    ("UNLINK", _PROBE),
    ("EVAL", _SCRIPT, 1, _PROBE),
    ("EVALSHA", hashlib.sha1(_SCRIPT.encode()).hexdigest(), 1, _PROBE),
)


@dataclass(frozen=True, slots=True)
class Refused:
    """Commands that a server refuses to us, and its reply to the first of them."""

    commands: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Examined:
    """How many records were read, and by key name why readers of this version miss some of them."""

    looked_at: int
    unreadable: Mapping[str, str]


class Inspection:
    """Errors are those of MetadataStore."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def refused(self) -> Refused | None:
        """The commands that the servers deny by ACL or do not know; None if all are allowed."""
        reasons: dict[str, str] = {}
        topology = self._link.topology
        for server in topology.servers(topology.new_budget()):
            replies = [*server.exchange(PROBES), _try_tracking(server)]
            for command, reply in zip((*PROBES, TRACK), replies, strict=True):
                # Other errors are ignored: another server of a cluster holds that key, or a full
                # server refuses to write.
                if isinstance(reply, ErrorReply) and (
                    reply.code == "NOPERM" or "unknown" in str(reply).lower()
                ):
                    name = "CLIENT TRACKING" if command is TRACK else str(command[0])
                    reasons.setdefault(name, str(reply))
        return Refused(tuple(reasons), next(iter(reasons.values()))) if reasons else None

    def clock_ahead_seconds(self) -> float | None:
        """How many seconds a server's clock is ahead of ours; the largest difference of all
        servers.

        None if a server denies TIME: no node needs it, and few users have the right.
        """
        asked_at = time.time()
        try:
            replies = self._link.each_server(("TIME",))
        except StoreRefused:
            return None
        now = (asked_at + time.time()) / 2
        return max((int(s) + int(us) / 1e6 - now for s, us in replies), key=abs)

    def foreign_nodes(self) -> Mapping[str, str]:
        """Foreign values under the names of the node list and node descriptions: key name and
        type.
        """
        pages = self._link.walk(layout.node("*"))
        names = [layout.NODES.encode(), *(name for page in pages for name in page)]
        types = self._link.batch([("TYPE", name) for name in names])
        return {
            name.decode("utf-8", "replace"): kind.decode()
            for name, kind in zip(names, types, strict=True)
            if kind not in (b"hash", b"none")
        }

    def examine_records(self, limit: int) -> Examined:
        """Read up to `limit` records, and name those that readers of this version miss."""
        names = (name for page in self._link.walk(layout.records(None)) for name in page)
        looked_at, unreadable = 0, {}
        while page := list(islice(names, min(1000, limit - looked_at))):
            looked_at += len(page)
            types = self._link.batch([("TYPE", name) for name in page])
            for name, kind, fields in zip(page, types, self._link.read_hashes(page), strict=True):
                if kind == b"none" or (kind == b"hash" and not fields):
                    continue  # it has just expired
                why = record_fields.unreadable(name, fields) if fields else f"a {kind.decode()}"
                if why:
                    unreadable[name.decode("utf-8", "replace")] = why
        return Examined(looked_at, unreadable)


def _try_tracking(server: Server) -> object:
    deadline = time.monotonic() + server.access.call_timeout_seconds
    connection: Connection = server.dial()
    try:
        connection.send(pack([TRACK]), deadline)
        return connection.receive(1, deadline)[0]
    finally:
        connection.close()
