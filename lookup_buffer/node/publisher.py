"""The publisher: writes the dirty set to the store, many changes in one round trip.

It writes what the arena holds at that moment, so the newest state always wins. A batch takes up to
four steps, each one call of the store for all of its changes: withdraw what is gone and what is
void; publish what is here; replace dead nodes in full records; release the claims of what was not
published. A change whose server of a cluster was not reached in one step takes no part in the next
ones and is held. Called by `registrar` on the loop's thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.arena import Arena, Item
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Pools
from lookup_buffer.node.dirty_set import Change, DirtySet
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.times import HANDOFF_GONE_SECONDS, Clock
from store import (
    GONE_SECONDS,
    GoneReason,
    Location,
    MetadataStore,
    Publication,
    Publishing,
    Record,
    Releasing,
    StoreError,
    StoreUnavailable,
    Withdrawing,
)

VOID_MAX = 64
"""Locations of dead nodes that are withdrawn with one beat."""

_T = TypeVar("_T")
Report = tuple[QualifiedKey, int, Publication]
"""The result of publishing one generation of a hand-off."""


@dataclass(slots=True)
class _Batch:
    """Changes that are being written, and those of them whose server was not reached."""

    store: MetadataStore
    unreached: dict[Change, None] = field(default_factory=dict)

    async def outcomes(
        self, changes: Sequence[Change], call: Awaitable[Sequence[_T | None]]
    ) -> list[_T | None]:
        """The results of a call for these changes; None if the server was not reached.

        Raises:
            StoreUnavailable: no server was reached, and there is only one, as far as it is known.
        """
        found: Sequence[_T | None] = [None] * len(changes)
        try:
            found = await call
        except StoreUnavailable:
            if not all(self.store.place_of(*change.address) for change in changes):
                raise
        outcomes = [None if one is Publication.UNREACHED else one for one in found]
        missed = zip(changes, outcomes, strict=True)
        self.unreached |= dict.fromkeys(change for change, one in missed if one is None)
        return outcomes


@dataclass(slots=True)
class Publisher:
    arena: Arena
    directory: Directory
    identity: Identity
    counters: Counters
    pools: Pools
    dirty: DirtySet
    record_ttl_seconds: float
    report: Callable[[Sequence[Report]], None]
    """Called with the results of a batch's hand-offs."""
    clock: Clock = time.monotonic
    in_flight: int = 0
    """Changes that are being written: they are not in the dirty set."""

    async def write(self, store: MetadataStore, *, until: float) -> set[str]:
        """Write at least one batch, and further ones that are due, until the next beat.

        Returns the servers of a cluster that were not reached; their changes are held until
        `DirtySet.retry`.

        Raises:
            StoreError: the store was not reached. What was not written is back in the dirty set.
        """
        places: set[str] = set()
        while changes := self.dirty.take():
            self.in_flight = len(changes)
            try:
                unreached = await self._write(store, changes)
            except StoreError:
                self.dirty.put_back(changes)
                raise
            finally:
                self.in_flight = 0
            self.dirty.written(change for change in changes if change not in unreached)
            for change in unreached:
                place = store.place_of(*change.address)
                self.dirty.hold(change, place)
                places.add(place)
            if self.clock() >= until or self.dirty.wait_seconds() != 0.0:
                break
            await asyncio.sleep(0)  # a store that is not reached may fail at once
        return places

    async def withdraw_void(self, store: MetadataStore) -> None:
        """Withdraw some of the locations of dead nodes that readers found."""
        void = self.directory.take_void(VOID_MAX)
        if void:
            await store.withdraw_many([_void(*address, location) for address, location in void])

    async def _write(self, store: MetadataStore, changes: Sequence[Change]) -> dict[Change, None]:
        """Write one batch; returns the changes whose server was not reached."""
        batch = _Batch(store)
        here = [(change, self.arena.published(change.address)) for change in changes]
        gone = [change for change, item in here if item is None]
        withdrawings = [(change, self._withdrawing(change)) for change in gone]
        withdrawings += [
            (change, _void(*change.address, location))
            for change, item in here
            if item is not None
            for location in change.void
        ]
        if withdrawings:
            withdraw = store.withdraw_many([one for _, one in withdrawings])
            await batch.outcomes([change for change, _ in withdrawings], withdraw)
        publishings = {
            change: self._publishing(item, change)
            for change, item in here
            if item is not None and change not in batch.unreached
        }
        ended = gone + (await self._publish(batch, publishings) if publishings else [])
        releasings = {
            change: Releasing(*change.address, change.claim_token)
            for change in ended
            if change.claim_token is not None and change not in batch.unreached
        }
        if releasings:  # nothing is published for them, so no engine is to wait for them
            release = store.release_many(list(releasings.values()))
            await batch.outcomes(list(releasings), release)
        return batch.unreached

    async def _publish(self, batch: _Batch, publishings: dict[Change, Publishing]) -> list[Change]:
        """Returns the changes that cannot be published."""
        unpublished: list[Change] = []
        full: dict[Change, Publishing] = {}
        reports: list[Report] = []
        publish = batch.store.publish_many(list(publishings.values()))
        outcomes = await batch.outcomes(list(publishings), publish)
        for (change, one), outcome in zip(publishings.items(), outcomes, strict=True):
            if one.sole:
                result = outcome or Publication.UNREACHED
                reports.append((change.address, one.location.generation, result))
            match outcome:
                case Publication.ADDED | Publication.PRESENT:
                    self.counters.add("publish_written")
                case Publication.FULL:
                    full[change] = one
                case Publication.REFUSED:
                    self.counters.add("publish_refused")
                    unpublished.append(change)
                case Publication.CONFLICT:
                    self.counters.add("publish_conflict")
                    unpublished.append(change)
        if reports:
            self.report(reports)
        if full:
            replace = self._replace_dead(batch.store, list(full.values()))
            await batch.outcomes(list(full), replace)
        return unpublished

    async def _replace_dead(
        self, store: MetadataStore, full: Sequence[Publishing]
    ) -> list[Publication]:
        """Where dead nodes fill a record's list of locations, publish in place of one of them."""
        records = await store.look_up([(one.record.namespace, one.record.key) for one in full])
        await self.directory.refresh(store)  # after the reading: see Directory.dead_seconds
        dead = [
            [
                _void(record.namespace, record.key, location)
                for location in record.locations
                if self.directory.dead_seconds(location) > 0
            ]
            if isinstance(record, Record)
            else []
            for record in records
        ]
        outcomes = [Publication.FULL] * len(full)
        again = [n for n, of_dead in enumerate(dead) if of_dead]
        if again:
            await store.withdraw_many([one for of_dead in dead for one in of_dead])
            published = await store.publish_many([full[n] for n in again])
            for n, outcome in zip(again, published, strict=True):
                outcomes[n] = outcome
        return outcomes

    def _withdrawing(self, change: Change) -> Withdrawing:
        return Withdrawing(
            *change.address,
            self.identity.node,
            change.reason or GoneReason.GONE,
            gone_seconds=_gone_seconds(change.address),
            # Write the reason also if the record was never published or has expired; but not if
            # a peer merely requested an item that is not here.
            may_have_ended=change.reason != GoneReason.STALE,
        )

    def _publishing(self, item: Item, change: Change) -> Publishing:
        header, identity = item.header, self.identity
        namespace, key = item.address
        location = Location(identity.node, identity.boot, item.generation, item.checksum)
        record = Record(
            namespace=namespace,
            key=key,
            dtype=header.dtype,
            shape=header.shape,
            nbytes=header.nbytes,
            kind=header.kind,
            created=time.time(),
            device=item.device,
        )
        ttl_seconds, sole = self._ttl_seconds(item), is_handoff(key)
        device = self.pools.device_of(item, identity.node)
        return Publishing(record, location, ttl_seconds, change.claim_token, sole, device)

    def _ttl_seconds(self, item: Item) -> float:
        remaining = self.arena.remaining_seconds(item)
        if remaining is None:
            return self.record_ttl_seconds
        # At most the time between renewals, so that the record of a dead holder expires.
        return min(self.record_ttl_seconds, max(remaining, 0.001))


def _gone_seconds(address: QualifiedKey) -> int:
    return HANDOFF_GONE_SECONDS if is_handoff(address[1]) else GONE_SECONDS


def _void(namespace: str, key: str, location: Location) -> Withdrawing:
    return Withdrawing(
        namespace,
        key,
        location.node,
        GoneReason.OWNER_DEAD,
        exactly=location,
        gone_seconds=_gone_seconds((namespace, key)),
    )
