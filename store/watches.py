"""Watches: callbacks for changes of a key's record, and for the end of its claim.

Part of the mirror, on its loop's thread. Both Redis keys are read on the tracked connection, so the
server reports their next change. After each change they are read again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from store import layout
from store.errors import StoreError, StoreUnavailable

if TYPE_CHECKING:
    from store.replies import Command
from store.tracking import TrackedConnection

REARM_SECONDS = 0.1
"""Pause after a server was not reached, or refused."""


@dataclass(slots=True, eq=False)
class Watch:
    namespace: str
    key: str
    notify: Callable[[], None]
    names: tuple[bytes, bytes] = field(init=False)
    """Names of the record and of the claim."""
    connection: TrackedConnection | None = None

    def __post_init__(self) -> None:
        of = (self.namespace, self.key)
        self.names = (layout.record(*of).encode(), layout.claim(*of).encode())


class Watches:
    """`connection_for`, `cache_reply` and `call` are methods of the mirror."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection_for: Callable[[bytes], TrackedConnection],
        cache_reply: Callable[[TrackedConnection, bytes, tuple[str, str], Any, float], object],
        call: Callable[..., None],
    ) -> None:
        self._loop = loop
        self._connection_for = connection_for
        self._cache_reply = cache_reply
        self._call = call
        self._by_name: dict[bytes, set[Watch]] = {}
        self._unarmed: set[Watch] = set()
        self._closed = False

    def __len__(self) -> int:
        """How many Redis keys are watched."""
        return len(self._by_name)

    def add(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """See `Mirror.watch`."""
        watch = Watch(namespace, key, notify)
        for name in watch.names:
            self._by_name.setdefault(name, set()).add(watch)
        self._arm(watch)
        return partial(self._remove, watch)

    def changed(self, name: bytes) -> None:
        """The server reported a change of a Redis key."""
        for watch in tuple(self._by_name.get(name, ())):
            self._arm(watch)

    def lost(self, connection: TrackedConnection) -> None:
        """A connection was lost: read again soon what was watched on it."""
        for watch in {watch for watches in self._by_name.values() for watch in watches}:
            if watch.connection is connection:
                self._arm_soon(watch)

    def moved(self) -> None:
        """Keys moved to other servers: read there what is watched."""
        for watch in {watch for watches in self._by_name.values() for watch in watches}:
            try:
                if self._connection_for(watch.names[0]) is not watch.connection:
                    self._arm(watch)
            except StoreUnavailable:
                self._arm_soon(watch)

    def close(self) -> None:
        """Drop all watches. Idempotent."""
        self._closed = True
        self._by_name.clear()
        self._unarmed.clear()

    def _arm(self, watch: Watch) -> None:
        """Read both keys, and notify if there is a record or no claim.

        The read makes the server report their next change.
        """
        record, claim = watch.names
        try:
            connection = watch.connection = self._connection_for(record)
        except StoreUnavailable:
            self._arm_soon(watch)
            return
        found: list[Any] = []
        sent_at, address = self._loop.time(), (watch.namespace, watch.key)

        def each(index: int, reply: Any) -> None:
            if index == 0:
                reply = self._cache_reply(connection, record, address, reply, sent_at)
            found.append(reply)

        def done(error: StoreError | None) -> None:
            if watch not in self._by_name.get(record, ()):
                return
            if error is not None or isinstance(found[0], StoreUnavailable):
                self._arm_soon(watch)
            elif found[0] is not None or not isinstance(found[1], bytes):
                self._call(watch.notify)
            # Only a claim exists. A waiter that now tried to claim would be refused. Claims that it
            # acquires and releases for other keys would wake other waiters in turn.

        commands: list[Command] = [("HGETALL", record), ("GET", claim)]
        connection.request(commands, each, done)

    def _arm_soon(self, watch: Watch) -> None:
        if not self._unarmed and not self._closed:
            self._loop.call_later(REARM_SECONDS, self._arm_again)
        self._unarmed.add(watch)

    def _arm_again(self) -> None:
        unarmed, self._unarmed = self._unarmed, set()
        for watch in unarmed:
            if watch in self._by_name.get(watch.names[0], ()):
                self._arm(watch)

    def _remove(self, watch: Watch) -> None:
        for name in watch.names:
            watches = self._by_name.get(name)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._by_name[name]
