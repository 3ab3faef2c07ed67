"""The fields of a record's HASH: how they are written, read and validated.

Pure functions. They belong to the contract of `layout`, which names the keys.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import filterfalse

from store import layout
from store.layout import key_field, read_count
from store.record import DEVICE, LOCATIONS_MAX, SAFE_NAME, DeviceLocation, Location, Record

_RECORD_NAME = re.compile(rb"lb:rec:([A-Za-z0-9._-]{1,128}):\{([^{}]+)\}\Z")
_SHAPE = re.compile(rb"\[(\d+(?:,\d+)*)?\]\Z")
_DIMENSIONS_MAX = 16
_FIELDS_MAX = 64
"""Nodes write at most 16: more are the work of somebody else."""
_DESCRIPTION_BYTES_MAX = 512
"""Of dtype, shape, nbytes, kind, created and device together. A shape has at most 322 bytes, 16
dimensions of 19 digits. The caches below keep them, so they have to be short."""
_KEY_BYTES_MAX = 16 << 10
"""Of a key that a scan finds in a record: 4,096 characters of UTF-8."""
_NAME_BYTES_MAX = 3 + 128  # at: and a node id
_TEXT_BYTES_MAX = 64  # Location.text and DeviceLocation.text
_VERSION_BYTES_SHOWN = 16
_CREATED_LIMIT = 1e11  # seconds since 1970, the year 5138: later times have no calendar date
_DESCRIPTION = frozenset(
    [b"v", b"key", b"dtype", b"shape", b"nbytes", b"kind", b"created", b"device"]
)
"""A record's fields other than its locations. Skipped without a function call for each."""
_KINDS = {b"tensor": "tensor", b"none": "none"}


def identity_fields(record: Record) -> list[str | int | bytes]:
    """Fields and values, alternating, in which two publishers of one key must agree."""
    shape = f"[{','.join(map(str, record.shape))}]"
    key = key_field(record.key)
    return [
        "v", layout.VERSION, *(("key", key) if key else ()), "dtype", record.dtype,
        "shape", shape, "nbytes", record.nbytes, "kind", record.kind,
    ]  # fmt: skip


def read_record(namespace: str, key: str, fields: Mapping[bytes, bytes]) -> Record | None:
    """Parse the HASH of `key`. None if it is absent, garbled, or another key's.

    A garbled record is a miss and no error: a reader could not repair it.
    """
    try:
        if not fields or fields[b"v"] != b"1" or len(fields) > _FIELDS_MAX:
            return None
        raw = key_field(key)
        if raw and fields[b"key"] != raw:
            return None  # another key with the same hash
        locations, devices = _read_locations(fields)
        if not locations:
            return None  # no node to fetch from; withdraw never leaves such a record
        tensor = fields[b"dtype"], fields[b"shape"], fields[b"nbytes"], fields[b"kind"]
        since, device = fields[b"created"], fields.get(b"device", b"")
        if sum(map(len, (*tensor, since, device))) > _DESCRIPTION_BYTES_MAX:
            return None
        created = float(since)
        if not 0 <= created < _CREATED_LIMIT:  # rejects NaN too
            return None
        seen_on = _read_device(device)
        return Record(namespace, key, *_read_tensor(*tensor), created, locations, devices, seen_on)
    except (KeyError, ValueError):
        return None


def read_named_record(name: bytes, fields: Mapping[bytes, bytes]) -> Record | None:
    """Parse a HASH that a scan found under `name`. None in the same cases as `read_record`."""
    match = _RECORD_NAME.match(name)
    if not match:
        return None
    namespace, spelled = match.groups()
    raw = fields.get(b"key", b"") if spelled.startswith(layout.HASHED.encode()) else spelled
    if len(raw) > _KEY_BYTES_MAX:
        return None
    try:
        of = (namespace.decode(), raw.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return read_record(*of, fields) if layout.record(*of).encode() == name else None


def unreadable(name: bytes, fields: Mapping[bytes, bytes]) -> str:
    """Why readers of this version miss the HASH `name`; empty if they can read it."""
    version = fields.get(b"v", b"")[:_VERSION_BYTES_SHOWN].decode("utf-8", "replace")
    if version != layout.VERSION:
        return f"of version {version}" if version else "without a version: not written by a node"
    return "" if read_named_record(name, fields) else "garbled, without a location, or misnamed"


def _read_locations(
    fields: Mapping[bytes, bytes],
) -> tuple[tuple[Location, ...], tuple[DeviceLocation, ...]]:
    locations, devices = [], []
    for name in filterfalse(_DESCRIPTION.__contains__, fields):
        text = fields[name]
        if len(name) > _NAME_BYTES_MAX or len(text) > _TEXT_BYTES_MAX:
            continue
        kind, node = _node_in(name)
        try:
            if kind == b"at:":
                locations.append(Location.parse(node, text.decode()))
            elif kind == b"on:":
                devices.append(DeviceLocation.parse(node, text.decode()))
        except ValueError:
            continue  # a garbled location does not hide the others
    del locations[LOCATIONS_MAX:]  # publishers write no more; readers keep them, and try each
    return tuple(locations), _beside(devices, locations) if devices else ()


def _beside(devices: list[DeviceLocation], locations: list[Location]) -> tuple[DeviceLocation, ...]:
    """Those whose node has a location. Older publishers may leave a device location without one."""
    nodes = {location.node for location in locations}
    return tuple(device for device in devices if device.node in nodes)


@lru_cache(maxsize=4096)  # a fleet has few nodes
def _node_in(name: bytes) -> tuple[bytes, str]:
    """Split the field `name` into its prefix, at: or on:, and the node; empty for another field."""
    kind, node = name[:3], name[3:].decode("ascii", "replace")
    return (kind, node) if kind in (b"at:", b"on:") and SAFE_NAME.match(node) else (b"", "")


@lru_cache(maxsize=1024)  # a fleet has few shapes
def _read_tensor(
    dtype: bytes, shape: bytes, nbytes: bytes, kind: bytes
) -> tuple[str, tuple[int, ...], int, str]:
    return dtype.decode("ascii"), _read_shape(shape), read_count(nbytes), _KINDS[kind]


@lru_cache(maxsize=1024)  # a fleet has few kinds of devices
def _read_device(value: bytes) -> str:
    """Empty if garbled: no decision depends on it."""
    text = value.decode("ascii", "replace")
    return text if DEVICE.match(text) else ""


def _read_shape(text: bytes) -> tuple[int, ...]:
    match = _SHAPE.match(text)
    if not match:
        raise ValueError("not a shape")
    shape = tuple(int(dimension) for dimension in (match[1] or b"").split(b",") if dimension)
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError("too many dimensions")
    return shape
