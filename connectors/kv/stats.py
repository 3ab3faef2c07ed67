"""What vLLM's own statistics carry of the KV connector.

Made in scheduler and workers, merged and printed in the API server.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from connectors.event_counts import EventCounts


@dataclass
class KvStats(EventCounts, KVConnectorStats):
    """See `EventCounts`."""

    data: dict[str, int] = field(default_factory=dict)
