"""Mirror: a cache of recently read records that the servers' pushes keep true.

A cached record is valid until the server reports a change; an absent key for at most a second.
There is one tracked connection (`lane.py`) for each server that holds keys. What a lost connection
had read is dropped, and everything when keys moved to other servers. All methods run on one asyncio
loop's thread.

The mirror only saves reads. A wrong entry costs a miss or a failed fetch, since nodes verify what
is requested from them.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from store import layout, record_fields
from store.base import Found
from store.connection import Command, ErrorReply, hgetall
from store.entries import Entries, Entry, Forgotten
from store.errors import StoreError, StoreUnavailable
from store.lane import TrackedConnection
from store.link import fields_of
from store.topology import Standalone, Topology
from store.watches import Watches

if TYPE_CHECKING:
    import asyncio

    from store.dialled import Endpoint

ENTRIES_MAX = 200_000
"""About 2 KB each. Above it, the entries that were read longest ago are dropped."""
AGE_SECONDS_MAX = 60.0
"""No entry is used longer: bounds the effect of a lost push."""
RECHECK_SECONDS = 1.0
"""How often the topology is checked: a moved slot is noticed at most so late."""
FORGOTTEN_SECONDS = 10.0
"""How long a `forget` is remembered: longer than any read is in flight."""
_SLOT_MOVING = frozenset(["ASK", "TRYAGAIN"])
"""Errors while a slot moves: neither the server nor the slot map is wrong."""

OnFound = Callable[[list[Found]], None]
_Group = Sequence[tuple[int, bytes]]
"""One connection's part of a read: positions in the request, and names of keys."""


class Mirror:
    """`close` stops it. The topology belongs to the store and stays open.

    `dialler` runs the blocking calls: connecting, and checks of the topology. `forgotten` is called
    when entries with a `verdict` are dropped (see `store.entries`).
    """

    def __init__(
        self,
        loop: "asyncio.AbstractEventLoop",
        topology: Topology,
        dialler: Executor,
        forgotten: Forgotten = lambda _: None,
        *,
        entries_max: int = ENTRIES_MAX,
        age_seconds_max: float = AGE_SECONDS_MAX,
    ) -> None:
        self._loop = loop
        self._topology = topology
        self._dialler = dialler
        self._age_seconds_max = age_seconds_max
        self._entries = Entries(entries_max, forgotten)
        self._connections: dict[Endpoint, TrackedConnection] = {}
        self._forgotten_at: dict[bytes, float] = {}
        """When a key was forgotten. Replies to reads that were sent before that are not cached."""
        self._watches = Watches(loop, self._connection_for, self.cache_reply, self._call)
        self._failovers = topology.failovers()
        self._rechecking = False
        self._closed = False
        self.pushes = 0
        """Invalidations received, as a counter for people."""
        self._ticker = loop.call_later(RECHECK_SECONDS, self._tick)
        self._recheck()  # loads the slot map before the first read needs it

    def entries(self, namespace: str) -> Mapping[str, Entry]:
        """The cached entries of a namespace, each valid until its `until`. Do not keep it."""
        return self._entries.of(namespace)

    @property
    def size(self) -> int:
        return len(self._entries)

    def ask(self, namespace: str, keys: Sequence[str], on_found: OnFound) -> None:
        """Call `on_found` with the records of `keys`, in their order; at once if all are cached.

        It ends within the call timeout. A key whose server was not reached has StoreUnavailable as
        its result.
        """
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
        """Drop a key, so that its next read goes to the server.

        For a caller that learned of a newer state over another connection, before the push arrived.
        """
        name = layout.record(namespace, key).encode()
        self._entries.drop(name)
        self._forgotten_at[name] = self._loop.time()

    def watch(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` when the key's current state is known, and after each change.

        Returns a function that cancels the watch. A change is one of the record or of the claim.
        While there is a claim and no record, `notify` is not called. It is called only after the
        next change can no longer be missed, so a read or a claim inside `notify`, or later, sees
        the current state.
        """
        return self._watches.add(namespace, key, notify)

    def close(self) -> None:
        """Drop all connections. Pending reads end with StoreUnavailable. Idempotent."""
        self._closed = True
        self._ticker.cancel()
        self._watches.close()
        for connection in self._connections.values():
            connection.close(StoreUnavailable("the mirror is closed"))

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

        `on_reply` gets the connection and the reply, which may be an ErrorReply or
        StoreUnavailable. The connection is None if the key's server is not known.
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
            commands = [hgetall(name) for _, name in group]
            each = partial(self._read_one, connection, pending, group)
            connection.request(commands, each, partial(self._read_all, pending, group))
        if not groups:
            self._call(pending.on_found, pending.found)

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
        address = (pending.namespace, key)
        pending.found[index] = self.cache_reply(connection, name, address, reply, pending.sent_at)

    def _read_all(self, pending: "_PendingRead", group: _Group, error: StoreError | None) -> None:
        if error is not None:
            unknown = StoreUnavailable(str(error))
            for index, _ in group:
                pending.found[index] = unknown
        pending.left -= 1
        if not pending.left:
            self._call(pending.on_found, pending.found)

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
        returned as StoreUnavailable.
        """
        if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
            self.refused(connection, reply)
            return StoreUnavailable(f"store {connection.server.endpoint}: {reply}")
        record = record_fields.read_record(*address, fields_of(reply))
        if self._forgotten_at.get(name, -math.inf) < sent_at:
            self._entries.put(name, *address, connection, record, self._loop.time())
        return record

    def refused(self, connection: TrackedConnection, error: ErrorReply) -> None:
        """Check the topology after an error reply, unless it says that a slot is moving."""
        if error.code not in _SLOT_MOVING:
            self._topology.suspect(connection.server)
            self._recheck()

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a callback. Its exception must not end the read loop of the connection."""
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001
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
        connection = self._connections.get(server.endpoint)
        if connection is None:
            connection = TrackedConnection(
                self._loop,
                self._dialler,
                server,
                invalidated=self._invalidated,
                lost=self._forget_all,
            )
            self._connections[server.endpoint] = connection
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

    def _recheck(self) -> None:
        """Check the topology on another thread, unless a check is in flight."""
        if not (self._rechecking or self._closed or isinstance(self._topology, Standalone)):
            self._rechecking = True
            checked = self._dialler.submit(self._topology.recheck)
            checked.add_done_callback(self._rechecked_elsewhere)

    def _rechecked_elsewhere(self, checked: "Future[None]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing left to do
            self._loop.call_soon_threadsafe(self._rechecked)

    def _rechecked(self) -> None:
        """Drop everything after a failover, or after slots moved."""
        self._rechecking = False
        failovers = self._topology.failovers()
        if failovers == self._failovers or self._closed:
            return
        self._failovers = failovers
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close(StoreUnavailable("keys have moved to other servers"))


@dataclass(slots=True, eq=False)
class _PendingRead:
    """One `ask` in flight, over one connection or more."""

    namespace: str
    keys: Sequence[str]
    found: list[Found]
    on_found: OnFound
    sent_at: float
    left: int = 0
