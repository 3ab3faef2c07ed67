"""The KV connector's counters in vLLM's statistics and on its `/metrics`, as
`vllm:lookup_buffer_kv_*`.

Scheduler and workers make `KvStats`; the API server merges and logs them. `KvPromMetrics` runs in
the API server. `connectors.counters` does the counting.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.counters import CountedFamilies, EventCounts, Family
from lookup_buffer.errors import MissReason


@dataclass
class KvStats(EventCounts, KVConnectorStats):
    """See `EventCounts`."""

    data: dict[str, int] = field(default_factory=dict)


FAMILIES: Final = (
    Family(
        "vllm:lookup_buffer_kv_loads",
        "KV chunks scheduled to be loaded instead of computed, by the source of their bytes.",
        "source",
        {"load_local": "local", "load_remote": "remote"},
    ),
    Family(
        "vllm:lookup_buffer_kv_loaded_bytes",
        "Bytes of these chunks, by source.",
        "source",
        {"loaded_local_bytes": "local", "loaded_remote_bytes": "remote"},
    ),
    Family(
        "vllm:lookup_buffer_kv_loaded_tokens",
        "Prompt tokens of which the KV is loaded instead of computed.",
        events={"loaded_tokens": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_misses",
        "Requests with a chunk that was not available in time, by the reason of the first one.",
        "reason",
        {"miss": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_load_failures",
        "Requests whose KV failed to load and is computed, by reason.",
        "reason",
        {"load_failed": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_saves",
        "Chunks offered to the buffer, by outcome.",
        "outcome",
        {"saved": "stored", "save_exists": "exists"},
    ),
    Family(
        "vllm:lookup_buffer_kv_saves_skipped",
        "Chunks that were not stored, by reason.",
        "reason",
        {"save_skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_handoffs",
        "Requests whose KV was handed over by a transfer id: out to another engine, in from one.",
        "direction",
        {"handoff_sent": "out", "handoff_received": "in"},
    ),
    Family(
        "vllm:lookup_buffer_kv_handoffs_refused",
        "Requests whose kv_transfer_params were ignored, because behind_router is off.",
        events={"handoff_refused": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_copied_early",
        "Chunks that the model's thread copied itself because vLLM reused their blocks.",
        events={"copied_early": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_requests_not_shared",
        "Requests that are not shared, by reason.",
        "reason",
        {"skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_prefetches_over_budget",
        "Requests that prefetched fewer chunks than they could use: prefetch_bytes was used up.",
        events={MissReason.OVER_BUDGET.value: ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_device_faults",
        "Faults of a GPU: it did not pin an arena for fast loads.",
        "what",
        {"arena_not_pinned": "arena_not_pinned"},
    ),
)


class KvPromMetrics(KVConnectorPromMetrics):
    """Arguments as vLLM gives them to `build_prom_metrics`."""

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
