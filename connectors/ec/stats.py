"""The encoder-cache connector's part of vLLM's own statistics and of its `/metrics`.

vLLM makes `EcStats` in scheduler and workers, and merges and prints them in the API server. That
makes `EcPromMetrics` too, which publishes the counters as `vllm:lookup_buffer_ec_*`. Needs vLLM
0.31.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from connectors.counters import CountedFamilies, EventCounts, Family
from lookup_buffer.errors import MissReason


@dataclass
class EcStats(EventCounts, ECConnectorStats):
    """See `EventCounts`."""

    data: dict[str, int] = field(default_factory=dict)


FAMILIES: Final = (
    Family(
        "vllm:lookup_buffer_ec_loads",
        "Encoder outputs loaded instead of encoded, by source of the bytes.",
        "source",
        {"load_local": "local", "load_remote": "remote", "load_lane": "lane"},
    ),
    Family(
        "vllm:lookup_buffer_ec_loaded_bytes",
        "Bytes of encoder outputs loaded, by source.",
        "source",
        {
            "loaded_local_bytes": "local",
            "loaded_remote_bytes": "remote",
            "loaded_lane_bytes": "lane",
        },
    ),
    Family(
        "vllm:lookup_buffer_ec_misses",
        "Items looked up and not available in time, by reason; they were encoded here.",
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
        "Items that are not shared with other engines, by reason.",
        "reason",
        {"skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_encodes_skipped",
        "Items that a pure producer did not encode, because they are stored already.",
        events={"encode_skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_claims",
        "Sets of claims that requests made before an encode, by outcome.",
        "outcome",
        {"claim": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_encodes_despite_holder",
        "Items encoded here while another engine held the claim, because the wait was over.",
        events={"encode": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_unavailable_requests",
        "Requests that failed because items without media were not available, by reason.",
        "reason",
        {"unavailable": ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_prefetches_over_budget",
        "Requests that continued without a prefetch, because prefetch_bytes was used up.",
        events={MissReason.OVER_BUDGET.value: ""},
    ),
    Family(
        "vllm:lookup_buffer_ec_broken_promises",
        "Promised items that did not load at once: late, misfit, or lost, which ends the engine.",
        "outcome",
        {"load_late": "late", "load_lost": "lost", "load_misfit": "misfit"},
    ),
    Family(
        "vllm:lookup_buffer_ec_device_faults",
        "Faults of a GPU: it did not pin an arena for fast loads, or did not copy.",
        "what",
        {"arena_not_pinned": "arena_not_pinned", "copy_failed": "copy_failed"},
    ),
)


class EcPromMetrics(ECConnectorPromMetrics):
    """Arguments as vLLM passes them to `build_prom_metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counted = CountedFamilies(FAMILIES, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._counted.observe(transfer_stats_data, engine_idx)
