"""What vLLM's own statistics carry of us: counts per event and reason since the last report.

Made in scheduler and workers, merged and printed in the API server. Needs vLLM 0.31.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats


@dataclass
class EcStats(ECConnectorStats):
    """`data` maps a counter's name to what it grew by."""

    data: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> "EcStats":
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data
