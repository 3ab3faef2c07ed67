"""The scheduler side under random traffic, against vLLM's own EncoderCacheManager.

A small engine handles encoder inputs as vLLM's scheduler and V1 workers do: running before waiting
requests, allocation failures, preemption that empties a step, aborts, evictions, several steps in
flight. The fleet's answers and their order are random. At every moment:

- bytes that a worker loads are pinned while it reads them, and no promise fails to load;
- an item without media is never given to the encoder;
- an item that vLLM was promised is in the metadata of the step that allocated it;
- when all requests are gone and all steps ran, nothing is pinned.
"""

import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector_standins import (
    EMBED_BYTES,
    EMBEDS,
    LedgerBuffer,
    Request,
    Stored,
    make_request,
    step_output,
)
from connectors.ec.metadata import StepMetadata
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from hypothesis_profiles import examples
from lookup_buffer.client.handles import PrefetchState

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

ITEMS = "ABCDE"
WAIT_SECONDS = 1.0
STATES = [PrefetchState.RESIDENT, PrefetchState.MISSING, PrefetchState.FAILED]


@dataclass
class Step:
    metadata: StepMetadata
    freed: list[str]
    windows: list[tuple[Request, int, int]]
    """Request, first and end of the tokens that it computes."""
    encodes: list[str]
    tokens: int


@dataclass
class Worker:
    """V1's encoder cache: evict, load, encode, gather."""

    buffer: LedgerBuffer
    phantoms: set[str]
    """Items that vLLM takes for cached although a preemption cancelled their encode."""
    cache: set[str] = field(default_factory=set)

    def run(self, step: Step) -> None:
        self.cache.difference_update(step.freed)
        if step.tokens == 0:
            assert step.metadata.mm_datas == [], "a step without tokens never reaches the worker"
            return
        orders = []
        for load in step.metadata.mm_datas:
            assert load.order is not None
            assert load.order.ticket in self.buffer.pinned, "read without a pin"
            self.cache.add(load.mm_hash)
            orders.append(load.order)
        self.cache.update(step.encodes)
        for request, start, end in step.windows:
            for feature in request.mm_features:
                position = feature.mm_position
                if position.offset < end and position.offset + position.length > start:
                    known = feature.identifier in self.cache | self.phantoms
                    assert known, f"Encoder cache miss for {feature.identifier}: the engine dies"
        self.buffer.done(orders)


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.buffer = LedgerBuffer()
        self.steps_in_flight = 2
        config = ConnectorSettings(
            capacity_bytes=1 << 20,
            prefetch_bytes=3 * EMBEDS * EMBED_BYTES,
            fetch_wait_seconds=WAIT_SECONDS,
            metadata_wait_seconds=2 * WAIT_SECONDS,
        )
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client,
            config,
            EngineShape(True, True, self.steps_in_flight, EMBED_BYTES),
            metadata_fields=lambda _: set(),
            clock=lambda: self.now,
        )
        self.cache = EncoderCacheManager(cache_size=2 * EMBEDS)
        self.phantoms: set[str] = set()
        self.worker = Worker(self.buffer, self.phantoms)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.flying: deque[Step] = deque()
        self.count = 0

    # -- what happens outside

    @rule(items=st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3), bare=st.booleans())
    def request_arrives(self, items: list[str], bare: bool) -> None:
        self.count += 1
        self.waiting.append(make_request(f"r{self.count}", *items, metadata_only=bare))

    @rule(item=st.sampled_from(ITEMS), needs_fetch=st.booleans(), state=st.sampled_from(STATES))
    def fleet_changes(self, item: str, needs_fetch: bool, state: PrefetchState) -> None:
        self.buffer.stored[item] = Stored(state, needs_fetch)
        self.buffer.published(item)

    @rule(item=st.sampled_from(ITEMS))
    def fleet_forgets(self, item: str) -> None:
        self.buffer.stored.pop(item, None)

    @precondition(lambda self: self.buffer.pending)
    @rule(data=st.data(), state=st.sampled_from(STATES))
    def answer_arrives(self, data: st.DataObject, state: PrefetchState) -> None:
        index = data.draw(st.integers(0, len(self.buffer.pending) - 1))
        self.buffer.settle(index, state)

    @rule()
    def node_has_waited(self) -> None:
        self.buffer.end_waits()

    @rule(seconds=st.sampled_from([0.005, 0.02, WAIT_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def client_aborts(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self.waiting + self.running)))

    # -- what vLLM does

    @rule(budget=st.integers(1, 24), blocks=st.booleans(), preempts=st.booleans())
    def schedule(self, budget: int, blocks: bool = True, preempts: bool = False) -> None:
        if len(self.flying) == self.steps_in_flight:
            self.oldest_step_ends()
        windows: list[tuple[Request, int, int]] = []
        encodes: dict[str, list[str]] = {}
        promised: set[str] = set()
        for request in [*self.running, *self.waiting]:
            tokens = self._try(request, budget, blocks, encodes, promised)
            if tokens:
                start = request.num_computed_tokens
                windows.append((request, start, start + tokens))
                budget -= tokens
                if request in self.waiting:
                    self.waiting.remove(request)
                    self.running.append(request)
        if preempts and windows:
            victim = windows.pop()[0]
            self.phantoms.update(encodes.pop(victim.request_id, []))
            self._preempt(victim)
        self._dispatch(windows, [item for items in encodes.values() for item in items], promised)

    def _try(
        self,
        request: Request,
        budget: int,
        blocks: bool,
        encodes: dict[str, list[str]],
        promised: set[str],
    ) -> int:
        """vLLM's `_try_schedule_encoder_inputs` and the code around it. Returns the scheduled
        tokens."""
        computed = request.num_computed_tokens
        gate = self.scheduler.gate
        if not gate.ensure_cache_available(request, computed):
            return 0
        tokens = min(budget, request.num_tokens - computed)
        to_encode: list[int] = []
        to_load: list[int] = []
        seen: set[str] = set()
        embeds = 0
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset >= computed + tokens or position.offset + EMBEDS <= computed:
                continue
            if feature.identifier in seen or self.cache.check_and_update_cache(request, index):
                continue
            if not self.cache.can_allocate(request, index, 1 << 20, embeds):
                tokens = max(0, position.offset - computed)
                break
            embeds += EMBEDS
            seen.add(feature.identifier)
            hit = self.scheduler.has_cache_item(feature.identifier)
            (to_load if hit else to_encode).append(index)
        if tokens <= 0:
            return 0
        if not blocks and request in self.waiting:
            self.cache.free(request)
            return 0
        for index in to_encode + to_load:
            feature = request.mm_features[index]
            self.cache.allocate(request, index)
            self.phantoms.discard(feature.identifier)
            hit = self.scheduler.has_cache_item(feature.identifier)
            assert hit == (index in to_load), "the answer changed within one pass"
            self.scheduler.item_allocated(request, index, is_hit=hit)
            if hit:
                promised.add(feature.identifier)
            else:
                assert feature.data is not None, "no media to encode: the engine dies"
                encodes.setdefault(request.request_id, []).append(feature.identifier)
        return tokens

    def _preempt(self, request: Request) -> None:
        self.cache.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.running.remove(request)
        self.waiting.insert(0, request)

    def _dispatch(
        self, windows: list[tuple[Request, int, int]], encodes: list[str], promised: set[str]
    ) -> None:
        freed = self.cache.get_freed_mm_hashes()
        tokens = sum(end - start for _, start, end in windows)
        output = step_output(tokens, freed=freed, finished=self.finished)
        metadata = self.scheduler.build_metadata(output)
        self.finished = set()
        loaded = {load.mm_hash for load in metadata.mm_datas}
        if tokens:
            assert promised - set(freed) <= loaded, "a promise without a load"
            assert set(encodes) <= metadata.saves.keys()
        for load in metadata.mm_datas:
            assert load.order is not None
            assert load.order.ticket in self.buffer.pinned
        self.flying.append(Step(metadata, freed, windows, encodes, tokens))
        for request, _, end in windows:
            request.num_computed_tokens = end

    @precondition(lambda self: self.flying)
    @rule()
    def oldest_step_ends(self) -> None:
        if not self.flying:
            return
        step = self.flying.popleft()
        self.worker.run(step)
        for request_id in self.scheduler.gate.take_unavailable_requests():
            for request in [*self.waiting, *self.running]:
                if request.request_id == request_id:
                    self._finish(request)
        for request, _, end in step.windows:
            if request not in self.running or request.num_computed_tokens < end:
                continue  # aborted or preempted meanwhile
            for index in list(self.cache.get_cached_input_ids(request)):
                position = request.mm_features[index].mm_position
                if position.offset + position.length <= request.num_computed_tokens:
                    self.cache.free_encoder_input(request, index)
            if request.num_computed_tokens >= request.num_tokens:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        self.scheduler.gate.forget(request.request_id)
        self.cache.free(request)
        self.finished.add(request.request_id)
        (self.waiting if request in self.waiting else self.running).remove(request)

    # -- what must hold

    @invariant()
    def budget_is_respected(self) -> None:
        pins = self.scheduler.pins
        assert 0 <= pins.held_bytes <= pins.budget_bytes

    def teardown(self) -> None:
        for request in [*self.waiting, *self.running]:
            self._finish(request)
        for _ in range(self.steps_in_flight + 1):
            self.schedule(1)
        while self.flying:
            self.oldest_step_ends()
        self.buffer.end_waits()
        while self.buffer.pending:
            self.buffer.settle(0, PrefetchState.RESIDENT)
        # Loads that a step without tokens left over wait for one with tokens.
        self.scheduler.build_metadata(step_output(1))
        for _ in range(self.steps_in_flight):
            self.scheduler.build_metadata(step_output(1))
        assert self.buffer.pinned == {}
        assert len(self.scheduler.pins) == 0
        assert self.scheduler.pins.held_bytes == 0
        assert len(self.scheduler.gate) == 0
        assert not self.scheduler.gate.take_unavailable_requests()


Engine.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngine = Engine.TestCase
