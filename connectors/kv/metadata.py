"""What the scheduler side tells the workers about one step, and what they tell it.

Written by `KvScheduler.build_metadata` in the scheduler's thread, carried to every rank by vLLM's
own channel (which pickles; we never do), read by `KvWorker`. Plain data without vLLM or torch.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookup_buffer.client.handles import LoadOrder


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """One chunk, or its last blocks, to be copied from the arena."""

    name: str
    blocks: tuple[int, ...]
    """Where to, by vLLM's numbers."""
    first: int
    """Which block of the chunk goes into the first of them; those before it are here already."""
    orders: tuple["LoadOrder", ...] = ()
    """Where the bytes of each rank lie, pinned until the request's load has ended; none of what was
    handed over."""
    transfer: str = ""
    """The id under which it was handed over: it is to be taken away, even if no block needs it."""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    request_id: str
    chunks: tuple[ChunkLoad, ...]


@dataclass(frozen=True, slots=True)
class ChunkSave:
    """One chunk that this step completes."""

    name: str
    blocks: tuple[int, ...]
    transfer: str = ""
    """The id under which it is handed over, instead of stored for everybody."""


@dataclass(slots=True)
class KvStepMetadata:
    """Loads and saves of one step."""

    is_idle: bool = False
    """Whether the step runs no model: vLLM would only ask again, at once, whether a load ended."""
    written: list[int] = field(default_factory=list)
    """Blocks that get new content from this step on: what of them is still to be stored is copied
    before."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[ChunkSave] = field(default_factory=list)
    namespace: str = ""
    """Of loads and saves; the scheduler side alone knows it. Empty: nothing is shared."""


@dataclass(slots=True)
class KvWorkerReport:
    """What a worker counted since the step before, and whose load failed; vLLM adds up those of all
    ranks."""

    counts: dict[str, int]
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: "KvWorkerReport") -> "KvWorkerReport":
        names = self.counts.keys() | other.counts.keys()
        counts = {n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names}
        return KvWorkerReport(counts, self.failed | other.failed)
