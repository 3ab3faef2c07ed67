"""One encode per fleet under random traffic and faults, in virtual time.

Invariants: no request waits longer than the bound; no engine holds a claim that was not granted to
it or that it does not use for an encode. In the end every request was served, and without losses
and hangs each item was encoded once.

The fleet is the connector's scheduler sides and the client's part for sets of claims as they are,
over `virtual_nodes`. Nothing runs by itself: `Fleet.run` lets time pass.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from connector_standins import (
    EMBED_BYTES,
    LedgerBuffer,
    LedgerHandle,
    Request,
    Stored,
    make_request,
    step_output,
)
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from hypothesis_profiles import examples
from lookup_buffer.client.handles import ClaimHandle, PrefetchState
from lookup_buffer.client.pending import PendingClaims
from lookup_buffer.key import TensorKey
from lookup_buffer.node.claims import Claims
from lookup_buffer.protocol.messages import ClaimOutcome
from virtual_loop import VirtualLoop
from virtual_nodes import NAMESPACE, Store, VirtualNode, Way

ENCODE_SECONDS = 0.2
LEASE_SECONDS = 3.0
BOUND_SECONDS = 2.0
FETCH_SECONDS = 1.0
PASS_SECONDS = 0.02
CACHE_ITEMS = 3
EPSILON = 1e-6


class VirtualBuffer(LedgerBuffer):
    """The client of one engine: prefetches that take a while, and the real `PendingClaims`."""

    def __init__(self, node: VirtualNode, chance: random.Random) -> None:
        super().__init__()
        self.node = node
        self.to_node, self.from_node = Way(node.loop, chance), Way(node.loop, chance)
        self.namespace = NAMESPACE
        session: Any = self
        self.claims = PendingClaims(session)

    def post(self, request: Any) -> None:
        def answer(event: dict[str, Any]) -> None:
            self.from_node.send(self.claims.on_event, {"id": request.id, **event})

        self.to_node.send(self.node.handle, request, answer)

    def prefetch(
        self, keys: Sequence[TensorKey], *, timeout: float = 0.0, wait_seconds: float = 0.0
    ) -> list[LedgerHandle]:
        for key in keys:  # all takes a while, a miss as well
            self.stored[key.mm_hash] = Stored(needs_fetch=True)
        handles = super().prefetch(keys, timeout=timeout)
        for handle in handles:
            self.to_node.send(self.from_node.send, self._located, handle)
        return handles

    def _located(self, handle: LedgerHandle) -> None:
        there = handle.key.text in self.node.store.stored
        state = PrefetchState.RESIDENT if there else PrefetchState.MISSING
        self.settle(self.pending.index(handle), state)

    def claim_all(
        self,
        keys: Sequence[TensorKey],
        *,
        wait_seconds: float,
        timeout: float = 0.0,
        keeps: bool = True,
    ) -> ClaimHandle:
        return self.claims.claim_all(keys, wait_seconds, 0.0, keeps)

    def encoding(self, keys: Sequence[TensorKey], *, lease_seconds: float) -> None:
        self.claims.encoding(keys, lease_seconds)

    def unclaim(self, keys: Sequence[TensorKey], waiter: ClaimHandle | None = None) -> None:
        self.claims.unclaim(keys, waiter)


@dataclass(slots=True)
class _Step:
    ends_at: float
    saves: dict[str, str]
    requests: list[Request]
    orders: list[Any]


class VirtualEngine:
    """One step at a time; an encode takes `ENCODE_SECONDS`, in which there are no passes."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self.fleet = fleet
        self.node = VirtualNode(name, fleet.store, fleet.chance)
        self.buffer = VirtualBuffer(self.node, fleet.chance)
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client,
            ConnectorSettings(
                capacity_bytes=1 << 20,
                claim_wait_seconds=BOUND_SECONDS,
                claim_lease_seconds=LEASE_SECONDS,
                fetch_wait_seconds=FETCH_SECONDS,
                idle_wait_seconds=0,  # its time is not that of the threads
            ),
            EngineShape(True, True, 1, EMBED_BYTES),
            metadata_fields=lambda _: set(),
            clock=fleet.loop.time,
        )
        self.waiting: list[Request] = []
        self.step: _Step | None = None
        self.cache: list[str] = []
        self.finished: set[str] = set()
        self.refused_at: dict[str, float] = {}
        self.hangs = self.is_full = False

    def abort(self, request: Request) -> None:
        self.waiting.remove(request)
        self.scheduler.gate.forget(request.request_id)
        self.finished.add(request.request_id)

    def uses(self, key: str) -> bool:
        """Whether it encodes the item, or may encode it at once."""
        claims = self.scheduler.claims
        granted = (
            one.handle.keys
            for one in claims._claims.values()
            if one.handle is not None and one.handle.state is ClaimOutcome.GRANTED
        )
        unseen = {key.text for keys in granted for key in keys}
        # What was encoded is on its way to be published.
        saving = self.step is not None and key in self.step.saves.values()
        return key in unseen | claims._intents._granted | claims._encodes._encodes.keys() or saving

    def preempt(self) -> None:
        """vLLM preempts the last request of the running step; its encodes continue."""
        if self.step is not None and self.step.requests:
            request = self.step.requests.pop()
            request.num_preemptions += 1
            self.waiting.insert(0, request)

    def poll(self) -> None:
        """One pass, unless a step runs or the engine hangs."""
        now = self.fleet.loop.now
        if self.hangs or (self.step is not None and now < self.step.ends_at):
            return
        if self.step is not None:
            self._end(self.step)
        scheduled, encodes, allocated = [], [], list[str]()
        for request in list(self.waiting):
            if not self.scheduler.gate.ensure_cache_available(request, 0):
                since = self.refused_at.setdefault(request.request_id, now)
                waited = now - since
                assert waited <= FETCH_SECONDS + BOUND_SECONDS + EPSILON, "beyond the bound"
                continue
            if self.is_full:
                continue
            self.waiting.remove(request)
            scheduled.append(request)
            for index, feature in enumerate(request.mm_features):
                if feature.identifier in self.cache + allocated:
                    continue
                hit = self.scheduler.has_cache_item(feature.identifier)
                self.scheduler.item_allocated(request, index, is_hit=hit)
                allocated.append(feature.identifier)
                if not hit:
                    encodes.append(feature.identifier)
        self.fleet.encodes.update(encodes)
        self.cache += allocated
        freed = self.cache[: max(0, len(self.cache) - max(CACHE_ITEMS, len(allocated)))]
        del self.cache[: len(freed)]
        output = step_output(len(scheduled), freed=freed, finished=self.finished)
        metadata = self.scheduler.build_metadata(output)
        self.finished = set()
        takes = ENCODE_SECONDS if encodes else PASS_SECONDS
        orders = [load.order for load in metadata.mm_datas]
        self.step = _Step(now + takes, metadata.saves, scheduled, orders) if scheduled else None

    def _end(self, step: _Step) -> None:
        for key in step.saves.values():
            self.node.publish(key)
        self.buffer.done(step.orders)
        self.finished |= {request.request_id for request in step.requests}
        self.step = None


class Fleet:
    """Some engines, and what all of them did."""

    def __init__(self, engines: int, seed: int) -> None:
        self.loop = VirtualLoop()
        self.chance = random.Random(seed)
        self.store = Store(self.loop)
        self.encodes: Counter[str] = Counter()
        self.engines = [VirtualEngine(self, f"engine{n}") for n in range(engines)]

    def run(self, seconds: float) -> None:
        """Let time pass; the invariants are checked in every pass."""
        until = self.loop.now + seconds
        while self.loop.now < until:
            self.loop.run(PASS_SECONDS)
            for engine in self.engines:
                engine.poll()
            self.check()

    def check(self) -> None:
        """An engine holds only granted claims and those of its encodes, none for waits."""
        for key, (node, _, ends_at) in self.store.claims.items():
            engine = next((one for one in self.engines if one.node is node), None)
            ways = (engine.buffer.to_node, engine.buffer.from_node) if engine else ()
            if ends_at <= self.loop.now or not node.is_at_rest or any(w.under_way for w in ways):
                continue
            assert engine is not None, f"{node.name} is dead and holds {key}"
            assert engine.uses(key) or engine.hangs, f"{node.name} holds {key} for nothing"

    def kill(self, engine: VirtualEngine) -> None:
        self.engines.remove(engine)
        engine.node.end()


ITEMS = "ABCDE"


class Traffic(RuleBasedStateMachine):
    @initialize(engines=st.integers(2, 4), seed=st.integers(0, 1 << 16))
    def begin(self, engines: int, seed: int) -> None:
        self.fleet = Fleet(engines, seed)
        self.count = 0
        self.is_faulty = False

    def pick(self, data: st.DataObject) -> VirtualEngine:
        return data.draw(st.sampled_from(self.fleet.engines))

    @rule(data=st.data(), items=st.lists(st.sampled_from(ITEMS), min_size=1, max_size=4))
    def request_arrives(self, data: st.DataObject, items: list[str]) -> None:
        self.count += 1
        self.pick(data).waiting.append(make_request(f"r{self.count}", *items))

    @rule(items=st.lists(st.sampled_from(ITEMS), min_size=1, max_size=3))
    def everybody_sees_the_same(self, items: list[str]) -> None:
        for number, engine in enumerate(self.fleet.engines):
            self.count += 1
            order = items if number % 2 else items[::-1]
            engine.waiting.append(make_request(f"r{self.count}", *order))

    @rule(seconds=st.sampled_from([0.02, 0.1, 0.5]))
    def time_passes(self, seconds: float) -> None:
        self.fleet.run(seconds)

    @rule(data=st.data())
    def client_aborts(self, data: st.DataObject) -> None:
        engine = self.pick(data)
        if engine.waiting:
            engine.abort(data.draw(st.sampled_from(engine.waiting)))

    @rule(data=st.data())
    def vllm_preempts(self, data: st.DataObject) -> None:
        self.pick(data).preempt()

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        for engine in self.fleet.engines:
            if engine.hangs:
                engine.hangs = False
                engine.refused_at.clear()
            engine.is_full = False
        self.fleet.run(FETCH_SECONDS + BOUND_SECONDS)
        self.fleet.run(2.0)  # all that was to be encoded after that
        assert [request for engine in self.fleet.engines for request in engine.waiting] == []
        if not self.is_faulty:
            assert set(self.fleet.encodes.values()) <= {1}, "encoded twice"
        self.fleet.run(LEASE_SECONDS)
        for engine in self.fleet.engines:
            engine.poll()
            assert len(engine.scheduler.claims) == 0
            assert engine.buffer.claims._pending == {}
            assert not any(one.sets for one in engine.node.claims._sessions.values())
            assert engine.buffer.pinned == {}
        assert all(
            ends_at <= self.fleet.loop.now for _, _, ends_at in self.fleet.store.claims.values()
        )


class FaultyTraffic(Traffic):
    """Engines die, hang and have no room: each may cost an encode."""

    @precondition(lambda self: len(self.fleet.engines) > 1)
    @rule(data=st.data())
    def engine_dies(self, data: st.DataObject) -> None:
        self.is_faulty = True
        self.fleet.kill(self.pick(data))

    @rule(data=st.data())
    def engine_hangs_or_goes_on(self, data: st.DataObject) -> None:
        self.is_faulty = True
        engine = self.pick(data)
        engine.hangs = not engine.hangs
        engine.refused_at.clear()  # no request was refused during the hang

    @rule(data=st.data())
    def vllm_has_no_room_or_has_it_again(self, data: st.DataObject) -> None:
        self.is_faulty = True
        engine = self.pick(data)
        engine.is_full = not engine.is_full


usual = settings(
    max_examples=examples(150),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Traffic.TestCase.settings = usual
FaultyTraffic.TestCase.settings = usual
TestTraffic = Traffic.TestCase
TestFaultyTraffic = FaultyTraffic.TestCase


def test_the_model_detects_a_request_that_waits_while_it_holds_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule that all is given back on a conflict, broken."""
    monkeypatch.setattr(Claims, "_roll_back", lambda self, session, taken: None)
    quick = settings(
        usual,
        max_examples=1000,  # usually found within 50
        phases=[Phase.generate],
        report_multiple_bugs=False,
        database=None,
    )
    with pytest.raises(AssertionError, match=r"for nothing|encoded twice"):
        run_state_machine_as_test(Traffic, settings=quick)
