"""The encoder-cache connector's part of vLLM's own statistics.

vLLM makes it in scheduler and workers, and merges and prints it in the API server. Needs vLLM 0.31.
"""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats

from connectors.counters import EventCounts


@dataclass
class EcStats(EventCounts, ECConnectorStats):
    """See `EventCounts`."""

    data: dict[str, int] = field(default_factory=dict)
