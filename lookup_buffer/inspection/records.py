"""Records as people and programs are shown them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lookup_buffer.cli.beat_watch import BeatWatch
from lookup_buffer.cli.output import age_since
from store import Location, MetadataStore, Record

if TYPE_CHECKING:
    from store.trace import Traces


def hits_of(store: MetadataStore, records: Sequence[Record]) -> dict[tuple[str, str], int]:
    """Hits by (namespace, key), in bounded requests."""
    by_namespace: dict[str, list[str]] = {}
    for record in records:
        by_namespace.setdefault(record.namespace, []).append(record.key)
    hits = {}
    for namespace, keys in by_namespace.items():
        for start in range(0, len(keys), 1000):
            page = keys[start : start + 1000]
            for key, count in zip(page, store.hits(namespace, page), strict=True):
                hits[namespace, key] = count
    return hits


def nodes_of(records: Iterable[Record]) -> set[str]:
    return {location.node for record in records for location in record.locations}


def to_json(record: Record, hits: int, watch: BeatWatch) -> dict[str, Any]:
    """The stable JSON form of a record. What a node only offers, a hand-off that waits for room
    there, has no checksum as yet. `lane` is by what it can be had from a device of that node."""
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
                "alive": watch.alive(location.node, location.boot),
                "lane": lanes.get(location.node),
            }
            for location in record.locations
        ],
    }


def tensor_text(record: Record) -> str:
    """`bfloat16 729x1152`; `none` for a stored None."""
    if record.kind == "none":
        return "none"
    return f"{record.dtype} {'x'.join(map(str, record.shape)) or 'scalar'}"


def nodes_text(record: Record, watch: BeatWatch) -> str:
    """`+host-a -host-b ~host-c`: alive, not alive, and alive but only offering it."""
    return " ".join(_mark(location, watch) + location.node for location in record.locations)


def _mark(location: Location, watch: BeatWatch) -> str:
    if not watch.alive(location.node, location.boot):
        return "-"
    return "~" if location.is_offer else "+"


def traces_of(store: MetadataStore) -> "Traces":
    """The closer look at single keys that only a server gives."""
    from store.redis_store import RedisStore  # slow to import, and by now it is

    assert isinstance(store, RedisStore)  # all that a node may be configured with
    return store.traces()
