"""Claims on the scheduler side while vLLM does not look at a request: what of them still stands."""

from typing import Any

import pytest

from connector_standins import (
    LEASE_SECONDS,
    WAIT_SECONDS,
    Bench,
    claimed,
    counted,
    make_bench,
    make_request,
)
from connectors.ec.claims import LATE_MAX, LATE_SECONDS
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.protocol.messages import ClaimOutcome
from lookup_buffer.times import INTENT_SECONDS


def test_waiting_for_a_seat_in_vllm_does_not_use_up_the_time_to_fetch() -> None:
    bench = make_bench(ClaimOutcome.STORED)
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request), "from now on it has its time for bytes"
    bench.buffer.settle(0, PrefetchState.MISSING)
    bench.clock.now += 3 * WAIT_SECONDS
    assert not bench.ensure(request), "another published it, and its bytes are on their way"
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert counted(bench) == {"claim:published": 1}


def test_an_intent_that_lapsed_before_vllm_had_room_is_asked_for_again() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.clock.now += 0.9 * INTENT_SECONDS
    assert bench.ensure(request)
    assert len(claimed(bench)) == 1
    bench.clock.now += 0.2 * INTENT_SECONDS
    bench.store("A")
    assert bench.ensure(request)
    assert bench.allocate(request), "another published it meanwhile"
    assert bench.prefetched() == [["A"], ["A"]]


def test_a_grant_that_vllm_looked_at_too_late_is_asked_for_again() -> None:
    """The intent has ended meanwhile, and another may have taken it, encoded and published."""
    bench = make_bench()
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    bench.clock.now += 1.0
    assert not bench.ensure(request)
    assert claimed(bench) == [["A"], ["A"]]
    bench.store("A")
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert counted(bench)["claim:late"] == 1


def test_grants_that_vllm_always_looks_at_too_late_do_not_keep_a_request_back() -> None:
    """Its passes take longer than an intent lives, and the node never answers within one."""
    bench = make_bench()
    request = make_request("r", "A")
    for _ in range(LATE_MAX + 1):
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        bench.clock.now += 1.0
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert counted(bench) == {"claim:late": LATE_MAX, "claim:granted": 1}


def test_a_grant_that_was_seen_in_time_begins_the_count_anew() -> None:
    """The request waits for a seat in vLLM for as long as others are served."""
    bench = make_bench()
    request = make_request("r", "A")
    for _ in range(LATE_MAX + 1):
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        bench.clock.now += 1.0
        assert not bench.ensure(request), "it never goes on without a claim"
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        assert bench.ensure(request)
        bench.build(0)
        bench.clock.now += 1.0


def test_answers_to_late_questions_are_waited_for_within_a_bound_for_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes are long, so the next grant would be seen too late as well."""
    bench = make_bench()
    requests = [make_request(name, name) for name in "abc"]
    for request in requests:
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    ask, timeouts = bench.buffer.claim_all, []

    def answered_after_a_while(keys: Any, *, wait_seconds: float, timeout: float) -> Any:
        timeouts.append(timeout)
        bench.clock.now += min(timeout, LATE_SECONDS * 0.7)
        one = ask(keys, wait_seconds=wait_seconds, timeout=timeout)
        one.state = ClaimOutcome.GRANTED
        return one

    monkeypatch.setattr(bench.buffer, "claim_all", answered_after_a_while)
    bench.build(0)
    bench.clock.now += 1.0
    assert [bench.ensure(request) for request in requests[:2]] == [True, True]
    bench.build(0)
    assert bench.ensure(requests[2])
    assert timeouts == pytest.approx([LATE_SECONDS, 0.3 * LATE_SECONDS, LATE_SECONDS])


def test_waiting_for_vllms_room_does_not_use_up_the_time_to_fetch_what_another_encoded() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request), "from now on it has its time for bytes"
    bench.buffer.settle(0, PrefetchState.MISSING)
    del bench.buffer.stored["A"]
    for _ in range(10):
        assert bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 4
    bench.store("A", needs_fetch=True)
    assert not bench.ensure(request), "another published it, and its bytes are on their way"
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)


def running_bench() -> tuple[Bench, Any]:
    """A request that encodes one of its two items and has the other still ahead."""
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A", "B")
    assert bench.ensure(request)
    assert not bench.allocate(request, 0)
    bench.build()
    return bench, request


def test_who_runs_keeps_the_claims_of_the_items_that_are_still_ahead() -> None:
    """The step that encodes the first may take longer than an intent lives."""
    bench, request = running_bench()
    told = bench.buffer.fleet.encoding
    assert told == [(["A", "B"], LEASE_SECONDS)]
    for _ in range(3):
        bench.clock.now += LEASE_SECONDS / 3
        bench.build()
    assert told[2:] == [(["B"], LEASE_SECONDS)] * 2, "A's step has run, B is still to come"
    assert not bench.allocate(request, 1)
    bench.build()
    assert told[4:] == [(["B"], LEASE_SECONDS)]
    bench.build(finished=["r"])
    assert bench.buffer.fleet.given_back == []
    bench.build()
    assert len(bench.scheduler.claims) == 0


@pytest.mark.parametrize("way", ["aborted", "preempted"])
def test_who_runs_no_more_gives_back_the_claims_of_what_was_still_ahead(way: str) -> None:
    bench, request = running_bench()
    if way == "aborted":
        bench.build(finished=["r"])
        bench.build()
        assert len(bench.scheduler.claims) == 0
    else:
        request.num_preemptions += 1
        bench.build(freed=["A"])
        bench.ensure(request)
    assert bench.buffer.fleet.given_back == ["B"]
    bench.clock.now += LEASE_SECONDS
    bench.build()
    assert len(bench.buffer.fleet.encoding) == 1
