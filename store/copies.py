"""The copies that a record names: how a publication adds one, and a withdrawal takes it away.

Pure. The rules of `MetadataStore.publish_many` and `withdraw_many` as `MemoryStore` keeps them; a
server keeps them by the scripts `publish.lua` and `withdraw.lua`.
"""

from store.answers import Publication, Publishing
from store.record import LOCATIONS_MAX, DeviceLocation, Location, Record


def agree(known: Record, record: Record) -> bool:
    """Whether two records of one key describe the same bytes."""
    ours, theirs = (record.dtype, record.shape), (known.dtype, known.shape)
    return (*ours, record.nbytes, record.kind) == (*theirs, known.nbytes, known.kind)


def with_copy(record: Record, publishing: Publishing) -> tuple[Publication, Record]:
    """ADDED, PRESENT or FULL, and the record with what was published, as far as that stands."""
    outcome, locations = _with_location(record.locations, publishing.location)
    devices = _with_device(record.devices, publishing, locations)
    return outcome, record._replace(locations=locations, devices=devices)


def without_copy(record: Record, node: str) -> Record:
    """The record without what `node` has; perhaps of nobody then."""
    return record._replace(
        locations=tuple(at for at in record.locations if at.node != node),
        devices=tuple(on for on in record.devices if on.node != node),
    )


def _with_location(
    known: tuple[Location, ...], location: Location
) -> tuple[Publication, tuple[Location, ...]]:
    others = tuple(at for at in known if at.node != location.node)
    if len(others) == len(known):
        if len(known) >= LOCATIONS_MAX:
            return Publication.FULL, known
    else:
        mine = next(at for at in known if at.node == location.node)
        if mine.boot == location.boot and mine.generation >= location.generation:
            return Publication.PRESENT, known
    return Publication.ADDED, (*others, location)


def _with_device(
    known: tuple[DeviceLocation, ...], publishing: Publishing, locations: tuple[Location, ...]
) -> tuple[DeviceLocation, ...]:
    """The devices, with what is published beside a location that stands now."""
    if publishing.location not in locations:  # it came late
        return known
    others = tuple(on for on in known if on.node != publishing.location.node)
    return others if publishing.device is None else (*others, publishing.device)
