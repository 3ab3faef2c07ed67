"""The messages between scheduler side and workers for one step.

`EcScheduler.build_metadata` writes `StepMetadata` on vLLM's scheduler thread. vLLM pickles it and
carries it to each rank, where `EcWorker` reads it. `WorkerCounts` goes the other way. Plain data
without vLLM or torch.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.ec.outputs import Form

if TYPE_CHECKING:
    from lookup_buffer.client.handles import LoadOrder


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """An item to put into vLLM's encoder cache before the model runs.

    The names `mm_hash` and `num_token` are vLLM's convention; its tests rely on them.
    """

    mm_hash: str
    num_token: int
    order: "LoadOrder | None"
    """The pinned bytes. None only if the hit was not promised by this connector; the worker then
    looks the item up by its key."""
    key: str | None = None
    """Text of the key; None in the same case as `order`."""


@dataclass(slots=True)
class StepMetadata:
    """The loads and saves of one step."""

    mm_datas: list[ItemLoad] = field(default_factory=list)
    """Only the loads."""
    saves: dict[str, str] = field(default_factory=dict)
    """Items that this step encodes and that may be stored: identifier -> text of the key."""
    encodes: set[str] = field(default_factory=set)
    """Identifiers of all items that this step encodes from media."""
    lost: dict[str, str] = field(default_factory=dict)
    """Items in vLLM's own cache that are no longer stored and are to be stored again: identifier ->
    text of the key."""
    namespace: str = ""
    """The namespace of the keys; only the scheduler side computes it. Empty: nothing is shared."""


@dataclass(slots=True)
class WorkerCounts:
    """Counts of one worker since the previous step; vLLM adds up those of all ranks."""

    counts: dict[str, int]
    encoded: set[Form] = field(default_factory=set)
    """Dtype and width of outputs that the worker encoded; each is reported once."""

    def aggregate(self, other: "WorkerCounts") -> "WorkerCounts":
        names = self.counts.keys() | other.counts.keys()
        counts = {n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names}
        return WorkerCounts(counts, self.encoded | other.encoded)
