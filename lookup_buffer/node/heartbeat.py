"""The heartbeat: this node's sign of life, and whether its id is its own.

Two nodes under one id would void each other's records by turns. So a node that finds another boot
under its id watches it first: one that lives makes it give up, one that stands still is replaced.
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
    """Another boot has our id; whether it lives is not known yet."""
    NEW = "new"
    """The store did not know us: it is our first beat, or it has lost its data."""
    KNOWN = "known"


@dataclass(slots=True)
class Heartbeat:
    """Used on the registrar's thread."""

    identity: Identity
    clock: Callable[[], float] = time.monotonic
    established: bool = False
    """Whether the id is ours. Before, nothing may be published under it."""
    _sequence: int = 0
    _other: Beat | None = None
    _watched_since: float = 0.0

    def beat(self, store: MetadataStore) -> Pulse:
        """Say that this node lives.

        Raises:
            ConfigError: the id is another's. The node has to end.
            StoreError: the store did not answer.
        """
        try:
            return self._beat(store)
        except NodeTaken as taken:
            if self.established:
                raise self._replaced(taken.beat, store) from taken
            return self._watch(taken.beat, store)
        except StoreError:
            self._other = None  # it could not beat either: watch it from the start
            raise

    def pause_seconds(self) -> float:
        """Until the next beat is due."""
        return WATCH_AGAIN_SECONDS if self._other else BEAT_SECONDS

    def _beat(self, store: MetadataStore, replacing: Beat | None = None) -> Pulse:
        self._sequence += 1
        identity = self.identity
        known = store.beat(identity.node, identity.boot, self._sequence, replacing=replacing)
        self.established, self._other = True, None
        return Pulse.KNOWN if known else Pulse.NEW

    def _watch(self, found: Beat, store: MetadataStore) -> Pulse:
        now = self.clock()
        if self._other is None or self._other.boot != found.boot:
            self._other, self._watched_since = found, now
        elif self._other != found:
            raise ConfigError(
                f"setting 'node_id' is {self.identity.node!r}, and {self._named(found, store)} "
                "lives under it; allowed: a name of its own for each node. End the other node, or "
                "give this one another name"
            )
        elif now - self._watched_since >= WATCH_SECONDS:
            try:
                return self._beat(store, replacing=found)
            except NodeTaken as taken:
                return self._watch(taken.beat, store)
        return Pulse.WATCHING

    def _replaced(self, found: Beat, store: MetadataStore) -> ConfigError:
        return ConfigError(
            f"setting 'node_id' is {self.identity.node!r}, and {self._named(found, store)} took it "
            f"while this node (boot {self.identity.boot}) gave no sign of life, so this one ends; "
            "allowed: a name of its own for each node"
        )

    def _named(self, found: Beat, store: MetadataStore) -> str:
        try:
            info = store.node_infos([self.identity.node]).get(self.identity.node)
        except StoreError:
            info = None
        known = info is not None and info.boot == found.boot
        return f"boot {found.boot}" + (f" on host {info.host}" if info and known else "")
