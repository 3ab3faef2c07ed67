"""The scheduler side: how much of a prompt's KV is on this host, and what workers load and store.

Runs in vLLM's scheduler thread, which owns all state here. Imports neither vLLM nor torch.

vLLM's first call for a request requests all its chunks in one message: the node fetches them to
this host and pins them. The pins of all requests share one budget. The return value is the number
of tokens in one run of pinned chunks, from the first that vLLM lacks. Until that run is known, vLLM
gets `UNDECIDED` and calls again, for a bounded time. Pins work as in `ec.items`, but here a request
has one run of chunks.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from connectors.counters import Counters, RateLimitedLog
from connectors.identifiers import Adapters, NotShareable
from connectors.kv.chunks import ChunkChain, key_of
from connectors.kv.engine import KvShape
from connectors.kv.handoffs import Handoffs, incoming_id, outgoing_id, transfer_params
from connectors.kv.metadata import (
    ChunkLoad,
    ChunkSave,
    KvStepMetadata,
    KvWorkerReport,
    RequestLoad,
)
from connectors.kv.requests import ChunkPin, KvRequest
from connectors.pass_time import IDLE_SECONDS, IdleTime, PassTime, PassTimes
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from connectors.kv.engine import KvSettings
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import PrefetchHandle

Match = tuple[int | None, bool]
"""The number of tokens to load, None if it is not known yet; and whether they load
asynchronously."""
NO_MATCH: Match = (0, False)
UNDECIDED: Match = (None, False)
"""vLLM calls again in a later pass."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""A request for which vLLM has no room so long may find chunks that were not there before."""


class KvScheduler:
    """The connector's scheduler side. No method raises for a fault of this node, of another one or
    of Redis."""

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
        self._log = RateLimitedLog(clock=clock)
        self._adapters = Adapters(encode=shape.adapters_encode, mixed=shape.adapters_mixed)
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

    # -- before vLLM schedules a request

    def matched(self, request: Any, computed: int) -> Match:
        """How many tokens beyond the first `computed` can be loaded; see `Match`."""
        state = self._state_of(request)
        state.computed = computed
        may_load = self._shape.is_consumer and not state.failed
        if not may_load or state.chain is None or request.skip_reading_prefix_cache:
            return NO_MATCH
        if state.incoming and self._buffer.namespace:
            tokens = self._handoffs.incoming_tokens(state, computed)
            if tokens is not None:
                return (tokens, True) if tokens else UNDECIDED
        if computed < state.first * self._shape.chunk_tokens:
            self._reset_pins(state)
        if self._pins.are_lost(state):
            self._pins.release(state)
        if (now := self._clock()) >= state.look_again_at:
            state.is_requested, state.look_again_at = False, now + LOOK_AGAIN_SECONDS
        if not state.is_requested and not self._request_chunks(state, computed):
            return UNDECIDED if self._may_wait(state) else NO_MATCH
        present, settled = self._pins.present(state)
        if not settled and self._may_wait(state):
            self._pins.wait_for(state.pins[present])
            return UNDECIDED
        if self._pins.keep_only(state, present) and state.look_again_at == math.inf:
            state.look_again_at = now + LOOK_AGAIN_SECONDS
        tokens = (state.first + present) * self._shape.chunk_tokens - computed
        return (tokens, True) if tokens > 0 and present else NO_MATCH

    def _state_of(self, request: Any) -> KvRequest:
        state = self._requests.get(request.request_id)
        if state is None:
            try:
                chain = ChunkChain(request, self._shape.chunk_tokens, self._adapters)
            except NotShareable as reason:
                self.counters.add(f"skipped:{reason}")
                chain = None
            state = self._requests[request.request_id] = KvRequest(request, chain)
            if chain is not None:
                self._set_handoffs(state)
        return state

    def _set_handoffs(self, state: KvRequest) -> None:
        """The hand-offs that the request asks for, if a router may have asked."""
        outgoing = outgoing_id(state.request) if self._shape.is_producer else ""
        incoming = incoming_id(state.request) if self._shape.is_consumer else ""
        if self._settings.behind_router:
            state.outgoing, state.incoming = outgoing, incoming
        elif outgoing or incoming:
            self.counters.add("handoff_refused")
            self._log.report(
                "handoff_refused",
                "kv_transfer_params of a request are ignored: any client can send them; set "
                "'behind_router' if a router stands before this engine and passes on none but its "
                "own",
            )

    def _request_chunks(self, state: KvRequest, computed: int) -> bool:
        """Request the chunks that a request lacks, as many as the budget allows; False if it has
        none, and the budget allows none."""
        assert state.chain is not None
        tokens = state.request.all_token_ids
        size = self._shape.chunk_tokens
        # vLLM must compute at least one token, to sample the next one.
        last = (len(tokens) - 1) // size
        if not state.pins:
            state.first = computed // size
        wanted = state.chain.grow(tokens, last)[state.first + len(state.pins) :]
        return self._pins.request(state, wanted) or bool(state.pins)

    def _reset_pins(self, state: KvRequest) -> None:
        """Release the pins, so that `_request_chunks` can start at an earlier chunk. The deadline
        stays.

        While the request waited, vLLM evicted blocks of its own prefix cache, and the requested
        chunks start after them.
        """
        deadline = state.deadline
        self._pins.release(state)
        state.deadline, state.first = deadline, 0

    def _may_wait(self, state: KvRequest) -> bool:
        now = self._clock()
        if not state.deadline:
            state.deadline = now + self._settings.fetch_wait_seconds
        return now < state.deadline

    # -- after vLLM allocated blocks for a request

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM has allocated blocks for the request; the KV of `external` tokens is to be loaded
        into them."""
        state = self._state_of(request)
        state.blocks = list(blocks.get_block_ids()[0])
        # Another connector of a MultiConnector may load into them, even if this one does not.
        self._fresh[request.request_id] = state.blocks[state.computed // self._shape.block_size :]
        if external <= 0:
            if not state.loading:
                self._pins.release(state)
            return
        self.counters.add("loaded_tokens", external)
        state.loading = True
        if state.incoming:
            self._loads.append(self._handoffs.load(state))
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

    # -- after vLLM scheduled a step

    def build_metadata(self, output: Any) -> KvStepMetadata:
        """The metadata that vLLM sends to the workers with the step that it just scheduled."""
        is_idle = not output.num_scheduled_tokens
        self._times.begin_pass(is_idle=is_idle)
        namespace = self._buffer.namespace
        metadata = KvStepMetadata(is_idle=is_idle, loads=self._loads, namespace=namespace)
        self._loads = []
        for new in output.scheduled_new_reqs:
            self._record_start(metadata, new.req_id, new.block_ids[0], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                computed = cached.num_computed_tokens[index]
                self._record_start(metadata, request_id, (fresh or [[]])[0], computed)
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
                self._add_saves(metadata, request_id, scheduled)
        return metadata

    def _record_start(
        self, metadata: KvStepMetadata, request_id: str, blocks: list[int], computed: int
    ) -> None:
        """Record a request that runs for the first time, or again after a preemption."""
        self._fresh.pop(request_id, None)
        metadata.written.extend(blocks[computed // self._shape.block_size :])
        state = self._requests.get(request_id)
        if state is not None:
            state.blocks = list(blocks)
            # Its computed chunks came from the buffer, or were stored when they were computed.
            state.stored = computed // self._shape.chunk_tokens

    def _add_saves(self, metadata: KvStepMetadata, request_id: str, scheduled: int) -> None:
        """Add the saves of the chunks whose last token this step computes."""
        state = self._requests.get(request_id)
        if state is None or state.chain is None:
            return
        request, size = state.request, self._shape.chunk_tokens
        if state.outgoing:
            if request.num_computed_tokens + scheduled >= request.num_prompt_tokens:
                metadata.saves += self._handoffs.saves(state)
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

    # -- after a step

    def process_report(self, report: KvWorkerReport | None, loaded: set[str]) -> None:
        """Process the workers' report of a step. `loaded`: the requests whose loads ended, with or
        without success."""
        if report is not None:
            for name, count in report.counts.items():
                self.counters.add(name, count)
            for request_id in report.failed:
                state = self._requests.get(request_id)
                if state is not None:
                    state.failed = True
        for request_id in loaded:
            self._handoffs.load_ended(request_id)
            state = self._ended.pop(request_id, None) or self._requests.get(request_id)
            if state is not None:
                self._pins.release(state)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended. Releases its pins, or does so when its load in flight has ended.

        Returns:
            The `kv_transfer_params` for the engine that receives the hand-off; None without one.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        self._handoffs.forget(state)
        if state.loading:
            self._ended[request.request_id] = state
        else:
            self._pins.release(state)
        return transfer_params(state.outgoing) if state.is_sent else None

    def close(self) -> None:
        """Idempotent."""
        for state in [*self._requests.values(), *self._ended.values()]:
            self._pins.release(state)
        self._requests.clear()
        self._ended.clear()
        self._buffer.close()


class KvPins:
    """The requested chunks of all requests of one engine, within one budget.

    Args:
        budget_bytes: bound on the bytes of all pins together.
        times: how long a pass may wait for the node.
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

    def request(self, state: KvRequest, names: Sequence[str]) -> bool:
        """Request these chunks, as many as the budget allows; False if it allows none now."""
        free = (self._budget_bytes - self._held_bytes) // self._shape.chunk_bytes
        if names and free < 1 and self._held_bytes:
            return False
        if len(names) > free:
            self._counters.add(MissReason.OVER_BUDGET.value)
        state.is_requested = True
        if names[:free]:
            self._prefetch(state, names[:free])
        return True

    def _prefetch(self, state: KvRequest, names: Sequence[str]) -> None:
        ranks = self._shape.ranks
        keys = [key_of(name, rank) for name in names for rank in range(ranks)]
        handles = self._times.first_sights.spend_on(
            lambda seconds: self._buffer.prefetch(keys, timeout=seconds)
        )
        state.pins += [
            ChunkPin(name, handles[index * ranks : (index + 1) * ranks])
            for index, name in enumerate(names)
        ]
        self._held_bytes += len(names) * self._shape.chunk_bytes

    def are_lost(self, state: KvRequest) -> bool:
        """Whether the pins that were there ended with the session with the node: all end at once,
        and what is written in their place would be loaded. Or the engine shares nothing now, since
        its weights have changed."""
        if not state.present:
            return False
        return state.pins[0].state is not PrefetchState.RESIDENT or not self._buffer.namespace

    def present(self, state: KvRequest) -> tuple[int, bool]:
        """The number of chunks in one run on this host, and whether it is final."""
        for pin in state.pins[state.present :]:
            found = pin.state
            if found is not PrefetchState.RESIDENT:
                return state.present, found is not PrefetchState.PENDING
            state.present += 1
        return state.present, True

    def wait_for(self, pin: ChunkPin) -> None:
        """Wait for one chunk, within the time budget of idle passes.

        If nothing runs, vLLM polls. That would keep the GIL from the thread that receives the
        node's answers.
        """
        for handle in pin.handles:
            if handle.state is PrefetchState.PENDING and not self._times.idle.is_over:
                self._times.idle.spend_on(partial(_wait, handle))

    def keep_only(self, state: KvRequest, count: int) -> bool:
        """Release the chunks after the first `count`; returns whether there are any. Counts one
        miss of the request, with the reason of the first of them."""
        beyond = state.pins[count:]
        if not beyond:
            return False
        reason = (
            beyond[0].reason if beyond[0].state is not PrefetchState.PENDING else MissReason.TIMEOUT
        )
        if state.look_again_at == math.inf:
            self._counters.add(f"miss:{reason}")
        del state.pins[count:]
        self._release_pins(beyond)
        return True

    def release(self, state: KvRequest) -> None:
        """Release all pins of the request, and mark it as not requested and not loading."""
        pins, state.pins, state.present = state.pins, [], 0
        state.is_requested = state.loading = False
        state.deadline, state.look_again_at = 0.0, math.inf
        self._release_pins(pins)

    def _release_pins(self, pins: list[ChunkPin]) -> None:
        self._held_bytes -= len(pins) * self._shape.chunk_bytes
        self._buffer.release(*(handle for pin in pins for handle in pin.handles))


def _wait(handle: "PrefetchHandle", seconds: float) -> bool:
    return handle.wait(seconds) is not PrefetchState.PENDING
