"""What the scheduler side tells the workers about one step, and what they tell it.

Written by `EcScheduler.build_metadata` in the scheduler's thread, carried to every rank by vLLM's
own channel (which pickles; we never do), read by `EcWorker`. Plain data without vLLM or torch.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.ec.outputs import Form

if TYPE_CHECKING:
    from lookup_buffer.client.handles import LoadOrder


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """One item to be put into the engine's encoder cache before the model runs.

    The names `mm_hash` and `num_token` are vLLM's own convention, which its tests rely on.
    """

    mm_hash: str
    num_token: int
    order: "LoadOrder | None"
    """Where the bytes lie, pinned. None only if a hit was promised by somebody else than us; the
    worker then has to look for it."""
    key: str | None = None
    """Text of the key; None as above."""


@dataclass(slots=True)
class StepMetadata:
    """Loads and saves of one step."""

    mm_datas: list[ItemLoad] = field(default_factory=list)
    """The loads, and nothing but the loads."""
    saves: dict[str, str] = field(default_factory=dict)
    """Items that are encoded in this step and may be stored: identifier -> text of the key."""
    encodes: set[str] = field(default_factory=set)
    """Identifiers of all items that are encoded in this step from media of their own."""
    lost: dict[str, str] = field(default_factory=dict)
    """Items of vLLM's own encoder cache that are no longer stored, to be stored again; likewise."""
    namespace: str = ""
    """Under which they are; the scheduler side alone knows it. Empty: nothing is shared."""


@dataclass(slots=True)
class WorkerCounts:
    """What a worker counted since the step before; vLLM adds up those of all ranks."""

    counts: dict[str, int]
    encoded: set[Form] = field(default_factory=set)
    """What outputs looked like that it encoded, each told once."""

    def aggregate(self, other: "WorkerCounts") -> "WorkerCounts":
        names = self.counts.keys() | other.counts.keys()
        counts = {n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names}
        return WorkerCounts(counts, self.encoded | other.encoded)
