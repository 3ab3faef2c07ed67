"""Watches: who wants to know when a key's record changes, or its claim is gone.

Part of the mirror, on its loop's thread. Both keys of Redis are read on the mirror's lane, so that
the server tells of their next change, and after each change again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from store import layout
from store.connection import Command, hgetall
from store.errors import StoreError, StoreUnavailable
from store.lane import Lane

if TYPE_CHECKING:
    import asyncio

REARM_SECONDS = 0.1
"""After a server was not reached, or refused."""


@dataclass(slots=True, eq=False)
class Watch:
    namespace: str
    key: str
    notify: Callable[[], None]
    names: tuple[bytes, bytes] = field(init=False)
    """Of the record and of the claim."""
    lane: Lane | None = None

    def __post_init__(self) -> None:
        of = (self.namespace, self.key)
        self.names = (layout.record(*of).encode(), layout.claim(*of).encode())


class Watches:
    """`lane_for`, `take_in` and `tell` are the mirror's."""

    def __init__(
        self,
        loop: "asyncio.AbstractEventLoop",
        lane_for: Callable[[bytes], Lane],
        take_in: Callable[[Lane, bytes, tuple[str, str], Any, float], object],
        tell: Callable[..., None],
    ) -> None:
        self._loop = loop
        self._lane_for = lane_for
        self._take_in = take_in
        self._tell = tell
        self._by_name: dict[bytes, set[Watch]] = {}
        self._unarmed: set[Watch] = set()
        self._closed = False

    def __len__(self) -> int:
        """Keys of Redis that are watched."""
        return len(self._by_name)

    def add(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """See `Mirror.watch`."""
        watch = Watch(namespace, key, notify)
        for name in watch.names:
            self._by_name.setdefault(name, set()).add(watch)
        self._arm(watch)
        return partial(self._remove, watch)

    def changed(self, name: bytes) -> None:
        """The server says so of a key of Redis."""
        for watch in tuple(self._by_name.get(name, ())):
            self._arm(watch)

    def lost(self, lane: Lane) -> None:
        """What was read there is read again soon."""
        for watch in {watch for watches in self._by_name.values() for watch in watches}:
            if watch.lane is lane:
                self._arm_soon(watch)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._by_name.clear()
        self._unarmed.clear()

    def _arm(self, watch: Watch) -> None:
        """Read both keys, so that the server tells of their next change; then notify, if there is
        something to be had: a record, or the claim for it."""
        record, claim = watch.names
        try:
            lane = watch.lane = self._lane_for(record)
        except StoreUnavailable:
            self._arm_soon(watch)
            return
        found: list[Any] = []
        asked_at, address = self._loop.time(), (watch.namespace, watch.key)

        def each(index: int, reply: Any) -> None:
            if index == 0:
                reply = self._take_in(lane, record, address, reply, asked_at)
            found.append(reply)

        def done(error: StoreError | None) -> None:
            if watch not in self._by_name.get(record, ()):
                return
            if error is not None or isinstance(found[0], StoreUnavailable):
                self._arm_soon(watch)
            elif found[0] is not None or not isinstance(found[1], bytes):
                self._tell(watch.notify)
            # Else it is claimed, and no more: who tried for it now would be refused, and would
            # disturb others by the claims that he takes and gives back for that.

        commands: list[Command] = [hgetall(record), ("GET", claim)]
        lane.ask(commands, each, done)

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
