"""Our counters on vLLM's own `/metrics`, as `vllm:lookup_buffer_ec_*`. Needs vLLM 0.31.

Made once in the API server; `observe` gets what scheduler and workers counted since the last time.
A counter of ours is an event and, behind a colon, its reason; a family here takes one event or a
few, and its one label tells them apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics

REASONS_MAX: Final = 64
"""Values of one label; more are counted as `other`. Reasons are words of ours, and few."""
OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `events` maps an event to its value of `label`; "" stands for the event's own
    reason."""

    name: str
    text: str
    label: str = ""
    events: Mapping[str, str] = field(default_factory=dict)


FAMILIES: Final = (
    Family(
        "vllm:lookup_buffer_ec_loads",
        "Encoder outputs loaded instead of encoded, by where their bytes came from.",
        "source",
        {"load_local": "local", "load_remote": "remote", "load_lane": "lane"},
    ),
    Family(
        "vllm:lookup_buffer_ec_loaded_bytes",
        "Bytes of encoder outputs loaded, by where they came from.",
        "source",
        {
            "loaded_local_bytes": "local",
            "loaded_remote_bytes": "remote",
            "loaded_lane_bytes": "lane",
        },
    ),
    Family(
        "vllm:lookup_buffer_ec_misses",
        "Items looked up and not to be had in time, by reason; they were encoded here.",
        "reason",
        {"miss": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_saves",
        "Encoder outputs offered to the buffer, by outcome.",
        "outcome",
        {"saved": "stored", "save_exists": "exists"},
    ),
    Family(
        "vllm:lookup_buffer_ec_saves_skipped",
        "Encoder outputs that were not stored, by reason.",
        "reason",
        {"save_skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_items_not_shared",
        "Items that stay on their instance, by reason.",
        "reason",
        {"skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_encodes_skipped",
        "Items that a pure producer need not encode, for they are stored already.",
        events={"encode_skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_claims",
        "Sets of claims that requests asked for before they encode, by how that went.",
        "outcome",
        {"claim": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_encodes_despite_holder",
        "Items encoded here while another instance had the claim, for the wait was over.",
        events={"encode": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_unavailable_requests",
        "Requests that failed, for they carried no media and nobody delivered the item.",
        events={"unavailable": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_prefetches_over_budget",
        "Requests that went on without being prefetched for, as prefetch_bytes was used up.",
        events={"over_budget": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_broken_promises",
        "Promised items that did not load at once: late, misfit, or lost, which ends the engine.",
        "outcome",
        {"load_late": "late", "load_lost": "lost", "load_misfit": "misfit"},
    ),
    Family(
        "vllm:lookup_buffer_ec_device_faults",
        "What a GPU did not do: pin an arena for quick loads, or copy.",
        "what",
        {"arena_not_pinned": "arena_not_pinned", "copy_failed": "copy_failed"},
    ),
)


class EcPromMetrics(ECConnectorPromMetrics):
    """Arguments as vLLM gives them to `build_prom_metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._by_event: dict[str, tuple[Family, Any, set[str]]] = {}
        for family in FAMILIES:
            labels = [*labelnames, family.label] if family.label else list(labelnames)
            metric = counter(name=family.name, documentation=family.text, labelnames=labels)
            values: set[str] = set()
            for event in family.events:
                self._by_event[event] = (family, metric, values)
            self._begin_at_zero(family, metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            event, _, reason = name.partition(":")
            found = self._by_event.get(event)
            if found is None:
                continue
            family, metric, values = found
            labels = list(self.per_engine_labelvalues[engine_idx])
            if family.label:
                labels.append(_bounded(family.events[event] or reason or OTHER, values))
            metric.labels(*labels).inc(count)

    def _begin_at_zero(self, family: Family, metric: Any) -> None:
        """What is known to come is there from the start, so that a rate sees the first one."""
        for labels in self.per_engine_labelvalues.values():
            if not family.label:
                metric.labels(*labels)
            for value in filter(None, family.events.values()):
                metric.labels(*labels, value)


def _bounded(value: str, values: set[str]) -> str:
    if value not in values and len(values) >= REASONS_MAX:
        return OTHER
    values.add(value)
    return value
