"""The directory: which other nodes live and where they listen, as read from the store.

Refreshed once a second by the registrar, and by whoever finds a record that names a node that is
not known yet. Any thread may ask. It also remembers locations of the dead that it was asked about,
for the registrar to withdraw.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.liveness import Liveness
from lookup_buffer.times import DEAD_AFTER_SECONDS, LONG_DEAD_SECONDS, STALL_SECONDS
from store import Location, MetadataStore, NodeInfo, Record, StoreError, StoreUnavailable

REFRESH_SECONDS_MIN = 0.05
"""An unknown node in a record refreshes the directory at most this often."""
VOID_MAX = 1000
"""Bound on locations of dead nodes that are remembered; more are found when they are asked for."""
UNSEEN_MAX = 1000
"""Bound on boots that do not beat and are remembered; of others it takes one more reading of the
beats until they count as dead."""


class Directory:
    """Thread-safe."""

    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        """An older reading must not be taken in after a newer one: it would look like life."""
        self._liveness = Liveness()
        self._infos: dict[tuple[str, str], NodeInfo] = {}
        self._void: dict[tuple[QualifiedKey, Location], None] = {}
        self._unseen_since: dict[tuple[str, str], float] = {}
        """Of boots that do not beat: when they were first asked about, by the clock."""
        self._endpoints: dict[tuple[str, str], str] = {}
        self.refreshed_at = -REFRESH_SECONDS_MIN
        """When the last reading of the beats was begun, by the clock: what beat before is in it."""
        self.epoch = 0
        """Grows when a node came, went, or moved: what was judged before then is out of date."""
        self._listed = False
        self._lost_at = -DEAD_AFTER_SECONDS
        self._ticked_at = clock()

    def refresh(self, store: MetadataStore) -> None:
        """Read all beats, and the description of every boot that is new.

        Raises:
            StoreError: the store did not answer.
        """
        with self._refreshing:
            self._refresh(store)
        self.tick()

    def _refresh(self, store: MetadataStore) -> None:
        asked_at = self._clock()
        beats = store.beats()
        with self._lock:
            self.refreshed_at, now = asked_at, self._clock()
            if self._listed and self._node not in beats:
                self._lost_at = now  # nobody but a store that lost its data forgets who beats
            self._listed = self._listed or self._node in beats
            observed = {node: (beat.boot, beat.sequence) for node, beat in beats.items()}
            complete = now - self._lost_at >= DEAD_AFTER_SECONDS
            self._liveness.observe(observed, now, complete=complete)
            boots = set(self._liveness.boots())
            for boot in self._infos.keys() - boots:
                self._note_unseen(boot, -math.inf)  # it did beat, so it is not too young to
            self._infos = {boot: info for boot, info in self._infos.items() if boot in boots}
            unknown = [node for node, boot in boots if (node, boot) not in self._infos]
        infos: dict[str, NodeInfo] = {}
        if unknown:
            with suppress(StoreUnavailable):  # its server: asked for again with the next beat
                infos = store.node_infos(unknown)
            with self._lock:
                for info in infos.values():
                    self._infos[info.node, info.boot] = info

    def tick(self) -> None:
        """See who has died since. To be called often, also while the store is away.

        A node that wakes after it was stopped takes nobody for dead until it has listened anew.
        """
        with self._lock:
            now = self._clock()
            stalled_seconds, self._ticked_at = now - self._ticked_at, now
            if stalled_seconds > STALL_SECONDS:
                self._liveness.forgive(stalled_seconds, now)
            endpoints = {
                (node, boot): info.endpoint
                for (node, boot), info in self._infos.items()
                if node != self._node and self._liveness.alive(node, boot, now)
            }
            if endpoints != self._endpoints:
                self._endpoints = endpoints
                self.epoch += 1

    def store_lost_data(self) -> None:
        """For the next seconds an absent node has not left: it has not come to beat again."""
        with self._lock:
            self._lost_at = self._clock()

    def meet(self, store: MetadataStore, records: Iterable[Record | None]) -> None:
        """Read the directory if one of the records names a node that was never seen.

        Where the store does not answer, that node counts as dead until the next beat reads it.
        """
        if not all(self.knows(at) for record in records if record for at in record.locations):
            with suppress(StoreError):
                self.refresh(store)

    def sources(self, record: Record) -> tuple[tuple[Location, str], ...]:
        """(location, endpoint) of the other nodes that live and hold `record`."""
        sources = []
        for location in record.locations:
            endpoint = self.endpoint(location)
            if endpoint is not None:
                sources.append((location, endpoint))
            elif self.is_dead(location) and self.dead_seconds(location) >= LONG_DEAD_SECONDS:
                self._note_void((record.namespace, record.key), location)
        return tuple(sources)

    def endpoint(self, location: Location) -> str | None:
        """Where to fetch from `location`; None when that boot of the node is not alive, or us."""
        return self._endpoints.get((location.node, location.boot))

    def knows(self, location: Location) -> bool:
        """Whether this boot of the node has been seen, or a refresh is not due yet."""
        with self._lock:
            known = location.node == self._node or (location.node, location.boot) in self._infos
            return known or self._clock() - self.refreshed_at < REFRESH_SECONDS_MIN

    # -- the dead

    def is_dead(self, location: Location) -> bool:
        """Whether this boot of another node was seen to be dead, and not only not seen to live:
        its beat stood still, it left, or another boot took its place.

        A boot that was never seen may be too young. It beats before it publishes, so it is dead
        when a reading of the beats that began after this was first called does not have it.
        """
        boot = (location.node, location.boot)
        if boot in self._endpoints:
            return False
        with self._lock:
            if not self._liveness.dead_seconds(*boot):
                return False
            return self._liveness.sees(*boot) or self.refreshed_at > self._note_unseen(
                boot, self._clock()
            )

    def is_replaced(self, location: Location) -> bool:
        """Whether it is dead because another boot took its place, so that it never comes back."""
        return self.is_dead(location) and math.isinf(self.dead_seconds(location))

    def dead_seconds(self, location: Location) -> float:
        """For how long the boot that `location` names has been dead, see `Liveness.dead_seconds`.

        Only to be believed of a location that was read before the last `refresh`: a boot beats
        before it publishes, so one that is missing then is no newcomer.
        """
        with self._lock:
            return self._liveness.dead_seconds(location.node, location.boot)

    def _note_unseen(self, boot: tuple[str, str], since: float) -> float:
        """Since when `boot` is known not to beat."""
        if len(self._unseen_since) >= UNSEEN_MAX and boot not in self._unseen_since:
            del self._unseen_since[next(iter(self._unseen_since))]
        return self._unseen_since.setdefault(boot, since)

    def _note_void(self, address: QualifiedKey, location: Location) -> None:
        with self._lock:
            if len(self._void) < VOID_MAX:
                self._void[address, location] = None

    def take_void(self, most: int) -> list[tuple[QualifiedKey, Location]]:
        """Up to `most` locations that were asked about and whose nodes are long dead."""
        with self._lock:
            taken = list(self._void)[:most]
            for entry in taken:
                del self._void[entry]
        return [entry for entry in taken if self.dead_seconds(entry[1]) >= LONG_DEAD_SECONDS]

    def long_dead(self) -> list[tuple[str, str]]:
        """(node, boot) of those that have not left and never will."""
        with self._lock:
            return [
                (node, boot)
                for node, boot in self._liveness.boots()
                if node != self._node
                and self._liveness.dead_seconds(node, boot) >= LONG_DEAD_SECONDS
            ]

    def others(self) -> set[tuple[str, str]]:
        """(node, boot) of the other nodes that were not seen to be dead."""
        with self._lock:
            return {
                (node, boot)
                for node, boot in self._liveness.boots()
                if node != self._node and not self._liveness.dead_seconds(node, boot)
            }

    def count_alive(self) -> int:
        """How many nodes live, this one included where it beats."""
        with self._lock:
            now = self._clock()
            return sum(self._liveness.alive(*boot, now) for boot in self._liveness.boots())
