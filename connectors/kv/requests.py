"""What the scheduler side knows of one request: its chunks, its pins, its hand-offs.

Both `scheduler.py` and `handoffs.py` work on it, in vLLM's scheduler thread.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from connectors.kv.chunks import ChunkChain
    from lookup_buffer.client.handles import LoadOrder, PrefetchHandle


@dataclass(slots=True, eq=False)
class ChunkPin:
    """One requested chunk: a handle for each rank."""

    name: str
    handles: "list[PrefetchHandle]"

    @property
    def state(self) -> PrefetchState:
        """RESIDENT if the parts of all ranks are. FAILED or MISSING if one part is. Otherwise
        PENDING."""
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
    """The scheduler side's state of one request."""

    request: Any
    """vLLM's request."""
    chain: "ChunkChain | None"
    """None if nothing of the request may be shared."""
    pins: list[ChunkPin] = field(default_factory=list)
    """The requested chunks, in order from chunk number `first` on."""
    first: int = 0
    present: int = 0
    """The number of leading `pins` that are known to be on this host."""
    is_requested: bool = False
    deadline: float = 0.0
    """Until when it may wait for chunks in flight, for the budget of pins, or for its hand-off; 0
    before it waits."""
    look_again_at: float = math.inf
    """When to request the chunks again that were not there, if vLLM still has no room for it."""
    computed: int = 0
    """Tokens that vLLM had computed at its last call of `matched`."""
    loading: bool = False
    """A load was announced to vLLM, and its end is not reported yet."""
    failed: bool = False
    """A load failed: vLLM computes the missing KV, even if the buffer has it."""
    blocks: list[int] = field(default_factory=list)
    """vLLM's blocks for its tokens, as far as vLLM has reported them."""
    outgoing: str = ""
    """The transfer id under which this engine hands over its prompt's KV; empty without one."""
    is_sent: bool = False
    """The saves of the outgoing hand-off are in a step's metadata."""
    incoming: str = ""
    """The transfer id of the hand-off to this engine, until that is loaded or abandoned."""
    has_arrived: bool | None = None
    """Whether all pieces of the incoming hand-off are in the buffer; None: not looked yet."""
    stored: int = 0
    """The number of its leading chunks that are in the buffer or need not be stored."""
