"""The publisher: writes the dirty set to the store, many changes in one round trip.

It writes what the arena holds at that moment, so the newest state always wins. Called by
`registrar` on the loop's thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.dirty_set import Change, DirtySet
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.times import HANDOFF_GONE_SECONDS
from store import (
    GONE_SECONDS,
    DeviceLocation,
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
class Publisher:
    shelf: Shelf
    directory: Directory
    identity: Identity
    counters: Counters
    dirty: DirtySet
    record_ttl_seconds: float
    report: Callable[[Sequence[Report]], None]
    """Called with the results of a batch's hand-offs."""
    clock: Callable[[], float] = time.monotonic
    device_of: Callable[[Item, str], DeviceLocation | None] = lambda _item, _node: None
    """The device location beside a copy."""
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
            missed = set(unreached)
            self.dirty.written(change for change in changes if change not in missed)
            places |= self.dirty.hold(unreached, lambda address: store.place_of(*address))
            if self.clock() >= until or self.dirty.wait_seconds() != 0.0:
                break
            await asyncio.sleep(0)  # a store that is not reached may fail at once
        return places

    async def withdraw_void(self, store: MetadataStore) -> None:
        """Withdraw some of the locations of dead nodes that readers found."""
        void = self.directory.take_void(VOID_MAX)
        if void:
            await store.withdraw_many([_void(*address, location) for address, location in void])

    async def _write(self, store: MetadataStore, changes: Sequence[Change]) -> list[Change]:
        """Write one batch; returns the changes whose server was not reached."""
        here = [(change, self.shelf.published(change.address)) for change in changes]
        gone = [change for change, item in here if item is None]
        publishings = {
            change: self._publishing(item, change) for change, item in here if item is not None
        }
        unreached = await self._withdraw(store, gone) if gone else []
        return unreached + await self._publish(store, publishings)

    async def _withdraw(self, store: MetadataStore, changes: Sequence[Change]) -> list[Change]:
        node = self.identity.node
        withdrawings = [
            Withdrawing(
                *change.address,
                node,
                change.reason or GoneReason.GONE,
                gone_seconds=_gone_seconds(change.address),
                # Write the reason also if the record was never published or has expired; but
                # not if a peer merely requested an item that is not here.
                may_have_ended=change.reason != GoneReason.STALE,
            )
            for change in changes
        ]
        outcomes = await _outcomes(store, changes, lambda: store.withdraw_many(withdrawings), None)
        unreached = [change for change, gone in zip(changes, outcomes, strict=True) if gone is None]
        return unreached + await self._release(store, [c for c in changes if c not in unreached])

    async def _publish(
        self, store: MetadataStore, publishings: Mapping[Change, Publishing]
    ) -> list[Change]:
        unreached = await self._withdraw_before(store, publishings)
        publishings = {c: one for c, one in publishings.items() if c not in unreached}
        full: dict[Change, Publishing] = {}
        unpublished: list[Change] = []
        reports: list[Report] = []
        outcomes = await _outcomes(
            store,
            publishings,
            lambda: store.publish_many(list(publishings.values())),
            Publication.UNREACHED,
        )
        for (change, publishing), outcome in zip(publishings.items(), outcomes, strict=True):
            if publishing.sole:
                reports.append((change.address, publishing.location.generation, outcome))
            match outcome:
                case Publication.ADDED | Publication.PRESENT:
                    self.counters.add("publish_written")
                case Publication.FULL:
                    full[change] = publishing
                case Publication.UNREACHED:
                    unreached.append(change)
                case Publication.REFUSED:
                    self.counters.add("publish_refused")
                    unpublished.append(change)
                case Publication.CONFLICT:
                    self.counters.add("publish_conflict")
                    unpublished.append(change)
        if reports:
            self.report(reports)
        unreached += await self._make_room(store, full) if full else []
        return unreached + await self._release(store, unpublished)

    async def _withdraw_before(
        self, store: MetadataStore, changes: Iterable[Change]
    ) -> list[Change]:
        """Withdraw the locations in `Change.void`. Returns the changes that have to wait for it."""
        voids = [(change, location) for change in changes for location in change.void]
        if not voids:
            return []
        withdrawings = [_void(*change.address, location) for change, location in voids]
        outcomes = await _outcomes(
            store, [c for c, _ in voids], lambda: store.withdraw_many(withdrawings), None
        )
        missed = (c for (c, _), gone in zip(voids, outcomes, strict=True) if gone is None)
        return list(dict.fromkeys(missed))

    async def _release(self, store: MetadataStore, changes: Sequence[Change]) -> list[Change]:
        """Nothing is published for these: release their claims, so that no engine waits for
        them. Returns as `_write`."""
        claimed = [change for change in changes if change.claim_token is not None]
        if not claimed:
            return []
        releasings = [Releasing(*c.address, c.claim_token) for c in claimed if c.claim_token]
        outcomes = await _outcomes(store, claimed, lambda: store.release_many(releasings), None)
        return [c for c, released in zip(claimed, outcomes, strict=True) if released is None]

    async def _make_room(
        self, store: MetadataStore, publishings: Mapping[Change, Publishing]
    ) -> list[Change]:
        """If dead nodes fill a record's list of locations, replace one by this node. Returns the
        changes whose server was not reached."""
        try:
            return await self._replace_dead(store, publishings)
        except StoreUnavailable:
            if not _have_places(store, publishings):
                raise
            return list(publishings)

    async def _replace_dead(
        self, store: MetadataStore, publishings: Mapping[Change, Publishing]
    ) -> list[Change]:
        dead: list[Withdrawing] = []
        again: dict[Change, Publishing] = {}
        records = await store.look_up([change.address for change in publishings])
        await self.directory.refresh(store)  # after the reading: see Directory.dead_seconds
        for (change, publishing), record in zip(publishings.items(), records, strict=True):
            of_dead = [
                _void(*change.address, location)
                for location in (record.locations if isinstance(record, Record) else ())
                if self.directory.dead_seconds(location) > 0
            ]
            if of_dead:
                again[change] = publishing
                dead += of_dead
        if not dead:
            return []
        await store.withdraw_many(dead)
        outcomes = await store.publish_many(list(again.values()))
        missed = zip(again, outcomes, strict=True)
        return [change for change, outcome in missed if outcome is Publication.UNREACHED]

    def _publishing(self, item: Item, change: Change) -> Publishing:
        header = item.header
        namespace, key = item.address
        identity = self.identity
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
        device = self.device_of(item, identity.node)
        return Publishing(record, location, ttl_seconds, change.claim_token, sole, device)

    def _ttl_seconds(self, item: Item) -> float:
        remaining = self.shelf.remaining_seconds(item)
        if remaining is None:
            return self.record_ttl_seconds
        # At most the time between renewals, so that the record of a dead holder expires.
        return min(self.record_ttl_seconds, max(remaining, 0.001))


async def _outcomes(
    store: MetadataStore,
    changes: Collection[Change],
    call: Callable[[], Awaitable[list[_T]]],
    missed: _T,
) -> list[_T]:
    """The outcomes of a call for these changes; `missed` for each if none of their servers was
    reached, but others of the cluster may be. On one server the error is raised: then the beat
    fails, too."""
    if not changes:
        return []
    try:
        return await call()
    except StoreUnavailable:
        if not _have_places(store, changes):
            raise
        return [missed] * len(changes)


def _have_places(store: MetadataStore, changes: Iterable[Change]) -> bool:
    """Whether they are on servers of a cluster, as far as it is known."""
    return all(store.place_of(*change.address) for change in changes)


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
