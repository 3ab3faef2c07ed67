"""Messages between the scheduler side and the workers for one step, in both directions.

`KvScheduler.build_metadata` makes `KvStepMetadata` in the scheduler's thread. vLLM pickles it and
sends it to every rank. `KvWorker` reads it, and returns a `KvWorkerReport`. Plain data without vLLM
or torch.
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
    """Index in the chunk of the block that is copied to the first of `blocks`. vLLM has the blocks
    before it."""
    orders: tuple["LoadOrder", ...] = ()
    """The position of each rank's bytes in the arena, pinned until the request's load has ended.
    Empty for a hand-off."""
    transfer: str = ""
    """The id of its hand-off; empty without one. The worker must take such a chunk out of the
    buffer even if `blocks` is empty."""


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
    """Whether the step runs no model. vLLM would then poll for the end of a load."""
    written: list[int] = field(default_factory=list)
    """Blocks that this step or a later one overwrites. Queued chunks in them are copied out before
    this step."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[ChunkSave] = field(default_factory=list)
    namespace: str = ""
    """The namespace's fingerprint for loads and saves, which only the scheduler side determines.
    Empty: nothing is shared."""


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
