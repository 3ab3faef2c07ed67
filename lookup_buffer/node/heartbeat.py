"""The heartbeat: writes this node's beats, and checks that its id belongs to it alone.

Two nodes with one id would overwrite each other's records. So a node that finds a beat of another
boot with its id watches it first: if that beat changes, this node ends; if not, it takes the id
over. Called by `registrar` on the loop's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lookup_buffer.errors import ConfigError
from lookup_buffer.node.identity import Identity
from lookup_buffer.times import BEAT_SECONDS, WATCH_SECONDS
from store import Beat, MetadataStore, NodeTaken, StoreError

WATCH_AGAIN_SECONDS = 0.25


class Pulse(Enum):
    WATCHING = "watching"
    """A beat of another boot has our id; whether that boot lives is not known yet."""
    NEW = "new"
    """The store had no beat of ours: this is the first one, or the store has lost its data."""
    KNOWN = "known"


@dataclass(slots=True)
class Heartbeat:
    identity: Identity
    clock: Callable[[], float] = time.monotonic
    established: bool = False
    """Whether the id is ours. Before that nothing may be published."""
    _sequence: int = 0
    _other: Beat | None = None
    _watched_since: float = 0.0

    async def beat(self, store: MetadataStore) -> Pulse:
        """Write a beat.

        Raises:
            ConfigError: the id belongs to another node; this one must end.
            StoreError: the store did not answer.
        """
        try:
            return await self._beat(store)
        except NodeTaken as taken:
            if self.established:
                raise await self._replaced(taken.beat, store) from taken
            return await self._watch(taken.beat, store)
        except StoreError:
            self._other = None  # the other boot could not beat either: watch it again
            raise

    def pause_seconds(self) -> float:
        """Seconds until the next beat."""
        return WATCH_AGAIN_SECONDS if self._other else BEAT_SECONDS

    async def _beat(self, store: MetadataStore, replacing: Beat | None = None) -> Pulse:
        self._sequence += 1
        identity = self.identity
        known = await store.beat(identity.node, identity.boot, self._sequence, replacing=replacing)
        self.established, self._other = True, None
        return Pulse.KNOWN if known else Pulse.NEW

    async def _watch(self, found: Beat, store: MetadataStore) -> Pulse:
        now = self.clock()
        if self._other is None or self._other.boot != found.boot:
            self._other, self._watched_since = found, now
        elif self._other != found:
            named = await self._named(found, store)
            raise ConfigError(
                f"setting 'node_id' is {self.identity.node!r}, but a node with this id is already "
                f"running ({named}); allowed: a different id for each node. "
                "Stop the other node, or give this one another id"
            )
        elif now - self._watched_since >= WATCH_SECONDS:
            try:
                return await self._beat(store, replacing=found)
            except NodeTaken as taken:
                return await self._watch(taken.beat, store)
        return Pulse.WATCHING

    async def _replaced(self, found: Beat, store: MetadataStore) -> ConfigError:
        named = await self._named(found, store)
        return ConfigError(
            f"setting 'node_id' is {self.identity.node!r}, and {named} took this "
            f"id over while this node (boot {self.identity.boot}) did not beat, so this node "
            "ends; allowed: a different id for each node"
        )

    async def _named(self, found: Beat, store: MetadataStore) -> str:
        try:
            infos = await store.node_infos([self.identity.node])
            info = infos.get(self.identity.node)
        except StoreError:
            info = None
        known = info is not None and info.boot == found.boot
        return f"boot {found.boot}" + (f" on host {info.host}" if info and known else "")
