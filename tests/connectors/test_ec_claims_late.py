"""Claims on the scheduler side while vLLM does not poll a request: what expires, and what stays."""

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


def test_time_without_polls_does_not_count_as_fetch_time() -> None:
    bench = make_bench(ClaimOutcome.STORED)
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request), "its fetch time starts now"
    bench.buffer.settle(0, PrefetchState.MISSING)
    bench.clock.now += 3 * WAIT_SECONDS
    assert not bench.ensure(request), "another engine published it, and the fetch is in flight"
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert counted(bench) == {"claim:published": 1}


def test_items_are_looked_up_again_after_the_intent_expired() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.clock.now += 0.9 * INTENT_SECONDS
    assert bench.ensure(request)
    assert len(claimed(bench)) == 1
    bench.clock.now += 0.2 * INTENT_SECONDS
    bench.store("A")
    assert bench.ensure(request)
    assert bench.allocate(request), "another engine published it"
    assert bench.prefetched() == [["A"], ["A"]]


def test_a_late_grant_is_claimed_again() -> None:
    """The intent has expired, and another engine may have claimed, encoded and published the
    item."""
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


def test_after_several_late_grants_the_item_is_encoded_here() -> None:
    """Passes take longer than an intent lives, and the node never answers within one pass."""
    bench = make_bench()
    request = make_request("r", "A")
    for _ in range(LATE_MAX + 1):
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        bench.clock.now += 1.0
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert counted(bench) == {"claim:late": LATE_MAX, "claim:granted": 1}


def test_a_grant_in_time_resets_the_count_of_late_grants() -> None:
    """vLLM has no free slot for the request while it serves others."""
    bench = make_bench()
    request = make_request("r", "A")
    for _ in range(LATE_MAX + 1):
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        bench.clock.now += 1.0
        assert not bench.ensure(request), "it never passes without a claim"
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        assert bench.ensure(request)
        bench.build(0)
        bench.clock.now += 1.0


def test_waits_after_late_grants_share_one_limit_per_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes are long, so the next grant would be late as well."""
    bench = make_bench()
    requests = [make_request(name, name) for name in "abc"]
    for request in requests:
        assert not bench.ensure(request)
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    ask, timeouts = bench.buffer.claim_all, []

    def claim_slowly(keys: Any, *, wait_seconds: float, timeout: float, keeps: bool) -> Any:
        timeouts.append(timeout)
        bench.clock.now += min(timeout, LATE_SECONDS * 0.7)
        one = ask(keys, wait_seconds=wait_seconds, timeout=timeout, keeps=keeps)
        one.state = ClaimOutcome.GRANTED
        return one

    monkeypatch.setattr(bench.buffer, "claim_all", claim_slowly)
    bench.build(0)
    bench.clock.now += 1.0
    assert [bench.ensure(request) for request in requests[:2]] == [True, True]
    bench.build(0)
    assert bench.ensure(requests[2])
    assert timeouts == pytest.approx([LATE_SECONDS, 0.3 * LATE_SECONDS, LATE_SECONDS])


def test_passing_the_gate_without_being_scheduled_does_not_count_as_fetch_time() -> None:
    bench = make_bench(ClaimOutcome.GRANTED)
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request), "its fetch time starts now"
    bench.buffer.settle(0, PrefetchState.MISSING)
    del bench.buffer.stored["A"]
    for _ in range(10):
        assert bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 4
    bench.store("A", needs_fetch=True)
    assert not bench.ensure(request), "another engine published it, and the fetch is in flight"
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)


def running_bench() -> tuple[Bench, Any]:
    """A request that encodes one of its two items; a later step encodes the other."""
    bench = make_bench(ClaimOutcome.GRANTED)
    request = make_request("r", "A", "B")
    assert bench.ensure(request)
    assert not bench.allocate(request, 0)
    bench.build()
    return bench, request


def test_a_running_request_keeps_the_claims_of_its_later_items() -> None:
    """The step that encodes the first item may take longer than an intent lives."""
    bench, request = running_bench()
    renewals = bench.buffer.fleet.encoding
    assert renewals == [(["A", "B"], LEASE_SECONDS)]
    for _ in range(3):
        bench.clock.now += LEASE_SECONDS / 3
        bench.build()
    assert renewals[2:] == [(["B"], LEASE_SECONDS)] * 2, "A's step has run, B's has not"
    assert not bench.allocate(request, 1)
    bench.build()
    assert renewals[4:] == [(["B"], LEASE_SECONDS)]
    bench.build(finished=["r"])
    assert bench.buffer.fleet.given_back == []
    bench.build()
    assert len(bench.scheduler.claims) == 0


@pytest.mark.parametrize("way", ["aborted", "preempted"])
def test_an_aborted_or_preempted_request_releases_the_claims_of_its_later_items(way: str) -> None:
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
