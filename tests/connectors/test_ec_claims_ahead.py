"""What a request that is seen for the first time claims beside asking whether anybody has it."""

from connector_standins import Feature, Position, claimed, counted, make_bench, make_request
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.protocol.messages import ClaimOutcome


def test_one_wait_where_nobody_has_it() -> None:
    bench = make_bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    assert claimed(bench) == [["A"]], "while it is not known yet whether anybody has it"
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    assert not bench.ensure(request)
    bench.buffer.settle(0, PrefetchState.MISSING)
    assert bench.ensure(request), "the answer that is there is used"
    assert not bench.allocate(request)
    assert claimed(bench) == [["A"]]
    assert counted(bench) == {"claim:granted": 1}
    assert bench.buffer.fleet.given_back == []


def test_what_came_after_all_is_not_kept_from_others() -> None:
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


def test_of_two_that_one_of_came_the_other_is_claimed_alone() -> None:
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


def test_what_this_host_holds_or_that_cannot_be_encoded_is_not_claimed() -> None:
    bench = make_bench()
    bench.store("A")
    assert bench.ensure(make_request("r", "A", "B")) is False
    assert claimed(bench) == [["B"]]
    bench = make_bench()
    bench.store("M", needs_fetch=True)
    request = make_request("m", "A")
    request.mm_features.append(Feature("M", Position(100, 10)))  # metadata alone
    bench.ensure(request)
    assert claimed(bench) == []


def test_who_is_aborted_takes_it_back() -> None:
    bench = make_bench()
    bench.store("A", needs_fetch=True)
    bench.ensure(make_request("r", "A"))
    bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
    bench.build(finished=["r"])
    assert bench.buffer.fleet.given_back == ["A"]
    assert len(bench.scheduler.claims) == 0


def test_one_request_gives_nothing_back_that_another_asked_for() -> None:
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
