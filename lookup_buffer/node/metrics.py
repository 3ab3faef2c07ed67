"""The node's metrics: their names, labels and meaning. Data; `exposition` makes them a page.

By the conventions of Prometheus: the unit comes last, counters end in `_total`, every label has a
closed set of values, all of which are there from the start, so that a rate sees the first event.
docs/metrics.md explains each, and a test compares the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from lookup_buffer.node.counters import CLAIM_ANSWERS, FETCH_FAILURES, MISS_REASONS, REMOVAL_REASONS
from lookup_buffer.protocol.fields import LANES, Fallback

PREFIX: Final = "lookup_buffer_"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `series` maps its labels' values to a counter or gauge of the node."""

    kind: Literal["counter", "gauge"]
    name: str
    """Without the prefix, and without the `_total` that a counter ends in."""
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
        "Readers that got a tensor, by who had put it into the arena, or by a lane.",
        _by("hits_", ("local", "remote", "lane")), ("source",),
    ),
    Family(
        "counter", "hit_bytes", "Bytes of the tensors that readers got, likewise.",
        _by("bytes_hit_", ("local", "remote", "lane")), ("source",),
    ),
    Family(
        "counter", "encodes_saved", "Outputs that engines got, which they need not encode.",
        _plain("encodes_saved"),
    ),
    Family(
        "counter", "misses", "Readers that got no tensor, by reason.",
        _by("misses_", MISS_REASONS), ("reason",),
    ),
    Family(
        "counter", "fetch_failures", "Other nodes that did not deliver a tensor, by reason.",
        _by("fetches_failed_", FETCH_FAILURES), ("reason",),
    ),
    Family(
        "counter", "transfer_bytes", "Bytes of tensors that came or went, by way.",
        {
            ("received", "shm"): "bytes_inserted",
            ("received", "tcp"): "bytes_fetched",
            ("sent", "tcp"): "bytes_served",
            **{("received", lane): f"bytes_lane_{lane}" for lane in LANES},
        },
        ("direction", "pipe"),
    ),
    Family(
        "counter", "lane_receptions", "Tensors that came from device to device, by lane.",
        _by("lane_received_", LANES), ("lane",),
    ),
    Family(
        "counter", "lane_fallbacks",
        "Tensors that could have come by a lane and came over the hosts, by reason.",
        _by("lane_fallbacks_", Fallback), ("reason",),
    ),
    Family(
        "counter", "inserts", "Tensors that clients inserted, by outcome.",
        _by("inserts_", ("stored", "exists", "refused")), ("outcome",),
    ),
    Family(
        "counter", "removals", "Tensors that left the arena before anybody took them, by reason.",
        _by("", REMOVAL_REASONS), ("reason",),
    ),
    Family(
        "counter", "handoffs", "Hand-offs that were taken, came back, or were dropped, by outcome.",
        _by("handoffs_", ("taken", "returned", "elsewhere")), ("outcome",),
    ),
    Family(
        "counter", "claims", "Answers to engines that wanted to encode, by outcome.",
        _by("claims_", CLAIM_ANSWERS), ("outcome",),
    ),
    Family(
        "counter", "publications", "Records written to the store, by outcome.",
        _by("publish_", ("written", "refused", "conflict")), ("outcome",),
    ),
    Family(
        "counter", "store_failures", "Turns of the writer to the store that failed.",
        _plain("store_failures"),
    ),
    Family(
        "counter", "protocol_errors", "Connections that were ended because they made no sense.",
        _plain("protocol_errors"),
    ),
    Family(
        "counter", "sessions_opened", "Clients that attached.", _plain("sessions_opened"),
    ),
    Family("gauge", "sessions", "Clients that are attached.", _plain("sessions")),
    Family("gauge", "items", "Tensors in the arena.", _plain("items")),
    Family("gauge", "pins", "Holds of readers and of transfers on tensors.", _plain("pins")),
    Family("gauge", "arena_capacity_bytes", "Size of the arena.", _plain("capacity_bytes")),
    Family("gauge", "arena_used_bytes", "Bytes of the arena in use.", _plain("used_bytes")),
    Family("gauge", "arena_pinned_bytes", "Bytes that are held.", _plain("pinned_bytes")),
    Family(
        "gauge", "arena_reserved_bytes", "Bytes that are being written.", _plain("reserved_bytes"),
    ),
    Family("gauge", "arena_handoff_bytes", "Bytes of hand-offs.", _plain("handoff_bytes")),
    Family("gauge", "claims_held", "Claims that engines of this node have.", _plain("claims")),
    Family(
        "gauge", "unpublished_records", "Changes that the store does not know yet.",
        _plain("unpublished"),
    ),
    Family("gauge", "store_up", "Whether the store answered last.", _plain("store_up")),
    Family(
        "gauge", "store_breaker_open", "Whether the store failed so often that it gets a pause.",
        _plain("store_breaker_open"),
    ),
    Family("gauge", "nodes_alive", "Nodes that live, as this one sees it.", _plain("nodes_alive")),
)  # fmt: skip
HISTOGRAMS: Final = {
    "fetch_seconds":
        "Seconds from the request to another node until its tensor was in the arena, verified.",
    "encode_seconds":
        "Seconds from an engine's step that encodes until the output was in the arena.",
}  # fmt: skip
"""By the name that `Counters` has for them, too."""
BUILD_INFO: Final = ("build_info", "Always 1; its labels say who this node is and what it speaks.")
BUILD_LABELS: Final = ("node", "version", "protocol")
