"""The scheduler side, one rule per test. test_ec_scheduler_model tests how the rules combine."""

from typing import Any

import pytest

from connector_standins import (
    EMBED_BYTES,
    EMBEDS,
    WAIT_SECONDS,
    Bench,
    LedgerBuffer,
    make_request,
)
from lookup_buffer.client.handles import PrefetchState


def test_a_resident_item_is_promised_loaded_and_released_after_the_steps_in_flight() -> None:
    bench = Bench(steps_in_flight=2)
    bench.store("A")
    request = make_request("r", "A")
    assert bench.ensure(request)
    assert bench.allocate(request)
    metadata = bench.build()
    (load,) = metadata.mm_datas
    assert (load.mm_hash, load.num_token) == ("A", EMBEDS)
    assert load.order is not None
    assert load.order.ticket in bench.buffer.pinned
    assert metadata.saves == {}
    bench.scheduler.gate.forget("r")  # abort: a dispatched load stays pinned until its step ran
    bench.build()
    assert load.order.ticket in bench.buffer.pinned, "step k + 1 may be built while k runs"
    bench.build()
    assert bench.buffer.pinned == {}
    assert len(bench.scheduler.pins) == 0


def test_missing_item_is_encoded_and_may_be_saved() -> None:
    bench = Bench()
    request = make_request("r", "A%")
    assert bench.ensure(request)
    assert not bench.allocate(request)
    metadata = bench.build()
    assert metadata.mm_datas == []
    assert metadata.saves == {"A%": "A%25"}
    assert bench.scheduler.counters.totals()["miss:absent"] == 1
    assert bench.build().saves == {}


def test_consumer_saves_nothing() -> None:
    bench = Bench(producer=False)
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    assert bench.build().saves == {}


def test_a_request_waits_for_a_fetch_once_and_within_its_budget() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    bench.clock.now += WAIT_SECONDS / 2
    assert not bench.ensure(request)
    bench.clock.now += WAIT_SECONDS / 2
    assert bench.ensure(request), "the budget is spent: encode here"
    assert not bench.allocate(request)
    assert bench.build().mm_datas == []
    bench.build(freed=["A"])
    bench.ensure(request, EMBEDS + 3)
    assert bench.ensure(request, 0), "preempted: the budget does not start again"
    assert bench.scheduler.counters.totals()["miss:timeout"] == 2
    assert [handle.is_released for handle in bench.buffer.pending] == [True, True]


def test_a_miss_is_counted_once_while_another_item_is_in_flight() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A", "B")
    for _ in range(3):
        assert not bench.ensure(request)
        bench.build(0)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.scheduler.counters.totals() == {"miss:absent": 1}


def test_the_log_names_the_reason_of_each_miss(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("B", needs_fetch=True)
    request = make_request("r", "A", "B")
    with caplog.at_level("DEBUG"):
        bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 2
        bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 2
        assert bench.ensure(request)
    assert "request r: item A missed: absent" in caplog.text
    assert "request r: item B missed: timeout" in caplog.text


def test_fetch_that_arrives_lets_the_request_pass() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    assert not bench.scheduler.has_cache_item("A"), "a pending item is not resident"
    bench.build(0)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert [load.mm_hash for load in bench.build().mm_datas] == ["A"]
    assert bench.prefetched() == [["A"]], "one call for the request's whole life"


def test_first_lookups_of_a_pass_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(first_sight_seconds=0.001)
    slow = bench.buffer.prefetch

    def prefetch(keys: Any, *, timeout: float) -> Any:
        bench.clock.now += min(timeout, 0.0007)
        return slow(keys, timeout=timeout)

    monkeypatch.setattr(bench.buffer, "prefetch", prefetch)
    for name in "abcd":
        bench.ensure(make_request(name, name))
    timeouts = [timeout for name, _, timeout in bench.buffer.calls if name == "prefetch"]
    assert timeouts == pytest.approx([0.001, 0.0003, 0.0, 0.0])
    bench.build(0)
    bench.ensure(make_request("e", "e"))
    assert bench.buffer.calls[-1][2] == pytest.approx(0.001)


def test_only_later_items_that_vllms_cache_lacks_are_prefetched() -> None:
    bench = Bench()
    first = make_request("first", "B")
    bench.ensure(first)
    bench.allocate(first)
    bench.build()
    bench.buffer.calls.clear()
    request = make_request("r", "A", "B", "C")
    end_of_a = request.mm_features[0].mm_position.offset + EMBEDS
    bench.ensure(request, end_of_a)
    assert bench.prefetched() == [["C"]], "A is computed, B is in vLLM's own cache"


def test_an_evicted_item_is_loaded_in_the_same_pass() -> None:
    bench = Bench()
    first = make_request("first", "B")
    bench.ensure(first)
    bench.allocate(first)
    bench.build()
    bench.store("B")
    later = make_request("later", "B")
    assert bench.ensure(later)
    assert bench.allocate(later), "A-B-A: vLLM evicted it in this pass, so it is loaded"
    step = bench.build(freed=["B"], scheduled=["later"])
    assert [load.mm_hash for load in step.mm_datas] == ["B"]


def test_after_a_reset_of_vllms_cache_every_item_is_looked_up() -> None:
    bench = Bench()
    for name in "AB":
        first = make_request(f"first {name}", name)
        bench.ensure(first)
        bench.allocate(first)
        bench.build()
        bench.store(name)
    bench.buffer.calls.clear()
    assert bench.ensure(make_request("again", "A"))
    assert not bench.prefetched(), "the reset is not known yet"
    assert bench.scheduler.has_cache_item("A"), "vLLM asks, so its cache was reset"
    bench.build()
    assert not bench.buffer.pinned, "an unused promise is not kept"
    assert bench.ensure(make_request("after", "B"))
    assert bench.prefetched() == [["A"], ["B"]]


def test_lookups_of_items_that_vllm_lost_have_a_time_limit_per_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, names = Bench(), "ABCDE"
    for name in names:
        first = make_request(f"first {name}", name)
        bench.ensure(first)
        bench.allocate(first)
        bench.build()
        bench.store(name)
    again = make_request("again", *names)
    assert bench.ensure(again)
    waited: list[float] = []

    def slow(keys: Any, *, timeout: float = 0.0, wait_seconds: float = 0.0) -> Any:
        """Return shortly before the timeout."""
        waited.append(0.8 * timeout)
        bench.clock.now += waited[-1]
        return LedgerBuffer.prefetch(bench.buffer, keys, timeout=timeout)

    monkeypatch.setattr(bench.buffer, "prefetch", slow)
    for name in names:
        bench.scheduler.has_cache_item(name)
    assert 0 < sum(waited) <= 0.25
    bench.build()


def full_bench() -> tuple[Bench, Any]:
    """A request for which the pins of others leave no space in a budget of two items."""
    bench = Bench(prefetch_bytes=2 * EMBEDS * EMBED_BYTES)
    for name in "ABC":
        bench.store(name)
    assert bench.ensure(make_request("fits", "A"))
    request = make_request("now", "B", "C")
    assert not bench.ensure(request)
    assert bench.prefetched() == [["A"]], "all or nothing"
    return bench, request


def test_a_request_waits_for_space_in_the_pin_budget() -> None:
    bench, request = full_bench()
    bench.clock.now += 0.9 * WAIT_SECONDS
    assert not bench.ensure(request)
    bench.build(0, finished=["fits"])
    assert bench.ensure(request)
    assert bench.prefetched() == [["A"], ["B", "C"]], "prefetched once there is space"
    assert bench.allocate(request)
    assert "over_budget" not in bench.scheduler.counters.totals()


def test_the_waits_for_space_and_for_bytes_have_separate_limits() -> None:
    bench, request = full_bench()
    bench.store("C", needs_fetch=True)
    bench.clock.now += 0.9 * WAIT_SECONDS
    bench.build(0, finished=["fits"])
    for _ in range(2):
        assert not bench.ensure(request)
        bench.clock.now += 0.5 * WAIT_SECONDS
    assert bench.ensure(request)
    assert bench.scheduler.counters.totals() == {"miss:timeout": 1}


def test_the_wait_for_space_has_the_limit_of_the_wait_for_bytes() -> None:
    bench, request = full_bench()
    bench.clock.now += WAIT_SECONDS
    for _ in range(2):
        assert bench.ensure(request)
    assert bench.scheduler.counters.totals()["over_budget"] == 1
    assert not bench.scheduler.has_cache_item("B")
    bench.build(0, finished=["fits"])
    assert bench.ensure(request)
    assert bench.prefetched() == [["A"], ["B", "C"]], "prefetched once there is space"


def test_a_running_request_does_not_wait_for_space() -> None:
    bench, request = full_bench()
    request.num_computed_tokens = 1
    assert bench.ensure(request)
    assert bench.scheduler.counters.totals()["over_budget"] == 1


def test_a_request_larger_than_the_pin_budget_continues_without_prefetch() -> None:
    bench = Bench(prefetch_bytes=2 * EMBEDS * EMBED_BYTES)
    for name in "ABC":
        bench.store(name)
    never = make_request("never", "A", "B", "C")
    for _ in range(2):
        assert bench.ensure(never)
    assert bench.prefetched() == []
    assert bench.scheduler.counters.totals()["over_budget"] == 1


@pytest.mark.parametrize("way", ["finished", "passed", "encoded", "request_finished"])
def test_an_undispatched_pin_is_released(way: str) -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    assert bench.ensure(request)
    assert len(bench.buffer.pinned) == 1
    if way == "finished":
        bench.build(0, finished=["r"])
    elif way == "passed":
        bench.ensure(request, request.num_tokens)
    elif way == "encoded":
        bench.scheduler.item_allocated(request, 0, is_hit=False)
    else:
        bench.scheduler.gate.forget("r")
    assert bench.buffer.pinned == {}
    assert len(bench.scheduler.pins) == 0
    assert bench.scheduler.pins.held_bytes == 0


def test_pin_shared_by_two_requests_stays_for_the_other() -> None:
    bench = Bench()
    bench.store("A")
    one, two = make_request("one", "A"), make_request("two", "A")
    assert bench.ensure(one)
    assert bench.ensure(two)
    assert bench.prefetched() == [["A"]]
    bench.scheduler.gate.forget("one")
    assert len(bench.buffer.pinned) == 1
    assert bench.allocate(two)


def test_a_promise_holds_until_the_end_of_the_pass_even_if_the_request_ends() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    assert bench.scheduler.has_cache_item("A")
    bench.scheduler.gate.forget("r")
    assert bench.scheduler.has_cache_item("A")
    assert len(bench.buffer.pinned) == 1
    other = make_request("other", "A")
    assert bench.allocate(other)
    (load,) = bench.build().mm_datas
    assert load.order is not None
    assert load.order.ticket in bench.buffer.pinned


def test_an_unused_promise_ends_with_the_pass() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    assert bench.scheduler.has_cache_item("A")
    assert bench.build().mm_datas == []
    assert len(bench.buffer.pinned) == 1, "the request still wants it"
    bench.scheduler.gate.forget("r")
    assert bench.buffer.pinned == {}


def test_an_answer_holds_for_the_pass() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    assert not bench.scheduler.has_cache_item("A")
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert not bench.scheduler.has_cache_item("A"), "vLLM may be about to encode it"
    bench.build(0)
    assert bench.ensure(request)
    assert bench.scheduler.has_cache_item("A")


def test_step_without_tokens_keeps_its_loads_for_the_next() -> None:
    bench = Bench(steps_in_flight=1)
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    assert bench.build(0).mm_datas == []
    assert bench.build(0).mm_datas == []
    assert len(bench.buffer.pinned) == 1
    assert [load.mm_hash for load in bench.build(1).mm_datas] == ["A"]
    bench.build(1)
    assert bench.buffer.pinned == {}


def test_load_of_an_item_evicted_in_the_same_pass_is_dropped() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    assert bench.build(freed=["A"]).mm_datas == []
    assert bench.buffer.pinned == {}


def test_a_preempted_request_loads_its_item_again() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    bench.build()
    bench.ensure(request, EMBEDS + 2)
    bench.build(freed=["A"])
    assert bench.ensure(request, 0)
    assert bench.allocate(request)
    assert [load.mm_hash for load in bench.build().mm_datas] == ["A"]


def test_bytes_of_another_shape_are_never_promised() -> None:
    bench = Bench()
    bench.store("A", rows=EMBEDS + 1)
    request = make_request("r", "A")
    assert bench.ensure(request)
    assert not bench.scheduler.has_cache_item("A")
    assert bench.scheduler.counters.totals()["miss:shape"] == 1
    assert bench.buffer.pinned == {}
