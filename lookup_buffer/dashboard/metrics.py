"""The node's metrics: their names, labels and help texts. Data; `exposition` makes a page of it.

By the conventions of Prometheus: the unit comes last, counters end in `_total`, and every label has
a closed set of values, all present from the start, so that a rate includes the first event.
docs/metrics.md explains each metric, and a test compares the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lookup_buffer.node.counters import CLAIM_ANSWERS, FETCH_FAILURES, MISS_REASONS, REMOVAL_REASONS
from lookup_buffer.protocol.fields import LANES, Fallback

PREFIX: Final = "lookup_buffer_"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `series` maps label values to a counter or gauge of the node."""

    kind: Literal["counter", "gauge"]
    name: str
    """Without the prefix, and without the `_total` of counters."""
    text: str
    series: Mapping[tuple[str, ...], str]
    labels: tuple[str, ...] = field(default=())


def _plain(name: str) -> dict[tuple[str, ...], str]:
    return {(): name}


def _by(prefix: str, values: Iterable[str]) -> dict[tuple[str, ...], str]:
    return {(value,): f"{prefix}{value}" for value in values}


FAMILIES: Final = (
    Family(
        "counter", "hits",
        "Reads that got a tensor, by source: inserted on this host, fetched, or by a lane.",
        _by("hits_", ("local", "remote", "lane")), ("source",),
    ),
    Family(
        "counter", "hit_bytes", "Bytes of tensors read, by the same sources.",
        _by("bytes_hit_", ("local", "remote", "lane")), ("source",),
    ),
    Family(
        "counter", "encodes_saved", "Encoder outputs that engines read instead of encoding.",
        _plain("encodes_saved"),
    ),
    Family(
        "counter", "misses", "Reads that got no tensor, by reason.",
        _by("misses_", MISS_REASONS), ("reason",),
    ),
    Family(
        "counter", "fetch_failures", "Failed fetches from another node, by reason.",
        _by("fetches_failed_", FETCH_FAILURES), ("reason",),
    ),
    Family(
        "counter", "transfer_bytes", "Bytes of tensors transferred, by direction and pipe.",
        {
            ("received", "shm"): "bytes_inserted",
            ("received", "tcp"): "bytes_fetched",
            ("sent", "tcp"): "bytes_served",
            **{("received", lane): f"bytes_lane_{lane}" for lane in LANES},
        },
        ("direction", "pipe"),
    ),
    Family(
        "counter", "lane_receptions", "Tensors received from device to device, by lane.",
        _by("lane_received_", LANES), ("lane",),
    ),
    Family(
        "counter", "lane_fallbacks",
        "Transfers that fell back from a lane to the hosts, by reason.",
        _by("lane_fallbacks_", Fallback), ("reason",),
    ),
    Family(
        "counter", "inserts", "Inserts of clients, by outcome.",
        _by("inserts_", ("stored", "exists", "refused")), ("outcome",),
    ),
    Family(
        "counter", "removals", "Items removed from the arena other than by a taker, by reason.",
        _by("", REMOVAL_REASONS), ("reason",),
    ),
    Family(
        "counter", "handoffs", "Hand-offs taken, given back, or dropped, by outcome.",
        _by("handoffs_", ("taken", "returned", "elsewhere")), ("outcome",),
    ),
    Family(
        "counter", "claims", "Answers to requests for a claim, by outcome.",
        _by("claims_", CLAIM_ANSWERS), ("outcome",),
    ),
    Family(
        "counter", "publications", "Records written to the store, by outcome.",
        _by("publish_", ("written", "refused", "conflict")), ("outcome",),
    ),
    Family(
        "counter", "store_failures", "Failed attempts of the metadata writer.",
        _plain("store_failures"),
    ),
    Family(
        "counter", "protocol_errors", "Connections closed for invalid messages.",
        _plain("protocol_errors"),
    ),
    Family(
        "counter", "sessions_opened", "Sessions that clients opened.", _plain("sessions_opened"),
    ),
    Family("gauge", "sessions", "Open sessions of clients.", _plain("sessions")),
    Family("gauge", "items", "Tensors in the arena.", _plain("items")),
    Family("gauge", "pins", "Pins of readers and transfers.", _plain("pins")),
    Family("gauge", "arena_capacity_bytes", "Size of the arena.", _plain("capacity_bytes")),
    Family("gauge", "arena_used_bytes", "Bytes of the arena in use.", _plain("used_bytes")),
    Family("gauge", "arena_pinned_bytes", "Bytes that are pinned.", _plain("pinned_bytes")),
    Family(
        "gauge", "arena_reserved_bytes", "Bytes reserved for writes in flight.",
        _plain("reserved_bytes"),
    ),
    Family("gauge", "arena_handoff_bytes", "Bytes of hand-offs.", _plain("handoff_bytes")),
    Family("gauge", "claims_held", "Claims held by engines of this node.", _plain("claims")),
    Family(
        "gauge", "unpublished_records", "Changes not yet written to the store.",
        _plain("unpublished"),
    ),
    Family("gauge", "store_up", "1 if the last write to the store succeeded.", _plain("store_up")),
    Family(
        "gauge", "store_breaker_open", "1 while the store's circuit breaker is open.",
        _plain("store_breaker_open"),
    ),
    Family(
        "gauge", "nodes_alive", "Live nodes of the fleet, as seen by this node.",
        _plain("nodes_alive"),
    ),
)  # fmt: skip
HISTOGRAMS: Final = {
    "fetch_seconds":
        "Seconds from a fetch's request until its tensor was in the arena, verified.",
    "encode_seconds":
        "Seconds from the start of an engine's encode until its output was in the arena.",
    "loop_blocked_seconds":
        "Seconds for which the node's loop answered no other request, above 20 ms.",
}  # fmt: skip
"""By the name in the node's answer to `Metrics`."""
BUILD_INFO: Final = ("build_info", "Always 1; the labels are the node's id, version and protocol.")
BUILD_LABELS: Final = ("node", "version", "protocol")
