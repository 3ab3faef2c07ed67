"""Claims that a request makes together with its first lookup."""

from connector_standins import Feature, Position, claimed, counted, make_bench, make_request
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.protocol.messages import ClaimOutcome


def test_a_missing_item_costs_one_wait() -> None:
    bench = make_bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    assert claimed(bench) == [["A"]], "before the lookup ends"
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert not bench.ensure(request)
    bench.buffer.settle(0, PrefetchState.MISSING)
    assert bench.ensure(request), "the settled claim is used"
    assert not bench.allocate(request)
    assert claimed(bench) == [["A"]]
    assert counted(bench) == {"claim:granted": 1}
    assert bench.buffer.fleet.given_back == []


def test_the_claim_of_an_item_that_arrived_is_released() -> None:
    for granted in (True, False):
        bench = make_bench()
        bench.store("A", needs_fetch=True)
        request = make_request("r", "A")
        bench.ensure(request)
        if granted:
            bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        bench.buffer.settle(0, PrefetchState.RESIDENT)
        assert bench.ensure(request)
        assert bench.buffer.fleet.given_back == ["A"]
        assert len(bench.buffer.fleet.cancelled) == (not granted)
        assert bench.allocate(request)
        bench.build(finished=["r"])
        assert len(bench.scheduler.claims) == 0
        assert counted(bench) == {}


def test_only_the_missing_one_of_two_items_is_claimed_again() -> None:
    bench = make_bench()
    for name in "AB":
        bench.store(name, needs_fetch=True)
    request = make_request("r", "A", "B")
    bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.STORED)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    bench.buffer.settle(0, PrefetchState.MISSING)
    assert not bench.ensure(request)
    assert claimed(bench) == [["A", "B"], ["B"]]


def test_items_on_this_host_or_without_media_are_not_claimed() -> None:
    bench = make_bench()
    bench.store("A")
    assert bench.ensure(make_request("r", "A", "B")) is False
    assert claimed(bench) == [["B"]]
    bench = make_bench()
    bench.store("M", needs_fetch=True)
    request = make_request("m", "A")
    request.mm_features.append(Feature("M", Position(100, 10)))  # carries metadata only
    bench.ensure(request)
    assert claimed(bench) == []


def test_an_aborted_request_releases_its_claim() -> None:
    bench = make_bench()
    bench.store("A", needs_fetch=True)
    bench.ensure(make_request("r", "A"))
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    bench.build(finished=["r"])
    assert bench.buffer.fleet.given_back == ["A"]
    assert len(bench.scheduler.claims) == 0


def test_a_request_does_not_release_a_claim_that_another_wants() -> None:
    bench = make_bench()
    bench.store("A", needs_fetch=True)
    bench.ensure(make_request("first", "A"))
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    second = make_request("second", "A")
    bench.ensure(second)
    bench.buffer.settle(0, PrefetchState.MISSING)
    bench.ensure(second)
    assert claimed(bench) == [["A"], ["A"]]
    bench.build(finished=["first"])
    assert bench.buffer.fleet.given_back == []
