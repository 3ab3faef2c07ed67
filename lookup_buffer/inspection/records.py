"""Records, sizes and ages as the commands show them: as text, and in the stable JSON form.

`hits_of` reads the store, on the caller's thread. It must not depend on single commands.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from store import BlockingStore, Location, Record

_AGES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))
_HITS_PER_REQUEST = 1000


def hits_of(store: BlockingStore, records: Sequence[Record]) -> dict[tuple[str, str], int]:
    """Hits by (namespace, key), read in requests of at most _HITS_PER_REQUEST keys."""
    by_namespace: dict[str, list[str]] = {}
    for record in records:
        by_namespace.setdefault(record.namespace, []).append(record.key)
    hits = {}
    for namespace, keys in by_namespace.items():
        for start in range(0, len(keys), _HITS_PER_REQUEST):
            page = keys[start : start + _HITS_PER_REQUEST]
            for key, count in zip(page, store.hits(namespace, page), strict=True):
                hits[namespace, key] = count
    return hits


def nodes_of(records: Iterable[Record]) -> set[str]:
    return {location.node for record in records for location in record.locations}


def to_json(record: Record, hits: int, monitor: HeartbeatMonitor) -> dict[str, Any]:
    """The stable JSON form of a record.

    An offered location (a hand-off that waits for room on that node) has no checksum yet. `lane` is
    the kind of lane by which a device of that node sends the tensor, or None.
    """
    lanes = {device.node: device.kind for device in record.devices}
    return {
        "namespace": record.namespace,
        "key": record.key,
        "kind": record.kind,
        "device": record.device or None,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "nbytes": record.nbytes,
        "created": record.created,
        "age_seconds": round(age_since(record.created), 3),
        "hits": hits,
        "locations": [
            {
                **location._asdict(),
                "checksum": None if location.is_offer else f"{location.checksum:016x}",
                "offered": location.is_offer,
                "alive": monitor.alive(location.node, location.boot),
                "lane": lanes.get(location.node),
            }
            for location in record.locations
        ],
    }


def tensor_text(record: Record) -> str:
    """Dtype and shape as text: `bfloat16 729x1152`; `none` for a stored None."""
    if record.kind == "none":
        return "none"
    return f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def nodes_text(record: Record, monitor: HeartbeatMonitor) -> str:
    """`+host-a -host-b ~host-c`: alive; not alive; alive, but the item is only offered."""
    return " ".join(_mark(location, monitor) + location.node for location in record.locations)


def _mark(location: Location, monitor: HeartbeatMonitor) -> str:
    if not monitor.alive(location.node, location.boot):
        return "-"
    return "~" if location.is_offer else "+"


def size_text(nbytes: float) -> str:
    """A size as text: `1.6 MiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1023.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def age_text(seconds: float) -> str:
    """An age as text: `5 min`. The largest unit of which there is at least one, rounded down."""
    for unit_seconds, unit in _AGES:
        if seconds >= unit_seconds:
            return f"{int(seconds // unit_seconds)} {unit}"
    return "0 s"


def age_since(created: float) -> float:
    """Seconds since `created`, the wall clock of the first publisher; never negative."""
    return max(0.0, time.time() - created)
