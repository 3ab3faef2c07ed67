"""Claims on the scheduler side, one rule per test: which request encodes, which waits, and how
long."""

import pytest

from connector_standins import (
    BOUND_SECONDS,
    LEASE_SECONDS,
    WAIT_SECONDS,
    claimed,
    counted,
    make_bench,
    make_request,
)
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome


def test_missing_items_are_claimed_in_sorted_order_before_they_are_encoded() -> None:
    bench = make_bench()
    bench.store("B")
    request = make_request("r", "C", "B", "A", "C")
    assert not bench.ensure(request), "no request may encode before the claims are settled"
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert bench.ensure(request)
    assert claimed(bench) == [["A", "C"]]
    assert bench.buffer.fleet.waits_seconds == [BOUND_SECONDS]
    assert not bench.allocate(request, 0)
    bench.build()
    assert bench.buffer.fleet.encoding == [(["C", "A"], LEASE_SECONDS)], "A follows in a later step"
    assert counted(bench) == {"claim:granted": 1}


def test_a_waiting_request_loads_a_published_item() -> None:
    bench = make_bench()
    request = make_request("r", "A", "B")
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.clock.now += BOUND_SECONDS / 2
    bench.build(0)
    assert not bench.ensure(request)
    bench.store("A")
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    assert not bench.ensure(request), "B has to be claimed again: the set was released"
    assert claimed(bench) == [["A", "B"], ["B"]]
    assert bench.buffer.fleet.waits_seconds == [BOUND_SECONDS, BOUND_SECONDS / 2]
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert bench.ensure(request)
    assert bench.allocate(request, 0)
    assert not bench.allocate(request, 1)
    assert counted(bench) == {"claim:waited": 1, "claim:published": 1, "claim:granted": 1}


def test_after_the_wait_limit_the_item_is_encoded_and_stored_here() -> None:
    bench = make_bench()
    request = make_request("r", "A")
    bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.clock.now += BOUND_SECONDS - 0.01
    assert not bench.ensure(request)
    bench.clock.now += 0.01
    assert bench.ensure(request)
    assert len(bench.buffer.fleet.cancelled) == 1
    assert not bench.allocate(request)
    assert bench.build().saves == {"A": "A"}
    assert bench.buffer.fleet.encoding == [(["A"], LEASE_SECONDS)]
    assert counted(bench) == {"claim:waited": 1, "claim:held": 1, "encode:despite_holder": 1}


@pytest.mark.parametrize("way", ["silent", "failed", "out of reach"])
def test_after_a_fault_of_the_claim_the_item_is_encoded_here(way: str) -> None:
    bench = make_bench()
    request = make_request("r", "A")
    assert not bench.ensure(request)
    if way == "silent":  # the node does not even report a holder
        bench.clock.now += WAIT_SECONDS
    elif way == "failed":
        bench.buffer.fleet.settle(ClaimOutcome.FAILED)
    else:
        for _ in range(3):  # the store lists it, but no fetch succeeds
            bench.buffer.fleet.settle(ClaimOutcome.STORED)
            bench.ensure(request)
    assert bench.ensure(request)
    assert not bench.allocate(request)
    reason = {"silent": "no_answer", "failed": "failed", "out of reach": "out_of_reach"}[way]
    assert counted(bench)[f"claim:{reason}"] == 1
    assert "encode:despite_holder" not in counted(bench)


def test_a_miss_from_before_the_publication_is_not_reused_after_it() -> None:
    """Also where another request that shares the prefetch has not been polled since."""
    bench = make_bench(ClaimOutcome.STORED)
    requests = [make_request("r1", "A"), make_request("r2", "A")]
    bench.store("A", needs_fetch=True)
    assert [bench.ensure(request) for request in requests] == [False, False]
    bench.buffer.settle(0, PrefetchState.MISSING)
    bench.store("A")
    assert bench.ensure(requests[0])
    assert bench.ensure(requests[1])
    assert bench.allocate(requests[0])
    assert counted(bench) == {"claim:published": 1}


def test_the_wait_budget_of_a_request_starts_only_once() -> None:
    bench = make_bench()
    request = make_request("r", "A", "B")
    bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.clock.now += BOUND_SECONDS
    assert bench.ensure(request)
    bench.allocate(request, 0)
    bench.build()
    request.num_preemptions += 1
    bench.build(freed=["A"])
    assert bench.ensure(request), "preempted: the budget does not start again"
    assert len(claimed(bench)) == 1


def test_waiting_for_an_encode_does_not_count_as_fetch_time() -> None:
    bench = make_bench()
    bench.store("B", needs_fetch=True)
    request = make_request("r", "A", "B")
    assert not bench.ensure(request)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.clock.now += WAIT_SECONDS + 1
    bench.store("A", needs_fetch=True)
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    assert not bench.ensure(request)
    bench.clock.now += WAIT_SECONDS - 1
    assert not bench.ensure(request)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request, 0)


@pytest.mark.parametrize("why", ["computed", "allocated", "waiting"])
def test_a_running_request_never_waits(why: str) -> None:
    """It gets one more item while it runs, as a session with streaming input does."""
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A")
    assert bench.ensure(request)
    if why == "computed":
        request.num_computed_tokens = 1
    elif why == "allocated":
        bench.allocate(request)
        bench.build()
    request.mm_features += make_request("r", "A", "B").mm_features[1:]
    bench.buffer.fleet.answers = ClaimOutcome.PENDING
    assert bench.ensure(request) == (why != "waiting")
    assert len(claimed(bench)) == (2 if why == "waiting" else 1)
    bench.allocate(request, 1)
    bench.build()
    assert "B" in bench.buffer.fleet.encoding[-1][0], "other engines may wait for it"


def test_a_granted_request_that_was_not_scheduled_loads_what_another_encoded() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    one, two = make_request("one", "A"), make_request("two", "A")
    assert bench.ensure(one)
    assert bench.ensure(two)
    bench.allocate(one)
    bench.build()
    bench.store("A")
    bench.build(freed=["A"])
    assert bench.ensure(two)
    assert bench.allocate(two), "vLLM evicted it, but it is stored"


def test_a_cached_prefix_does_not_make_a_waiting_request_a_running_one() -> None:
    bench = make_bench()
    assert not bench.ensure(make_request("r", "A"), 2)
    assert claimed(bench) == [["A"]]


def test_a_consumer_waits_for_a_producers_encode_and_loads_it() -> None:
    """The producer may have answered already, and publish a moment later."""
    bench = make_bench(producer=False)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.build(0)
    assert not bench.ensure(request)
    bench.store("A")
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert counted(bench) == {"claim:waited": 1, "claim:published": 1}


def test_a_consumer_keeps_no_claim_and_encodes_for_itself() -> None:
    bench = make_bench(ClaimOutcome.GRANTED, producer=False)
    request = make_request("r", "A")
    assert bench.ensure(request)
    assert [one.keeps for one in bench.buffer.fleet.sets] == [False]
    assert not bench.allocate(request)
    bench.build()
    assert bench.buffer.fleet.encoding == []
    assert counted(bench) == {}


def test_no_claims_for_metadata_items_or_when_disabled() -> None:
    bench = make_bench(claim_wait_seconds=0)
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.allocate(request)
    bench.build()
    assert claimed(bench) == []
    assert bench.buffer.fleet.encoding == []
    bench = make_bench()
    request = make_request("r", "A", "B")
    request.mm_features[1].data = None
    assert not bench.ensure(request)
    assert claimed(bench) == [], "a request that waits for B must not hold the claim for A"
    bench.store("B")
    bench.clock.now += 0.02
    bench.ensure(request)
    assert claimed(bench) == [["A"]]


def test_a_pure_producer_claims_and_skips_what_another_published() -> None:
    bench = make_bench(consumer=False)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.store("A")
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    assert bench.ensure(request)
    assert bench.allocate(request), "stored already: no second encode"


def test_an_unused_claim_is_released_unless_another_request_wants_it() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    one, two = make_request("one", "A", "B"), make_request("two", "B")
    assert bench.ensure(one)
    assert bench.ensure(two)
    bench.scheduler.gate.forget("one")
    assert bench.buffer.fleet.given_back == ["A"]
    bench.allocate(two)
    bench.build(finished=["two"])
    assert bench.buffer.fleet.given_back == ["A"], (
        "the claim of an encode ends with its publication"
    )
    for _ in range(3):
        bench.build()
    assert len(bench.scheduler.claims) == 0


def test_an_aborted_request_cancels_its_claims() -> None:
    bench = make_bench()
    request = make_request("r", "A")
    bench.ensure(request)
    bench.scheduler.gate.forget("r")
    assert bench.buffer.fleet.cancelled == bench.buffer.fleet.sets
    assert bench.buffer.fleet.given_back == ["A"], "it may have been granted since the last poll"
    assert len(bench.scheduler.claims) == 0


def test_an_encode_is_renewed_by_passes_until_its_step_has_surely_run() -> None:
    bench = make_bench(ClaimOutcome.GRANTED, steps_in_flight=2)
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    bench.build(0)  # nothing was dispatched, so a later step encodes it
    renewals = bench.buffer.fleet.encoding
    assert renewals == [(["A"], LEASE_SECONDS)]
    bench.clock.now += LEASE_SECONDS / 3 - 0.1
    bench.build()
    assert len(renewals) == 1, "at most once per third of the lease"
    bench.clock.now += 0.1
    bench.build()
    assert renewals == [(["A"], LEASE_SECONDS)] * 2
    bench.clock.now += LEASE_SECONDS
    bench.build()
    assert len(renewals) == 2, "the step has run; only the worker's insert is left"
    bench.clock.now += LEASE_SECONDS
    bench.build()
    assert len(renewals) == 2


def test_the_wait_limit_follows_the_duration_of_local_encodes() -> None:
    bench = make_bench(ClaimOutcome.GRANTED, claim_wait_seconds=None, steps_in_flight=1)
    claims = bench.scheduler.claims
    assert claims.wait_seconds == 10.0

    def encode(name: str, seconds: float) -> None:
        request = make_request(name, name)
        bench.ensure(request)
        bench.allocate(request)
        bench.build()
        bench.clock.now += seconds
        bench.build(freed=[name], finished=[name])

    encode("short", 0.2)
    assert claims.wait_seconds == 10.0
    encode("long", 4.0)
    assert claims.wait_seconds == pytest.approx(20.0)
    encode("idle", 3600.0)
    assert claims.wait_seconds == 60.0
    for number in range(16):
        encode(f"later{number}", 3.0)
    assert claims.wait_seconds == pytest.approx(15.0)


def test_an_item_that_another_request_began_to_encode_is_not_encoded_twice() -> None:
    """The claim belongs to the engine, so it is granted to the second request too. By then the item
    is in vLLM's cache."""
    bench = make_bench()
    one, two = make_request("one", "A"), make_request("two", "A", "B")
    bench.ensure(one)
    bench.ensure(two)
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED, 0)
    assert bench.ensure(one)
    bench.allocate(one)
    bench.build()
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED, 1)
    assert not bench.ensure(two)
    assert claimed(bench) == [["A"], ["A", "B"], ["B"]]
    bench.store("A")
    bench.build(freed=["A"])
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert bench.ensure(two)
    assert bench.allocate(two, 0), "vLLM evicted it, but it is stored"
    assert not bench.allocate(two, 1)
    for _ in range(3):
        bench.build()
    bench.build(finished=["one", "two"])
    assert "A" not in bench.buffer.fleet.given_back
    assert len(bench.scheduler.claims) == 0


def test_the_wait_ends_when_another_request_of_the_engine_encodes_the_item() -> None:
    """The node reports no change, because the claim stays with this engine. The item will be in
    vLLM's cache soon."""
    bench = make_bench()
    first, second = make_request("first", "A"), make_request("second", "A")
    bench.ensure(first)
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert not bench.ensure(second)
    assert bench.ensure(first)
    assert not bench.allocate(first)
    bench.build()
    assert bench.ensure(second)
    assert len(claimed(bench)) == 2


def test_the_claim_of_an_encode_cancelled_in_the_same_pass_is_released() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A", "B")
    assert bench.ensure(request)
    bench.allocate(request, 0)
    bench.allocate(request, 1)
    bench.build(encoded={"r": [0]})
    assert bench.buffer.fleet.given_back == ["B"]
    assert bench.buffer.fleet.encoding == [(["A"], LEASE_SECONDS)]


def test_claims_use_the_keys_of_the_items() -> None:
    bench = make_bench()
    bench.ensure(make_request("r", "A%"))
    assert bench.buffer.fleet.sets[0].keys == [TensorKey("A%")]
