"""A pass with nothing to run waits for what its requests wait for, and others do not."""

import threading
import time

import pytest

from connector_standins import Bench, Clock, LedgerHandle, make_request
from connectors.pass_time import IdleTime
from lookup_buffer.protocol.messages import ClaimOutcome

IDLE_SECONDS = 5.0
SOON_SECONDS = 0.5


def make_bench() -> Bench:
    bench = Bench(idle_wait_seconds=1.0, claim_wait_seconds=30.0)
    bench.buffer.fleet.answers = ClaimOutcome.PENDING
    return bench


def granted(bench: Bench) -> None:
    time.sleep(0.05)
    one = bench.buffer.fleet.sets[-1]
    with one.settled:
        bench.buffer.fleet.settle(ClaimOutcome.GRANTED)
        one.settled.notify_all()


def test_the_answer_that_comes_in_an_idle_pass_counts_in_it() -> None:
    bench = make_bench()
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.build(0)
    answering = threading.Thread(target=granted, args=(bench,))
    answering.start()
    assert bench.ensure(request)
    answering.join()


def test_an_idle_pass_waits_for_an_item_of_which_only_metadata_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(idle_wait_seconds=1.0, metadata_wait_seconds=30.0)
    request = make_request("r", "A", metadata_only=True)
    waits: list[float] = []
    monkeypatch.setattr(LedgerHandle, "wait", lambda _, seconds: waits.append(seconds))
    for tokens in (1, 0, 0):
        assert not bench.ensure(request)
        bench.build(tokens)
    assert waits == [0.0, 1.0]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_pass_with_something_to_run_does_not_wait(tokens: int) -> None:
    def seconds_of_a_pass() -> float:
        bench = make_bench()
        request = make_request("r", "A")
        bench.ensure(request)
        bench.build(tokens)
        started = time.monotonic()
        assert not bench.ensure(request)
        return time.monotonic() - started

    # A busy machine delays one or another, not all.
    assert (min(seconds_of_a_pass() for _ in range(5 if tokens else 1)) > SOON_SECONDS) is (
        tokens == 0
    )


def test_an_idle_pass_waits_once_for_all_its_requests() -> None:
    bench = make_bench()
    requests = [make_request(f"r{n}", f"A{n}") for n in range(32)]
    for request in requests:
        bench.ensure(request)
    bench.build(0)
    started = time.monotonic()
    assert not any(bench.ensure(request) for request in requests)
    assert time.monotonic() - started < 30.0, "each waited for a second"


def test_time_that_was_spent_is_gone_until_the_next_pass() -> None:
    clock = Clock()
    idle = IdleTime(IDLE_SECONDS, clock)
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        clock.now += 2.0
        return len(asked) < 3

    idle.begin_pass(is_idle=True)
    assert [idle.spend_on(wait) for _ in range(4)] == [True, True, False, False]
    assert asked == [5.0, 3.0, 1.0, 0.0]
    idle.begin_pass(is_idle=False)
    idle.spend_on(wait)
    idle.begin_pass(is_idle=True)
    idle.spend_on(wait)
    assert asked[4:] == [0.0, 5.0]
