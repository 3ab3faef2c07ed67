"""The KV connector's counters in vLLM's statistics and on its `/metrics`, as
`vllm:lookup_buffer_kv_*`.

`KvStats` is made in scheduler and workers, merged and printed in the API server. `KvPromMetrics`
runs in the API server. The counting itself is in `connectors.counters`.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connectors.counters import CountedFamilies, EventCounts, Family


@dataclass
class KvStats(EventCounts, KVConnectorStats):
    """See `EventCounts`."""

    data: dict[str, int] = field(default_factory=dict)


FAMILIES: Final = (
    Family(
        "vllm:lookup_buffer_kv_loads",
        "Chunks of KV promised to be loaded instead of computed, by where their bytes came from.",
        "source",
        {"load_local": "local", "load_remote": "remote"},
    ),
    Family(
        "vllm:lookup_buffer_kv_loaded_bytes",
        "Bytes of these chunks, by where they came from.",
        "source",
        {"loaded_local_bytes": "local", "loaded_remote_bytes": "remote"},
    ),
    Family(
        "vllm:lookup_buffer_kv_loaded_tokens",
        "Prompt tokens that need not be computed, for their KV is loaded.",
        events={"loaded_tokens": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_misses",
        "Requests of which a chunk was not to be had in time, by the reason of the first one.",
        "reason",
        {"miss": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_load_failures",
        "Requests whose KV did not load as promised and is computed, by reason.",
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
        "Requests whose KV was handed over by a transfer id: to another engine, or by one.",
        "direction",
        {"handed_out": "out", "taken_over": "in"},
    ),
    Family(
        "vllm:lookup_buffer_kv_copied_early",
        "Chunks that the model's thread had to copy itself, for their blocks were needed.",
        events={"copied_early": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_requests_not_shared",
        "Requests that stay on their instance, by reason.",
        "reason",
        {"skipped": ""},
    ),
    Family(
        "vllm:lookup_buffer_kv_prefetches_over_budget",
        "Requests of which less was asked for than there is, as prefetch_bytes was used up.",
        events={"over_budget": ""},
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
