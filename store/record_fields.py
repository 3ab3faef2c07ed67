"""How a record is written in its HASH: fields, and what becomes of what is garbled.

Pure. Part of the contract of `layout`, which names the keys.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import filterfalse

from store import layout
from store.layout import key_field, read_count
from store.record import DEVICE, SAFE_NAME, DeviceLocation, Location, Record

_RECORD_NAME = re.compile(rb"lb:rec:([A-Za-z0-9._-]{1,128}):\{([^{}]+)\}\Z")
_SHAPE = re.compile(rb"\[(\d+(?:,\d+)*)?\]\Z")
_DIMENSIONS_MAX = 16
_CREATED_LIMIT = 1e11  # seconds, the year 5138: what is later no calendar can show
_DESCRIPTION = frozenset(
    [b"v", b"key", b"dtype", b"shape", b"nbytes", b"kind", b"created", b"device"]
)
"""The fields of a record beside its locations: passed over without a call for each."""
_KINDS = {b"tensor": "tensor", b"none": "none"}


def identity_fields(record: Record) -> list[str | int | bytes]:
    """Fields and values, alternating, that two publishers of one key have to agree on."""
    shape = f"[{','.join(map(str, record.shape))}]"
    key = key_field(record.key)
    return [
        "v", layout.VERSION, *(("key", key) if key else ()), "dtype", record.dtype,
        "shape", shape, "nbytes", record.nbytes, "kind", record.kind,
    ]  # fmt: skip


def read_record(namespace: str, key: str, fields: Mapping[bytes, bytes]) -> Record | None:
    """The record in the HASH of `key`; None where it is absent, garbled, or another key's.

    Garbled is a miss and no error: nobody who looks a key up could do anything about it.
    """
    try:
        if not fields or fields[b"v"] != b"1":
            return None
        raw = key_field(key)
        if raw and fields[b"key"] != raw:
            return None  # hashes that collide
        locations, devices = _read_locations(fields)
        if not locations:
            return None  # nobody to fetch from; withdraw never leaves such a record behind
        tensor = fields[b"dtype"], fields[b"shape"], fields[b"nbytes"], fields[b"kind"]
        created = float(fields[b"created"])
        if not 0 <= created < _CREATED_LIMIT:  # nor is NaN
            return None
        device = _read_device(fields.get(b"device", b""))
        return Record(namespace, key, *_read_tensor(*tensor), created, locations, devices, device)
    except (KeyError, ValueError):
        return None


def read_named_record(name: bytes, fields: Mapping[bytes, bytes]) -> Record | None:
    """The record in a HASH that was found by its name, as by a walk; None likewise."""
    match = _RECORD_NAME.match(name)
    if not match:
        return None
    namespace, spelled = match.groups()
    raw = fields.get(b"key", b"") if spelled.startswith(layout.HASHED.encode()) else spelled
    try:
        of = (namespace.decode(), raw.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return read_record(*of, fields) if layout.record(*of).encode() == name else None


def unreadable(name: bytes, fields: Mapping[bytes, bytes]) -> str:
    """Why readers of this version miss what is in the HASH `name`; empty where they do not."""
    version = fields.get(b"v", b"").decode("utf-8", "replace")
    if version != layout.VERSION:
        return f"of version {version}" if version else "without a version: no node wrote it"
    return "" if read_named_record(name, fields) else "garbled, without a copy, or misnamed"


def _read_locations(
    fields: Mapping[bytes, bytes],
) -> tuple[tuple[Location, ...], tuple[DeviceLocation, ...]]:
    locations, devices = [], []
    for name in filterfalse(_DESCRIPTION.__contains__, fields):
        kind, node = _node_in(name)
        try:
            if kind == b"at:":
                locations.append(Location.parse(node, fields[name].decode()))
            elif kind == b"on:":
                devices.append(DeviceLocation.parse(node, fields[name].decode()))
        except ValueError:
            continue  # one garbled copy is no reason to miss the others
    return tuple(locations), _beside(devices, locations) if devices else ()


def _beside(devices: list[DeviceLocation], locations: list[Location]) -> tuple[DeviceLocation, ...]:
    """Those that stand beside a location: what an older publisher leaves behind counts for none."""
    nodes = {location.node for location in locations}
    return tuple(device for device in devices if device.node in nodes)


@lru_cache(maxsize=4096)  # a fleet has few nodes
def _node_in(name: bytes) -> tuple[bytes, str]:
    """What the field `name` holds, at: or on:, and of which node; nothing where something else."""
    kind, node = name[:3], name[3:].decode("ascii", "replace")
    return (kind, node) if kind in (b"at:", b"on:") and SAFE_NAME.match(node) else (b"", "")


@lru_cache(maxsize=1024)  # a fleet has few shapes
def _read_tensor(
    dtype: bytes, shape: bytes, nbytes: bytes, kind: bytes
) -> tuple[str, tuple[int, ...], int, str]:
    return dtype.decode("ascii"), _read_shape(shape), read_count(nbytes), _KINDS[kind]


@lru_cache(maxsize=1024)  # a fleet has few kinds of devices
def _read_device(value: bytes) -> str:
    """Empty where it is garbled: nothing depends on it."""
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
