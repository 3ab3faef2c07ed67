"""Membership: which nodes are alive and where they listen, and this node's own heartbeat.

`Directory` is what the store shows of the other nodes. `registrar` refreshes it once a second,
`locate` when a record names an unknown node. `node` ticks it. It also collects locations of dead
nodes, which `registrar` withdraws.

`Heartbeat` writes this node's beats, and checks that its id belongs to it alone. Two nodes with one
id would overwrite each other's records. So a node that finds a beat of another boot with its id
watches it first: if that beat changes twice, this node ends; if it stands still, it takes the id
over. One change proves nothing: it may be the last beat of a process that was killed, late on the
network. The beat may also be one of the past, after the store was restored from a snapshot. Used on
the loop's thread only.

`Liveness` is the failure detector: a node increments a sequence number in Redis each second. It is
alive if that number changed recently as seen from here; no other machine's clock is used. Pure
bookkeeping without I/O; the clock is an argument. The dashboard has one, too.
"""

import asyncio
import logging
import math
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from lookup_buffer.errors import ConfigError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.storage import RoundTrip
from lookup_buffer.times import (
    BEAT_SECONDS,
    BLIND_SECONDS,
    DEAD_AFTER_SECONDS,
    LONG_DEAD_SECONDS,
    STALL_SECONDS,
    WATCH_SECONDS,
    Clock,
)
from store import (
    NODES_MAX,
    Beat,
    Location,
    MetadataStore,
    NodeInfo,
    NodeTaken,
    Record,
    StoreError,
    StoreUnavailable,
)

REFRESH_SECONDS_MIN = 0.05
"""A boot that a refresh did not find causes another one after this time, at the earliest."""
VOID_MAX = 1000
"""Bound on the collected locations of dead nodes; the others are found at a later look-up."""
UNSEEN_MAX = 1000
"""Bound on the remembered boots without a beat. Others are judged dead one reading of the beats
later."""
DESCRIPTIONS_PAGE = 500
"""Descriptions that are read in one round trip, and with one reading of the beats of boots that had
none before: anybody who can write the store can add boots without one."""
WATCH_AGAIN_SECONDS = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """`boot` is new at every start: locations of an earlier boot are void."""

    node: str
    boot: str
    endpoint: str

    @classmethod
    def create(cls, node_id: str | None, endpoint: str) -> "Identity":
        boot = secrets.token_hex(8)
        return cls(node_id or f"{socket.gethostname()[:40]}-{boot[:4]}", boot, endpoint)


class Liveness:
    """The known nodes, and since when their sequence has not changed."""

    def __init__(self, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._dead_after_seconds = dead_after_seconds
        self._beats: dict[str, tuple[str, int]] = {}
        self._changed_at: dict[str, float] = {}
        self._observed_at = -math.inf
        self._looking_since = math.inf

    def observe(
        self, beats: Mapping[str, tuple[str, int]], now: float, *, complete: bool = True
    ) -> None:
        """Apply one reading of all beats: node → (boot, sequence).

        Nodes that are absent have shut down. After the store lost its data the reading is not
        `complete`: absent nodes are then judged by their last beat, NODES_MAX nodes in all.
        """
        if now - self._observed_at > BLIND_SECONDS or not complete:
            self._looking_since = now
        self._observed_at = now
        before, self._beats = self._beats, dict(beats)
        if not complete:
            absent = (node for node in before if node not in beats)
            kept = islice(absent, max(0, NODES_MAX - len(beats)))
            self._beats |= {node: before[node] for node in kept}
        self._changed_at = {
            node: self._changed_at[node] if before.get(node) == beat else now
            for node, beat in self._beats.items()
        }

    def forgive(self, seconds: float, now: float) -> None:
        """This process was stopped for `seconds`: that time does not count as silence of others."""
        for node, at in self._changed_at.items():
            self._changed_at[node] = min(now, at + seconds)

    def sees(self, node: str, boot: str) -> bool:
        """Whether the last reading had this boot: it may have died since, but was not replaced."""
        return node in self._beats and self._beats[node][0] == boot

    def alive(self, node: str, boot: str, now: float) -> bool:
        """Whether this boot of `node` beat recently; another boot counts as another node."""
        seen = self.sees(node, boot)
        return seen and now - self._changed_at[node] <= self._dead_after_seconds

    def dead_seconds(self, node: str, boot: str) -> float:
        """How long this boot has been dead, at the last reading; 0 if it may be alive.

        Stricter than `alive`, since its callers remove what others wrote: time without readings, or
        in which the store was losing its data, does not count. Infinite for a boot that another
        boot of the same node has replaced: it never returns.
        """
        if node in self._beats and not self.sees(node, boot):
            return math.inf
        since = max(self._looking_since, self._changed_at.get(node, -math.inf))
        silent = self._observed_at - since
        return silent if silent > self._dead_after_seconds else 0.0

    def boots(self) -> set[tuple[str, str]]:
        """(node, boot) of all that have not shut down, alive or not."""
        return {(node, boot) for node, (boot, _) in self._beats.items()}


class Directory:
    def __init__(self, node: str, clock: Clock = time.monotonic) -> None:
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
        self.round_trip = RoundTrip()
        """To the store, measured at each reading of the beats."""
        self.epoch = 0
        """Incremented when a node appears, dies or moves: earlier judgements are then out of
        date."""
        self._undescribed: dict[tuple[str, str], None] = {}
        """Boots that beat and had no description, the one that was asked for last at the end."""
        self._has_warned = False
        self._listed = False
        self._lost_at = -DEAD_AFTER_SECONDS
        self._ticked_at = clock()

    async def refresh(self, store: MetadataStore) -> None:
        """Read all beats, and the description of every boot that is new.

        Raises:
            StoreError: the store did not answer.
        """
        async with self._refreshing:
            asked_at = self._clock()
            self._observe(await store.beats(), asked_at)
            boots = self._liveness.boots()
            for boot in self._infos.keys() - boots:
                self._note_unseen(boot, -math.inf)  # it has beaten before, so it is not a new node
                del self._infos[boot]
            with suppress(StoreUnavailable):  # a server is down: repeated with the next beat
                await self._describe(store, boots - self._infos.keys())
        self.tick()

    async def _describe(self, store: MetadataStore, unknown: set[tuple[str, str]]) -> None:
        """Read the descriptions of all boots that are new, and of some that had none."""
        self._undescribed = {boot: None for boot in self._undescribed if boot in unknown}
        again = islice(self._undescribed, DESCRIPTIONS_PAGE)
        due = [*(unknown - self._undescribed.keys()), *again]
        for start in range(0, len(due), DESCRIPTIONS_PAGE):
            page = due[start : start + DESCRIPTIONS_PAGE]
            for info in (await store.node_infos([node for node, _ in page])).values():
                self._infos[info.node, info.boot] = info
            for boot in page:  # to the end: the others come first
                self._undescribed.pop(boot, None)
                if boot not in self._infos:
                    self._undescribed[boot] = None

    def _observe(self, beats: Mapping[str, Beat], asked_at: float) -> None:
        self.refreshed_at, now = asked_at, self._clock()
        self.round_trip.observe(now - asked_at)
        if self._listed and self._node not in beats:
            self._lost_at = now  # this node beats, so the store has lost its data
        self._listed = self._listed or self._node in beats
        if len(beats) >= NODES_MAX and not self._has_warned:
            self._has_warned = True
            _log.warning("the store lists %d nodes or more: others are ignored", NODES_MAX)
        observed = {node: (beat.boot, beat.sequence) for node, beat in beats.items()}
        complete = now - self._lost_at >= DEAD_AFTER_SECONDS
        self._liveness.observe(observed, now, complete=complete)

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
            elif (
                self.is_dead(location)
                and self.dead_seconds(location) >= LONG_DEAD_SECONDS
                and len(self._void) < VOID_MAX
            ):
                self._void[(record.namespace, record.key), location] = None
        return tuple(sources)

    def endpoint(self, location: Location) -> str | None:
        """The endpoint of `location`; None if that boot is not alive, or is this node."""
        return self._endpoints.get((location.node, location.boot))

    def member(self, node: str) -> tuple[Location, str] | None:
        """(boot, endpoint) of another live node; the boot as a location of no item."""
        for (name, boot), endpoint in self._endpoints.items():
            if name == node:
                return Location(name, boot, 0, 0), endpoint
        return None

    def knows(self, location: Location, read_at: float = math.inf) -> bool:
        """Whether this boot of the node is known, or was just not found.

        A refresh that began before the first call may have been too early to find a new boot,
        however recent it is. Also after a pause of the store a node that seems dead may have
        beaten since: a record that was read after it, at `read_at` by the clock, can be newer than
        the last reading of the beats.
        """
        boot = (location.node, location.boot)
        if location.node == self._node or boot in self._endpoints:
            return True
        now = self._clock()
        if boot in self._infos:
            return self.refreshed_at > min(read_at, now - BLIND_SECONDS)
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
        seen = self._liveness.sees(*boot)
        return seen or self.refreshed_at > self._note_unseen(boot, self._clock())

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

    def take_void(self, most: int) -> list[tuple[QualifiedKey, Location]]:
        """Up to `most` locations that were looked up and whose nodes have long been dead."""
        taken = list(self._void)[:most]
        for entry in taken:
            del self._void[entry]
        return [entry for entry in taken if self.dead_seconds(entry[1]) >= LONG_DEAD_SECONDS]

    def expired(self) -> list[tuple[str, str]]:
        """(node, boot) of nodes that died LONG_DEAD_SECONDS ago without shutting down."""
        dead_seconds = self._liveness.dead_seconds
        return [boot for boot in self._boots() if dead_seconds(*boot) >= LONG_DEAD_SECONDS]

    def others(self) -> set[tuple[str, str]]:
        """(node, boot) of the other nodes that are not known to be dead."""
        return {boot for boot in self._boots() if not self._liveness.dead_seconds(*boot)}

    def _boots(self) -> Iterable[tuple[str, str]]:
        return (boot for boot in self._liveness.boots() if boot[0] != self._node)

    def count_alive(self) -> int:
        """The number of live nodes, including this one once it beats."""
        now = self._clock()
        return sum(self._liveness.alive(*boot, now) for boot in self._liveness.boots())


@dataclass(slots=True)
class Heartbeat:
    identity: Identity
    clock: Clock = time.monotonic
    established: bool = False
    """Whether the id is ours. Otherwise nothing may be published."""
    was_established: bool = False
    """Whether it has been ours at any time."""
    _sequence: int = 0
    _has_failed: bool = False
    """Since the last beat that succeeded."""
    _other: Beat | None = None
    _watched_since: float = 0.0
    _has_moved: bool = False
    """Whether the beat of the other boot changed while this node watched it."""

    async def beat(self, store: MetadataStore) -> bool:
        """Write a beat, or watch the one of another boot that has our id.

        Returns whether the store knew no beat of ours: this is the first one, or the first one
        since the store lost its data. Then all has to be published again.

        Raises:
            ConfigError: the id belongs to another node; this one must end.
            StoreError: the store did not answer.
        """
        try:
            return await self._beat(store)
        except NodeTaken as taken:
            self.established = False
            return await self._watch(taken.beat, store)
        except StoreError:
            self._other = None  # the other boot could not beat either: watch it again
            raise

    def pause_seconds(self) -> float:
        """Seconds until the next beat."""
        return WATCH_AGAIN_SECONDS if self._other else BEAT_SECONDS

    async def _beat(self, store: MetadataStore, replacing: Beat | None = None) -> bool:
        self._sequence += 1
        identity, had_failed, self._has_failed = self.identity, self._has_failed, True
        known = await store.beat(identity.node, identity.boot, self._sequence, replacing=replacing)
        self.established, self.was_established, self._other = True, True, None
        if known and had_failed:
            # A beat that had failed for us may have been carried out after the store lost its data.
            # Then the description of this node is gone.
            try:
                known = await self._info(identity.boot, store) is not None
            except StoreError:  # of its own server: asked again after the next beat
                return False
        self._has_failed = False
        return not known

    async def _watch(self, found: Beat, store: MetadataStore) -> bool:
        now = self.clock()
        if self._other is None or self._other.boot != found.boot:
            self._other, self._watched_since, self._has_moved = found, now, False
        elif self._other != found:
            if self._has_moved:
                raise await self._refusal(found, store)
            self._other, self._watched_since, self._has_moved = found, now, True
        elif now - self._watched_since >= WATCH_SECONDS:
            self._watched_since = now  # whatever the answer is, it is not asked again at once
            try:
                return await self._beat(store, replacing=found)
            except NodeTaken as taken:
                return await self._watch(taken.beat, store)
        return False

    async def _refusal(self, found: Beat, store: MetadataStore) -> ConfigError:
        """Why this node ends: the other boot beats."""
        info = None
        with suppress(StoreError):
            info = await self._info(found.boot, store)
        named = f"boot {found.boot}" + (f" on host {info.host}" if info else "")
        id_is = f"setting 'node_id' is {self.identity.node!r}"
        if self.was_established:
            return ConfigError(
                f"{id_is}, and {named} took this id over while this node (boot "
                f"{self.identity.boot}) did not beat, so this node ends; allowed: a different id "
                "for each node"
            )
        return ConfigError(
            f"{id_is}, but a node with this id is already running ({named}); allowed: a different "
            "id for each node. Stop the other node, or give this one another id"
        )

    async def _info(self, boot: str, store: MetadataStore) -> NodeInfo | None:
        """What the store has of this boot of the node."""
        info = (await store.node_infos([self.identity.node])).get(self.identity.node)
        return info if info is not None and info.boot == boot else None
