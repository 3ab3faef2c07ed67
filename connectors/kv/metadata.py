"""Messages between the scheduler side and the workers for one step, in both directions.

`KvScheduler.build_metadata` writes `KvStepMetadata` in the scheduler's thread. vLLM's own channel
carries it to every rank; it pickles, this module never does. `KvWorker` reads it, and returns a
`KvWorkerReport`. Plain data without vLLM or torch.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lookup_buffer.client.handles import LoadOrder


@dataclass(frozen=True, slots=True)
class ChunkLoad:
    """One chunk, or its last blocks, that a worker copies from the arena."""

    name: str
    blocks: tuple[int, ...]
    """The destination, by vLLM's block numbers."""
    first: int
    """Index of the block of the chunk that goes into the first of `blocks`. vLLM has those before
    it."""
    orders: tuple["LoadOrder", ...] = ()
    """Where the bytes of each rank lie, pinned until the request's load has ended. Empty for a
    hand-off."""
    transfer: str = ""
    """The id of its hand-off. The worker must take the chunk out of the buffer, even if no block
    needs it."""


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
    """The id of its hand-off to one engine; empty for a chunk that is stored for all."""


@dataclass(slots=True)
class KvStepMetadata:
    """Loads and saves of one step."""

    is_idle: bool = False
    """Whether the step runs no model. vLLM would then ask again at once whether a load has
    ended."""
    written: list[int] = field(default_factory=list)
    """Blocks that get new content from this step on. Queued chunks in them are copied out
    before."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[ChunkSave] = field(default_factory=list)
    namespace: str = ""
    """The fingerprint for loads and saves; only the scheduler side knows it. Empty: nothing is
    shared."""


@dataclass(slots=True)
class KvWorkerReport:
    """What a worker counted since the previous step, and the requests whose load failed. vLLM
    aggregates the reports of all ranks."""

    counts: dict[str, int]
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: "KvWorkerReport") -> "KvWorkerReport":
        names = self.counts.keys() | other.counts.keys()
        counts = {n: self.counts.get(n, 0) + other.counts.get(n, 0) for n in names}
        return KvWorkerReport(counts, self.failed | other.failed)
