"""The scheduler side: how much of a prompt is here, and what the workers are to load and store.

Runs in vLLM's scheduler thread. Imports neither vLLM nor torch.

The first time that a request is seen its chunks are asked for, in one message: the node brings them
to this host and pins them. vLLM is promised those that lie here, pinned, in one run from the
first that it lacks. Until that is known it is told to ask again, for a bounded time.

What the scheduler side remembers of one request. Owned by the scheduler's thread.

Chunks that were asked for and are held on this host: for which requests, within one budget.

Owned by the scheduler's thread. As `ec.pins` is for encoder outputs; but what is held is one run of
chunks, from the first that vLLM lacks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from connectors.counters import Counters, IdleTime, PassTime, PassTimes, RateLimitedLog
from connectors.identifiers import Adapters, NotShareable
from connectors.kv.chunks import ChunkChain, key_of
from connectors.kv.engine import KvShape
from connectors.kv.handoffs import Handoffs, handed_out, reply, taken_over
from connectors.kv.metadata import (
    ChunkLoad,
    ChunkSave,
    KvStepMetadata,
    KvWorkerReport,
    RequestLoad,
)
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from connectors.kv.engine import KvSettings
    from lookup_buffer.client.buffer import LookupBuffer
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


class KvPins:
    """All pins of one engine.

    Args:
        budget_bytes: bound on the bytes of all pins together.
        times: what a pass may wait for answers.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        budget_bytes: int,
        shape: "KvShape",
        times: PassTimes,
        counters: Counters,
    ) -> None:
        self._buffer = buffer
        self._budget_bytes = budget_bytes
        self._shape = shape
        self._times = times
        self._counters = counters
        self._held_bytes = 0

    def ask(self, state: KvRequest, names: Sequence[str]) -> bool:
        """Ask for these chunks, as many as there is room for; False if there is none."""
        room = (self._budget_bytes - self._held_bytes) // self._shape.chunk_bytes
        if names and room < 1:
            return False
        if len(names) > room:
            self._counters.add("over_budget")
        state.asked = True
        if names:
            self._prefetch(state, names[:room])
        return True

    def _prefetch(self, state: KvRequest, names: Sequence[str]) -> None:
        ranks = self._shape.ranks
        keys = [key_of(name, rank) for name in names for rank in range(ranks)]
        handles = self._times.first_sights.spend_on(
            lambda seconds: self._buffer.prefetch(keys, timeout=seconds)
        )
        state.pins = [
            ChunkPin(name, handles[index * ranks : (index + 1) * ranks])
            for index, name in enumerate(names)
        ]
        self._held_bytes += len(names) * self._shape.chunk_bytes

    def present(self, state: KvRequest) -> tuple[int, bool]:
        """How many chunks are here in one run, and whether it is known that there are no more."""
        for pin in state.pins[state.present :]:
            found = pin.state
            if found is not PrefetchState.RESIDENT:
                return state.present, found is not PrefetchState.PENDING
            state.present += 1
        return state.present, True

    def rest(self, pin: ChunkPin) -> None:
        """The pass before found nothing to run, and vLLM would ask again at once, keeping Python's
        lock from the thread that hears the node's answers."""
        for handle in pin.handles:
            if handle.state is PrefetchState.PENDING and not self._times.idle.is_over:
                self._times.idle.spend_on(partial(_wait, handle))

    def keep_only(self, state: KvRequest, count: int) -> None:
        """Let go of what comes after the first gap, and say once why there is one."""
        beyond = state.pins[count:]
        if not beyond:
            return
        reason = (
            beyond[0].reason if beyond[0].state is not PrefetchState.PENDING else MissReason.TIMEOUT
        )
        self._counters.add(f"miss:{reason}")
        del state.pins[count:]
        self._release(beyond)

    def forget(self, state: KvRequest) -> None:
        """Nothing is asked for, held or loaded for the request any more."""
        pins, state.pins, state.present = state.pins, [], 0
        state.asked = state.loading = False
        state.deadline = 0.0
        self._release(pins)

    def _release(self, pins: list[ChunkPin]) -> None:
        self._held_bytes -= len(pins) * self._shape.chunk_bytes
        for pin in pins:
            for handle in pin.handles:
                self._buffer.release(handle)


def _wait(handle: "Prefetched", seconds: float) -> bool:
    return handle.wait(seconds) is not PrefetchState.PENDING


Answer = tuple[int | None, bool]
"""See `KvScheduler.matched`."""
IDLE_SECONDS = 2e-3
"""What a pass that follows an idle one waits for answers."""
NOTHING: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)


class KvScheduler:
    """See the module. No method raises for a fault of the node, of Redis or of a peer."""

    def __init__(
        self,
        buffer: "LookupBuffer",
        settings: "KvSettings",
        shape: KvShape,
        *,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._shape = shape
        self.counters = counters or Counters()
        self._clock = clock
        self._log = RateLimitedLog()
        self._adapters = Adapters(encode=shape.adapters_encode)
        self._requests: dict[str, KvRequest] = {}
        self._ended: dict[str, KvRequest] = {}
        """Requests aborted while they loaded: their pins are held until that has ended."""
        self._loads: list[RequestLoad] = []
        self._fresh: dict[str, list[int]] = {}
        """Blocks that were allocated since the last step, by request."""
        self._times = PassTimes(
            PassTime(settings.first_sight_seconds, clock), IdleTime(IDLE_SECONDS, clock)
        )
        self._pins = KvPins(buffer, settings.pin_budget_bytes, shape, self._times, self.counters)
        self._handoffs = Handoffs(
            buffer, settings.handoff_wait_seconds, shape, counters=self.counters, clock=clock
        )

    # -- before a request is scheduled

    def matched(self, request: Any, computed: int) -> Answer:
        """How many tokens beyond the first `computed` can be loaded, None where that is to be
        asked again; and whether loading them takes a while."""
        state = self._known(request)
        state.computed = computed
        may_load = self._shape.is_consumer and not state.failed
        if not may_load or state.chain is None or request.skip_reading_prefix_cache:
            return NOTHING
        if state.taken_over and self._buffer.namespace:
            coming = self._handoffs.awaited(state, computed)
            if coming is not None:
                return (coming, True) if coming else ASK_AGAIN
        if computed < state.first * self._shape.chunk_tokens:
            self._ask_anew(state)
        if not state.asked and not self._ask(state, computed):
            return ASK_AGAIN if self._may_wait(state) else NOTHING
        present, settled = self._pins.present(state)
        if not settled and self._may_wait(state):
            self._pins.rest(state.pins[present])
            return ASK_AGAIN
        self._pins.keep_only(state, present)
        tokens = (state.first + present) * self._shape.chunk_tokens - computed
        return (tokens, True) if tokens > 0 and present else NOTHING

    def _known(self, request: Any) -> KvRequest:
        state = self._requests.get(request.request_id)
        if state is None:
            try:
                chain = ChunkChain(request, self._shape.chunk_tokens, self._adapters)
            except NotShareable as reason:
                self.counters.add(f"skipped:{reason}")
                chain = None
            state = self._requests[request.request_id] = KvRequest(request, chain)
            if chain is not None and self._shape.is_producer:
                state.handed_out = handed_out(request)
            if chain is not None and self._shape.is_consumer:
                state.taken_over = taken_over(request)
        return state

    def _ask(self, state: KvRequest, computed: int) -> bool:
        """Ask for what a request lacks, as much as there is room for; False if there is none."""
        assert state.chain is not None
        tokens = state.request.all_token_ids
        size = self._shape.chunk_tokens
        # One token at least is left to be computed: somebody has to say what comes next.
        last = (len(tokens) - 1) // size
        state.first = computed // size
        wanted = state.chain.grow(tokens, last)[state.first :]
        return self._pins.ask(state, wanted)

    def _ask_anew(self, state: KvRequest) -> None:
        """While the request waited vLLM gave away blocks of its own prefix cache, and what was
        asked for begins behind them. It waits no longer for all of it than it would have."""
        deadline = state.deadline
        self._pins.forget(state)
        state.deadline, state.first = deadline, 0

    def _may_wait(self, state: KvRequest) -> bool:
        now = self._clock()
        if not state.deadline:
            state.deadline = now + self._settings.fetch_wait_seconds
        return now < state.deadline

    # -- when blocks were allocated for it

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has made room, and `external` tokens are to be loaded."""
        state = self._known(request)
        state.blocks = list(blocks.get_block_ids()[0])
        # Where nothing is to be loaded by us, another connector of a MultiConnector may load.
        self._fresh[request.request_id] = state.blocks[state.computed // self._shape.block_size :]
        if external <= 0:
            if not state.loading:
                self._pins.forget(state)
            return
        self.counters.add("loaded_tokens", external)
        state.loading = True
        if state.taken_over:
            self._loads.append(self._handoffs.take_over(state))
            return
        end = state.computed + external
        size, block = self._shape.chunk_tokens, self._shape.block_size
        chunks = []
        for index, pin in enumerate(state.pins, start=state.first):
            begin = max(index * size, state.computed) // block
            stop = min((index + 1) * size, end) // block
            if begin >= stop:
                continue
            blocks_of = tuple(state.blocks[begin:stop])
            first = begin - index * size // block
            chunks.append(ChunkLoad(pin.name, blocks_of, first, pin.orders))
            self.counters.add(f"load_{pin.source}")
            self.counters.add(f"loaded_{pin.source}_bytes", self._shape.chunk_bytes)
        self._loads.append(RequestLoad(request.request_id, tuple(chunks)))

    # -- when a step was planned

    def build_metadata(self, output: Any) -> KvStepMetadata:
        """What the workers are told with the step that was just planned."""
        is_idle = not output.num_scheduled_tokens
        self._times.begin_pass(is_idle=is_idle)
        namespace = self._buffer.namespace
        metadata = KvStepMetadata(is_idle=is_idle, loads=self._loads, namespace=namespace)
        self._loads = []
        for new in output.scheduled_new_reqs:
            self._starts(metadata, new.req_id, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                computed = cached.num_computed_tokens[index]
                self._starts(metadata, request_id, (fresh or [[]])[0], computed)
            elif fresh:
                metadata.written.extend(fresh[0])
                state = self._requests.get(request_id)
                if state is not None:
                    state.blocks.extend(fresh[0])
        for blocks in self._fresh.values():
            metadata.written.extend(blocks)
        self._fresh = {}
        if self._shape.is_producer and namespace:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                self._completes(metadata, request_id, scheduled)
        return metadata

    def _starts(
        self, metadata: KvStepMetadata, request_id: str, blocks: list[int], computed: int
    ) -> None:
        """A request runs for the first time, or again after it was preempted."""
        self._fresh.pop(request_id, None)
        metadata.written.extend(blocks[computed // self._shape.block_size :])
        state = self._requests.get(request_id)
        if state is not None:
            state.blocks = list(blocks)
            # What vLLM has of it came from the buffer, or went there when it was computed.
            state.stored = computed // self._shape.chunk_tokens

    def _completes(self, metadata: KvStepMetadata, request_id: str, scheduled: int) -> None:
        """Chunks whose last token this step computes are to be stored."""
        state = self._requests.get(request_id)
        if state is None or state.chain is None:
            return
        request, size = state.request, self._shape.chunk_tokens
        if state.handed_out:
            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                metadata.saves += self._handoffs.hand_out(state)
            return
        known = request.num_prompt_tokens
        if self._shape.stores_generated:
            known = len(request.all_token_ids)
        complete = min(request.num_computed_tokens + scheduled, known) // size
        if complete <= state.stored:
            return
        per_chunk = size // self._shape.block_size
        names = state.chain.grow(request.all_token_ids, complete)
        for index in range(state.stored, complete):
            blocks = tuple(state.blocks[index * per_chunk : (index + 1) * per_chunk])
            metadata.saves.append(ChunkSave(names[index], blocks))
        state.stored = complete

    # -- afterwards

    def heard(self, report: KvWorkerReport | None, loaded: set[str]) -> None:
        """What the workers told of a step, and whose loads have ended, well or not."""
        if report is not None:
            for name, count in report.counts.items():
                self.counters.add(name, count)
            for request_id in report.failed:
                state = self._requests.get(request_id)
                if state is not None:
                    state.failed = True
        for request_id in loaded:
            state = self._ended.pop(request_id, None) or self._requests.get(request_id)
            if state is not None:
                self._pins.forget(state)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over. What loads for it goes on to hold its pins. Returns what another
        engine is to be told."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        if state.loading:
            self._ended[request.request_id] = state
        else:
            self._pins.forget(state)
        return reply(state.handed_out) if state.is_handed_out else None

    def close(self) -> None:
        """Idempotent."""
        for state in [*self._requests.values(), *self._ended.values()]:
            self._pins.forget(state)
        self._requests.clear()
        self._ended.clear()
        self._buffer.close()
