"""One encode per fleet under random traffic and faults, in virtual time; see `virtual_fleet`.

What must hold at every moment: nobody waits longer than the bound; nobody holds a claim that it
neither encodes by nor was granted. In the end every request was served, and while nothing was lost
or hung each item was encoded once.
"""

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

from connector_standins import make_request
from lookup_buffer.node.claim_sets import ClaimSets
from virtual_fleet import BOUND_SECONDS, FETCH_SECONDS, LEASE_SECONDS, Fleet, VirtualEngine

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
            assert engine.buffer.claiming._pending == {}
            assert not any(line.wishes for line in engine.node.sets._lines.values())
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
        engine.refused_at.clear()  # while it hung, nobody was refused

    @rule(data=st.data())
    def vllm_has_no_room_or_has_it_again(self, data: st.DataObject) -> None:
        self.is_faulty = True
        engine = self.pick(data)
        engine.is_full = not engine.is_full


usual = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Traffic.TestCase.settings = usual
FaultyTraffic.TestCase.settings = usual
TestTraffic = Traffic.TestCase
TestFaultyTraffic = FaultyTraffic.TestCase


def test_the_model_notices_who_keeps_claims_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule that all is given back on a conflict, broken."""
    refused = ClaimSets._refused

    def keep(self: ClaimSets, wish: Any, address: Any, fields: Any) -> None:
        wish.taken.clear()
        refused(self, wish, address, fields)

    monkeypatch.setattr(ClaimSets, "_refused", keep)
    quick = settings(usual, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(AssertionError, match=r"for nothing|encoded twice"):
        run_state_machine_as_test(Traffic, settings=quick)
