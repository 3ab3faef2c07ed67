"""What the scheduler side remembers of one request. Owned by the scheduler's thread."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from connectors.kv.chunks import ChunkChain
    from lookup_buffer.client.handles import LoadOrder, Prefetched


@dataclass(slots=True, eq=False)
class ChunkPin:
    """One chunk that was asked for: a handle for each rank."""

    name: str
    handles: "list[Prefetched]"

    @property
    def state(self) -> PrefetchState:
        """RESIDENT when all ranks' parts are, PENDING while none is known to be missing."""
        states = {handle.state for handle in self.handles}
        if states == {PrefetchState.RESIDENT}:
            return PrefetchState.RESIDENT
        for bad in (PrefetchState.FAILED, PrefetchState.MISSING):
            if bad in states:
                return bad
        return PrefetchState.PENDING

    @property
    def reason(self) -> MissReason:
        return next((handle.reason for handle in self.handles if handle.reason), MissReason.ABSENT)

    @property
    def source(self) -> str:
        local = all(handle.source == "local" for handle in self.handles)
        return "local" if local else "remote"

    @property
    def orders(self) -> "tuple[LoadOrder, ...]":
        return tuple(handle.order for handle in self.handles if handle.order is not None)


@dataclass(slots=True, eq=False)
class KvRequest:
    """See the module."""

    request: Any
    """vLLM's own."""
    chain: "ChunkChain | None"
    """None where nothing of it may be shared."""
    pins: list[ChunkPin] = field(default_factory=list)
    """What was asked for, in order from chunk `first` on."""
    first: int = 0
    present: int = 0
    """So many of them are known to be here, from the first on."""
    asked: bool = False
    deadline: float = 0.0
    """Until when it may wait for what is on its way, or for room."""
    ask_next: float = 0.0
    """When it is worth while to ask again whether it was handed over."""
    computed: int = 0
    """Tokens that vLLM had when it was last told how many there are here."""
    loading: bool = False
    """vLLM was promised a load, whose end was not heard of yet."""
    failed: bool = False
    """A load failed: what is missing is computed, whatever lies in the buffer."""
    blocks: list[int] = field(default_factory=list)
    """vLLM's blocks for its tokens, as far as it was told."""
    handed_out: str = ""
    """The id under which its prompt's KV is handed over."""
    is_handed_out: bool = False
    taken_over: str = ""
    """The id under which another engine handed it over, until that was loaded or given up."""
    is_taken_over: bool = False
    """vLLM was promised what was handed over."""
    stored: int = 0
    """So many of its first chunks are in the buffer, or need not be stored."""
