"""Claims on the scheduler side while vLLM does not look at a request: what of them still stands."""

from connector_standins import make_request
from connectors.ec_claims import LATE_MAX
from lookup_buffer.claimed import ClaimSetState
from lookup_buffer.prefetched import PrefetchState
from scheduler_bench import WAIT_SECONDS, claimed, counted, make_bench


def test_waiting_for_a_seat_in_vllm_does_not_use_up_the_time_to_fetch() -> None:
    bench = make_bench(ClaimSetState.STORED)
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
    bench = make_bench(ClaimSetState.GRANTED)
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.clock.now += 0.7
    assert bench.ensure(request)
    assert len(claimed(bench)) == 1
    bench.clock.now += 0.4
    bench.store("A")
    assert bench.ensure(request)
    assert bench.allocate(request), "another published it meanwhile"
    assert bench.prefetched() == [["A"], ["A"]]


def test_a_grant_that_vllm_looked_at_too_late_is_asked_for_again() -> None:
    """The intent has ended meanwhile, and another may have taken it, encoded and published."""
    bench = make_bench()
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimSetState.GRANTED)
    bench.clock.now += 1.0
    assert not bench.ensure(request)
    assert claimed(bench) == [["A"], ["A"]]
    bench.store("A")
    bench.buffer.fleet.settle(ClaimSetState.STORED)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert counted(bench)["claim:late"] == 1


def test_grants_that_vllm_always_looks_at_too_late_do_not_keep_a_request_back() -> None:
    """Its passes take longer than an intent lives, and the node never answers within one."""
    bench = make_bench()
    request = make_request("r", "A")
    for _ in range(LATE_MAX + 1):
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimSetState.GRANTED)
        bench.clock.now += 1.0
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert counted(bench) == {"claim:late": LATE_MAX, "claim:granted": 1}


def test_waiting_for_vllms_room_does_not_use_up_the_time_to_fetch_what_another_encoded() -> None:
    bench = make_bench(ClaimSetState.GRANTED)
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
