"""Mirror: a cache of recently read records that the servers' pushes keep true.

A cached record is valid until the server reports a change; an absent key for at most a second.
There is one tracked connection (`tracking.py`) for each server that holds keys. What a lost
connection had read is dropped, and what lay in slots that moved to another server. All methods run
on one asyncio loop's thread.

The mirror only saves reads. A wrong entry costs a miss or a failed fetch, since nodes verify what
is requested from them.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redis.exceptions import MovedError

from store import layout, record_fields
from store.base import Entry, Forgotten, Found, Mirror, OnFound
from store.client import fields_of
from store.entries import Entries
from store.errors import StoreError, StoreRefused, StoreUnavailable
from store.replies import REFUSALS, Command, Reply, code_of
from store.server import Server
from store.topology import Standalone, Topology
from store.tracking import TrackedConnection
from store.watches import Watches

ENTRIES_MAX = 200_000
"""Up to 2.7 KB each; with a long key it counts more, see `entries.KEY_CHARACTERS`. Above it, the
entries that were read longest ago are dropped."""
AGE_SECONDS_MAX = 60.0
"""No entry is used longer: bounds the effect of a lost push."""
RECHECK_SECONDS = 1.0
"""How often the topology is checked: a moved slot is noticed at most so late."""
FORGOTTEN_SECONDS = 10.0
"""How long a `forget` is remembered: longer than any read is in flight."""
_PAGE = 1000
"""Entries checked in one step: about a millisecond."""
_SLOT_MOVING = frozenset(["ASK", "TRYAGAIN"])
"""Errors while a slot moves: neither the server nor the slot map is wrong."""

_Group = Sequence[tuple[int, bytes]]
"""One connection's part of a read: positions in the request, and names of keys."""


class RedisMirror(Mirror):
    """The topology belongs to the store and stays open.

    Created on the loop's thread. `forgotten` is called when entries with a `verdict` are dropped
    (see `Forgotten`).
    """

    def __init__(
        self,
        topology: Topology,
        forgotten: Forgotten = lambda _: None,
        *,
        entries_max: int = ENTRIES_MAX,
        age_seconds_max: float = AGE_SECONDS_MAX,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._topology = topology
        self._age_seconds_max = age_seconds_max
        self._entries = Entries(entries_max, forgotten)
        self._connections: dict[Server, TrackedConnection] = {}
        self._forgotten_at: dict[bytes, float] = {}
        """When a key was forgotten. Replies to reads that were sent before that are not cached."""
        self._watches = Watches(loop, self._connection_for, self.cache_reply, self._call)
        self._rechecking: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        """That one, and perhaps an earlier one that it follows."""
        self._has_follower = False
        self._version = topology.version
        self._closed = False
        self.pushes = 0
        self._ticker = loop.call_later(RECHECK_SECONDS, self._tick)
        self._recheck()  # connects before the first read needs it

    def entries(self, namespace: str) -> Mapping[str, Entry]:
        return self._entries.of(namespace)

    @property
    def size(self) -> int:
        return len(self._entries)

    def ask(self, namespace: str, keys: Sequence[str], on_found: OnFound) -> None:
        entries, now = self.entries(namespace), self._loop.time()
        found: list[Found] = []
        missing: list[int] = []
        for index, key in enumerate(keys):
            entry = entries.get(key)
            found.append(None if entry is None else entry.record)
            if entry is None or entry.until < now:
                missing.append(index)
        if missing:
            self._read(_PendingRead(namespace, keys, found, on_found, now), missing)
        else:
            on_found(found)

    def forget(self, namespace: str, key: str) -> None:
        name = layout.record(namespace, key).encode()
        self._entries.drop(name)
        self._forgotten_at[name] = self._loop.time()

    def watch(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        return self._watches.add(namespace, key, notify)

    def close(self) -> None:
        self._closed = True
        self._ticker.cancel()
        for check in self._checks:
            check.cancel()
        self._watches.close()
        for connection in self._connections.values():
            connection.close(StoreUnavailable("the mirror is closed"))
        self._connections.clear()

    def now(self) -> float:
        """When a request is sent, as `cache_reply` needs it: seconds of the loop's clock."""
        return self._loop.time()

    def send(
        self,
        name: bytes,
        command: Command,
        on_reply: Callable[[TrackedConnection | None, Any], None],
    ) -> None:
        """Send a command over the tracked connection of the Redis key `name`.

        `on_reply` gets the connection and the reply, which may be a refusal or a StoreUnavailable.
        The connection is None if the key's server is not known.
        """
        try:
            connection = self._connection_for(name)
        except StoreUnavailable as error:
            on_reply(None, error)
            return
        replies: list[Any] = []

        def done(error: StoreError | None) -> None:
            unknown = StoreUnavailable(str(error))
            self._call(on_reply, connection, replies[0] if replies else unknown)

        connection.request([command], lambda _, reply: replies.append(reply), done)

    # -- reads

    def _read(self, pending: "_PendingRead", indexes: Sequence[int]) -> None:
        groups: dict[TrackedConnection, list[tuple[int, bytes]]] = {}
        for index in indexes:
            name = layout.record(pending.namespace, pending.keys[index]).encode()
            try:
                connection = self._connection_for(name)
            except StoreUnavailable as error:
                pending.found[index] = error
            else:
                groups.setdefault(connection, []).append((index, name))
        pending.left = len(groups)
        for connection, group in groups.items():
            commands = [("HGETALL", name) for _, name in group]
            each = partial(self._read_one, connection, pending, group)
            connection.request(commands, each, partial(self._read_all, pending, group))
        if not groups:
            self._answer(pending)

    def _read_one(
        self,
        connection: TrackedConnection,
        pending: "_PendingRead",
        group: _Group,
        at: int,
        reply: Any,
    ) -> None:
        index, name = group[at]
        key = pending.keys[index]
        if isinstance(reply, MovedError) and not pending.is_repeated:
            pending.found[index] = StoreUnavailable(f"store: {reply}")
            pending.moved.append(index)
            return
        address = (pending.namespace, key)
        pending.found[index] = self.cache_reply(connection, name, address, reply, pending.sent_at)

    def _read_all(self, pending: "_PendingRead", group: _Group, error: StoreError | None) -> None:
        if error is not None:
            unknown = StoreUnavailable(str(error))
            for index, _ in group:
                pending.found[index] = unknown
        pending.left -= 1
        if pending.left:
            return
        if pending.moved and not self._closed:
            self._repeat(pending)
        else:
            self._answer(pending)

    def _repeat(self, pending: "_PendingRead") -> None:
        """Read again what had moved to other servers, once the new places are known.

        The time of the request is not extended: what is still unread then is StoreUnavailable.
        """
        pending.is_repeated = True
        moved, pending.moved = pending.moved, []
        deadline = pending.sent_at + self._topology.access.call_timeout_seconds
        pending.timer = self._loop.call_at(deadline, self._answer, pending)
        self._recheck(is_news=True).add_done_callback(lambda _: self._read(pending, moved))

    def _answer(self, pending: "_PendingRead") -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        if not pending.is_answered:
            pending.is_answered = True
            self._call(pending.on_found, list(pending.found))  # later replies change its own

    def cache_reply(
        self,
        connection: TrackedConnection,
        name: bytes,
        address: tuple[str, str],
        reply: Any,
        sent_at: float,
    ) -> Found:
        """Parse and cache the reply to HGETALL `name`, sent at `sent_at`.

        Returns the record or None. An error reply, other than for a foreign type, is not cached and
        returned as StoreUnavailable; as StoreRefused if another server has the key meanwhile.
        """
        if isinstance(reply, REFUSALS) and code_of(reply) != "WRONGTYPE":
            self.refused(connection, reply)
            kind = StoreRefused if code_of(reply) == "ASK" else StoreUnavailable
            return kind(f"store {connection.server.endpoint}: {reply}")
        record = record_fields.read_record(*address, fields_of(reply))
        if self._forgotten_at.get(name, -math.inf) < sent_at:
            self._entries.put(name, *address, connection, record, self._loop.time())
        return record

    def refused(self, connection: TrackedConnection, refusal: Reply) -> None:
        """Check the topology after a refusal, unless it says that a slot is moving."""
        code = code_of(refusal)
        if code not in _SLOT_MOVING:
            self._recheck(connection.server, demoted=code == "READONLY")

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a callback. Its exception must not end the read loop of the connection."""
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001 -- it must not end the read loop
            context = {"message": "a callback of the mirror failed", "exception": error}
            self._loop.call_exception_handler(context)

    # -- pushes

    def _invalidated(self, connection: TrackedConnection, names: Sequence[bytes] | None) -> None:
        self.pushes += 1
        if names is None:
            self._forget_all(connection)
            return
        for name in names:
            self._entries.drop(name)
            self._watches.changed(name)

    def _forget_all(self, connection: TrackedConnection) -> None:
        """Drop all that `connection` had read. What is watched there is read again, now or soon."""
        self._entries.drop_all(connection)
        self._watches.lost(connection)

    # -- servers

    def _connection_for(self, name: bytes) -> TrackedConnection:
        if self._closed:
            raise StoreUnavailable("the mirror is closed")
        try:
            server = self._topology.known_server_for(name)
        except StoreUnavailable:
            self._recheck()
            raise
        return self._connection_to(server)

    def _connection_to(self, server: Server) -> TrackedConnection:
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = TrackedConnection(
                server, invalidated=self._invalidated, lost=self._forget_all
            )
        return connection

    def _tick(self) -> None:
        """Once a second: drop old entries, probe the connections, check the topology."""
        self._ticker = self._loop.call_later(RECHECK_SECONDS, self._tick)
        self._forget_old()
        bound = self._loop.time() - FORGOTTEN_SECONDS
        self._forgotten_at = {name: at for name, at in self._forgotten_at.items() if at > bound}
        for connection in tuple(self._connections.values()):
            connection.probe()
        self._recheck()

    def _forget_old(self) -> None:
        if self._entries.drop_older(self._loop.time() - self._age_seconds_max):
            self._loop.call_soon(self._forget_old)

    def _recheck(
        self, suspect: Server | None = None, *, demoted: bool = False, is_news: bool = False
    ) -> "asyncio.Task[None]":
        """Check the topology. A check under way may have been answered before what its caller has
        seen: if that is news, or a suspect, another check follows it."""
        running = self._rechecking
        if running is not None and not running.done():
            if self._has_follower or not (is_news or suspect):
                return running
            self._has_follower = True
        else:
            running = None
        check = self._loop.create_task(self._check_topology(suspect, demoted, after=running))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        self._rechecking = check
        return check

    async def _check_topology(
        self, suspect: Server | None, demoted: bool, *, after: "asyncio.Task[None] | None"
    ) -> None:
        if after is not None:
            await asyncio.wait([after])
            self._has_follower = False
        if suspect is not None:
            await self._topology.suspect(suspect, demoted=demoted)
            if demoted:
                with suppress(StoreUnavailable):
                    await suspect.exchange([("PING",)])  # is it still the same server?
        try:
            if not isinstance(self._topology, Standalone):
                await self._topology.recheck()
            servers = await self._topology.servers(self._topology.new_budget())
        except StoreUnavailable:
            return
        for server in servers:
            self._connection_to(server)
        if self._version != self._topology.version:
            self._version = self._topology.version
            await self._drop_moved()

    async def _drop_moved(self) -> None:
        """Drop what was read from servers that hold it no longer, and read anew what is watched."""
        for server, connection in list(self._connections.items()):
            if not self._topology.serves(server):
                del self._connections[server]
                connection.close(StoreUnavailable("keys have moved to other servers"))
                continue
            for count, name in enumerate(self._entries.names(connection)):
                if self._topology.holder_of(name) is not server:
                    self._entries.drop(name)
                if count % _PAGE == _PAGE - 1:
                    await asyncio.sleep(0)
        self._watches.moved()


@dataclass(slots=True, eq=False)
class _PendingRead:
    """One `ask` in flight, over one connection or more."""

    namespace: str
    keys: Sequence[str]
    found: list[Found]
    on_found: OnFound
    sent_at: float
    left: int = 0
    moved: list[int] = field(default_factory=list)
    """What the servers that were asked no longer hold."""
    is_repeated: bool = False
    timer: asyncio.TimerHandle | None = None
    """Of a repeated one."""
    is_answered: bool = False
