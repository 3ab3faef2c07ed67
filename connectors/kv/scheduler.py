"""The scheduler side: how much of a prompt's KV is on this host, and what workers load and store.

Runs in vLLM's scheduler thread, which owns all state here. Imports neither vLLM nor torch.

When vLLM first shows a request, its chunks are requested in one message: the node fetches them to
this host and pins them. The pins of all requests share one budget. vLLM is promised the pinned
chunks of one run, from the first that it lacks. Until that run is known vLLM is asked to call
again, for a bounded time. Pins work as in `ec.pins`, but here a request holds one run of chunks.
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
    from lookup_buffer.client.handles import LoadOrder, PrefetchHandle


@dataclass(slots=True, eq=False)
class ChunkPin:
    """One requested chunk: a handle for each rank."""

    name: str
    handles: "list[PrefetchHandle]"

    @property
    def state(self) -> PrefetchState:
        """RESIDENT when the parts of all ranks are. FAILED or MISSING when one part is. Else
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
    """What the scheduler side knows of one request."""

    request: Any
    """vLLM's request."""
    chain: "ChunkChain | None"
    """None where nothing of the request may be shared."""
    pins: list[ChunkPin] = field(default_factory=list)
    """The requested chunks, in order from chunk `first` on."""
    first: int = 0
    present: int = 0
    """How many of `pins`, from the first on, are known to be on this host."""
    asked: bool = False
    deadline: float = 0.0
    """Until when it may wait for chunks in flight, or for room; 0 before it waits."""
    ask_next: float = 0.0
    """When to ask the node again whether the hand-off is complete."""
    computed: int = 0
    """Tokens that vLLM had computed at its last call of `matched`."""
    loading: bool = False
    """A load was promised to vLLM, and its end is not reported yet."""
    failed: bool = False
    """A load failed: vLLM computes what is missing, even if the buffer has it."""
    blocks: list[int] = field(default_factory=list)
    """vLLM's blocks for its tokens, as far as vLLM has reported them."""
    handed_out: str = ""
    """The transfer id under which this engine hands over its prompt's KV; empty without one."""
    is_handed_out: bool = False
    taken_over: str = ""
    """The transfer id of the hand-off to this engine, until that is loaded or given up."""
    is_taken_over: bool = False
    """All pieces of the hand-off to this engine are in the buffer."""
    stored: int = 0
    """How many of its first chunks are in the buffer, or need not be stored."""


class KvPins:
    """The requested chunks of all requests of one engine, within one budget.

    Args:
        budget_bytes: bound on the bytes of all pins together.
        times: how long a pass may wait for answers.
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
        """Request these chunks, as many as there is room for; False where there is no room."""
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
        """How many chunks are on this host in one run, and whether that number is final."""
        for pin in state.pins[state.present :]:
            found = pin.state
            if found is not PrefetchState.RESIDENT:
                return state.present, found is not PrefetchState.PENDING
            state.present += 1
        return state.present, True

    def rest(self, pin: ChunkPin) -> None:
        """Wait for one chunk, within the budget for idle passes.

        After a pass that found nothing to run vLLM would ask again at once. That would keep
        Python's lock from the thread that receives the node's answers.
        """
        for handle in pin.handles:
            if handle.state is PrefetchState.PENDING and not self._times.idle.is_over:
                self._times.idle.spend_on(partial(_wait, handle))

    def keep_only(self, state: KvRequest, count: int) -> None:
        """Release the chunks after the first `count`, and count one miss with the reason of the
        first of them."""
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
        """Release all pins of the request, and reset it to not requested and not loading."""
        pins, state.pins, state.present = state.pins, [], 0
        state.asked = state.loading = False
        state.deadline = 0.0
        self._release(pins)

    def _release(self, pins: list[ChunkPin]) -> None:
        self._held_bytes -= len(pins) * self._shape.chunk_bytes
        for pin in pins:
            for handle in pin.handles:
                self._buffer.release(handle)


def _wait(handle: "PrefetchHandle", seconds: float) -> bool:
    return handle.wait(seconds) is not PrefetchState.PENDING


Answer = tuple[int | None, bool]
"""The return value of `KvScheduler.matched`."""
IDLE_SECONDS = 2e-3
"""How long a pass that follows an idle one waits for answers."""
NOTHING: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)


class KvScheduler:
    """The connector's scheduler side. No method raises for a fault of the node, of Redis or of a
    peer."""

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
        """Requests that ended while they loaded. Their pins are held until the load has ended."""
        self._loads: list[RequestLoad] = []
        self._fresh: dict[str, list[int]] = {}
        """Blocks allocated since the last step, by request."""
        self._times = PassTimes(
            PassTime(settings.first_sight_seconds, clock), IdleTime(IDLE_SECONDS, clock)
        )
        self._pins = KvPins(buffer, settings.pin_budget_bytes, shape, self._times, self.counters)
        self._handoffs = Handoffs(
            buffer, settings.handoff_wait_seconds, shape, counters=self.counters, clock=clock
        )

    # -- before a request is scheduled

    def matched(self, request: Any, computed: int) -> Answer:
        """How many tokens beyond the first `computed` can be loaded, and whether they load
        asynchronously. None tokens: vLLM has to ask again."""
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
        """Request the chunks that a request lacks, as many as there is room for; False where there
        is no room."""
        assert state.chain is not None
        tokens = state.request.all_token_ids
        size = self._shape.chunk_tokens
        # vLLM has to compute at least one token, to sample the next one.
        last = (len(tokens) - 1) // size
        state.first = computed // size
        wanted = state.chain.grow(tokens, last)[state.first :]
        return self._pins.ask(state, wanted)

    def _ask_anew(self, state: KvRequest) -> None:
        """Drop the pins, so that the next `_ask` starts at an earlier chunk.

        While the request waited, vLLM evicted blocks of its own prefix cache, and the requested
        chunks begin behind them. The deadline stays.
        """
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
        """vLLM has allocated blocks for the request, `external` tokens of which are to be
        loaded."""
        state = self._known(request)
        state.blocks = list(blocks.get_block_ids()[0])
        # Even if this connector loads nothing, another one of a MultiConnector may load into them.
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

    # -- when a step is planned

    def build_metadata(self, output: Any) -> KvStepMetadata:
        """The metadata that vLLM sends to the workers with the step that was just planned."""
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
        """Record a request that runs for the first time, or again after a preemption."""
        self._fresh.pop(request_id, None)
        metadata.written.extend(blocks[computed // self._shape.block_size :])
        state = self._requests.get(request_id)
        if state is not None:
            state.blocks = list(blocks)
            # What vLLM has computed of it came from the buffer, or was stored there then.
            state.stored = computed // self._shape.chunk_tokens

    def _completes(self, metadata: KvStepMetadata, request_id: str, scheduled: int) -> None:
        """Add the saves of the chunks whose last token this step computes."""
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
        """Process the workers' report of a step, and the requests whose loads have ended, with or
        without success."""
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
        """The request has ended. Its pins are released; where a load runs, when that has ended.

        Returns:
            The `kv_transfer_params` for the engine that takes the hand-off; None without one.
        """
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
