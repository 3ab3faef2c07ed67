"""Membership: which other nodes are alive and where they listen, as read from the store.

`registrar` refreshes it once a second, `locate` when a record names an unknown node. `node` ticks
it. It also collects locations of dead nodes, which `publisher` withdraws. Used on the loop's thread
only.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.liveness import Liveness
from lookup_buffer.times import DEAD_AFTER_SECONDS, LONG_DEAD_SECONDS, STALL_SECONDS
from store import Location, MetadataStore, NodeInfo, Record, StoreError, StoreUnavailable

REFRESH_SECONDS_MIN = 0.05
"""A boot that a refresh did not find causes another one after this time, at the earliest."""
VOID_MAX = 1000
"""Bound on the collected locations of dead nodes; the others are found at a later look-up."""
UNSEEN_MAX = 1000
"""Bound on the remembered boots without a beat. Others are judged dead one reading of the beats
later."""


class Directory:
    def __init__(self, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._refreshing = asyncio.Lock()
        """One refresh at a time: an older reading applied after a newer one would look like a
        new beat."""
        self._liveness = Liveness()
        self._infos: dict[tuple[str, str], NodeInfo] = {}
        self._void: dict[tuple[QualifiedKey, Location], None] = {}
        self._unseen_since: dict[tuple[str, str], float] = {}
        """By boot without a beat or a description: time of the first query about it, by the
        clock."""
        self._endpoints: dict[tuple[str, str], str] = {}
        self.refreshed_at = -REFRESH_SECONDS_MIN
        """When the last reading of the beats began, by the clock: it includes all earlier beats."""
        self.epoch = 0
        """Incremented when a node appears, dies or moves: earlier judgements are then out of
        date."""
        self._listed = False
        self._lost_at = -DEAD_AFTER_SECONDS
        self._ticked_at = clock()

    async def refresh(self, store: MetadataStore) -> None:
        """Read all beats, and the description of every boot that is new.

        Raises:
            StoreError: the store did not answer.
        """
        async with self._refreshing:
            await self._refresh(store)
        self.tick()

    async def _refresh(self, store: MetadataStore) -> None:
        asked_at = self._clock()
        beats = await store.beats()
        self.refreshed_at, now = asked_at, self._clock()
        if self._listed and self._node not in beats:
            self._lost_at = now  # this node beats, so the store has lost its data
        self._listed = self._listed or self._node in beats
        observed = {node: (beat.boot, beat.sequence) for node, beat in beats.items()}
        complete = now - self._lost_at >= DEAD_AFTER_SECONDS
        self._liveness.observe(observed, now, complete=complete)
        boots = set(self._liveness.boots())
        for boot in self._infos.keys() - boots:
            self._note_unseen(boot, -math.inf)  # it has beaten before, so it is not a new node
        self._infos = {boot: info for boot, info in self._infos.items() if boot in boots}
        unknown = [node for node, boot in boots if (node, boot) not in self._infos]
        infos: dict[str, NodeInfo] = {}
        if unknown:
            with suppress(
                StoreUnavailable
            ):  # a server of the cluster is down: repeated with the next beat
                infos = await store.node_infos(unknown)
            for info in infos.values():
                self._infos[info.node, info.boot] = info

    def tick(self) -> None:
        """Detect nodes that died. To be called a few times a second, also while the store is down.

        If this node itself was stopped meanwhile, it judges no node dead until new beats can be
        read.
        """
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
        """For DEAD_AFTER_SECONDS an absent node is not taken as shut down: it may not have
        beaten again yet."""
        self._lost_at = self._clock()

    async def meet(self, store: MetadataStore, records: Iterable[Record | None]) -> None:
        """Refresh if one of the records names an unknown node.

        If the store does not answer, that node counts as dead until the next refresh.
        """
        if not all(self.knows(at) for record in records if record for at in record.locations):
            with suppress(StoreError):
                await self.refresh(store)

    def sources(self, record: Record) -> tuple[tuple[Location, str], ...]:
        """(location, endpoint) of the other live nodes that hold `record`."""
        sources = []
        for location in record.locations:
            endpoint = self.endpoint(location)
            if endpoint is not None:
                sources.append((location, endpoint))
            elif self.is_dead(location) and self.dead_seconds(location) >= LONG_DEAD_SECONDS:
                self._note_void((record.namespace, record.key), location)
        return tuple(sources)

    def endpoint(self, location: Location) -> str | None:
        """The endpoint of `location`; None if that boot is not alive, or is this node."""
        return self._endpoints.get((location.node, location.boot))

    def knows(self, location: Location) -> bool:
        """Whether this boot of the node is known, or was just not found.

        A refresh that began before the first call may have been too early to find a new boot,
        however recent it is.
        """
        boot = (location.node, location.boot)
        if location.node == self._node or boot in self._infos:
            return True
        now = self._clock()
        was_missed = self.refreshed_at > self._note_unseen(boot, now)
        return was_missed and now - self.refreshed_at < REFRESH_SECONDS_MIN

    # -- dead nodes

    def is_dead(self, location: Location) -> bool:
        """Whether this boot of another node is known to be dead, not merely not known to be alive:
        its beat did not change, it shut down, or another boot replaced it.

        A boot that was never seen may be new. It beats before it publishes, so it is dead if a
        reading of the beats, begun after the first call of this, does not include it.
        """
        boot = (location.node, location.boot)
        if boot in self._endpoints:
            return False
        if not self._liveness.dead_seconds(*boot):
            return False
        return self._liveness.sees(*boot) or self.refreshed_at > self._note_unseen(
            boot, self._clock()
        )

    def is_replaced(self, location: Location) -> bool:
        """Whether another boot replaced it, so that it never returns."""
        return self.is_dead(location) and math.isinf(self.dead_seconds(location))

    def dead_seconds(self, location: Location) -> float:
        """How long the boot of `location` has been dead, see `Liveness.dead_seconds`.

        Valid only for a location that was read before the last `refresh`: a boot beats before it
        publishes, so a boot without a beat is then not a new one.
        """
        return self._liveness.dead_seconds(location.node, location.boot)

    def _note_unseen(self, boot: tuple[str, str], since: float) -> float:
        """Since when `boot` has been unknown."""
        if len(self._unseen_since) >= UNSEEN_MAX and boot not in self._unseen_since:
            del self._unseen_since[next(iter(self._unseen_since))]
        return self._unseen_since.setdefault(boot, since)

    def _note_void(self, address: QualifiedKey, location: Location) -> None:
        if len(self._void) < VOID_MAX:
            self._void[address, location] = None

    def take_void(self, most: int) -> list[tuple[QualifiedKey, Location]]:
        """Up to `most` locations that were looked up and whose nodes have long been dead."""
        taken = list(self._void)[:most]
        for entry in taken:
            del self._void[entry]
        return [entry for entry in taken if self.dead_seconds(entry[1]) >= LONG_DEAD_SECONDS]

    def expired(self) -> list[tuple[str, str]]:
        """(node, boot) of nodes that died LONG_DEAD_SECONDS ago without shutting down."""
        return [
            (node, boot)
            for node, boot in self._liveness.boots()
            if node != self._node and self._liveness.dead_seconds(node, boot) >= LONG_DEAD_SECONDS
        ]

    def others(self) -> set[tuple[str, str]]:
        """(node, boot) of the other nodes that are not known to be dead."""
        return {
            (node, boot)
            for node, boot in self._liveness.boots()
            if node != self._node and not self._liveness.dead_seconds(node, boot)
        }

    def count_alive(self) -> int:
        """The number of live nodes, including this one once it beats."""
        now = self._clock()
        return sum(self._liveness.alive(*boot, now) for boot in self._liveness.boots())
