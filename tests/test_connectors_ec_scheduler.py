"""The scheduler side, rule by rule. The rules' interplay: test_connectors_ec_scheduler_model."""

from typing import Any

import pytest

from connector_standins import (
    EMBED_BYTES,
    EMBEDS,
    LedgerBuffer,
    Stored,
    make_request,
    pixels,
    step_output,
)
from connectors.ec_gate import EngineShape
from connectors.ec_metadata import StepMetadata
from connectors.ec_scheduler import EcScheduler
from connectors.settings import ConnectorSettings, parse_settings
from lookup_buffer.prefetched import PrefetchState

WAIT_SECONDS = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """One scheduler side with its surroundings."""

    def __init__(
        self, *, producer: bool = True, consumer: bool = True, steps_in_flight: int = 2, **raw: Any
    ) -> None:
        self.buffer = LedgerBuffer()
        self.clock = Clock()
        settings = ConnectorSettings(
            **{"fetch_wait_seconds": WAIT_SECONDS, "capacity_bytes": "64MiB", **raw}
        )
        shape = EngineShape(producer, consumer, steps_in_flight, EMBED_BYTES)
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client, settings, shape, metadata_fields=lambda _: set(), clock=self.clock
        )

    def ensure(self, request: Any, computed: int = 0) -> bool:
        return self.scheduler.gate.ensure_cache_available(request, computed)

    def allocate(self, request: Any, index: int = 0) -> bool:
        """What vLLM does when it makes room: ask, allocate, tell."""
        hit = self.scheduler.has_cache_item(request.mm_features[index].identifier)
        self.scheduler.item_allocated(request, index, is_hit=hit)
        return hit

    def build(self, *args: Any, **kwargs: Any) -> StepMetadata:
        return self.scheduler.build_metadata(step_output(*args, **kwargs))

    def store(self, identifier: str, **kwargs: Any) -> None:
        self.buffer.stored[identifier] = Stored(**kwargs)

    def prefetched(self) -> list[list[str]]:
        return [keys for name, keys, _ in self.buffer.calls if name == "prefetch"]


def test_resident_item_is_promised_loaded_and_given_back_after_the_steps_in_flight() -> None:
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
    bench.scheduler.gate.forget("r")  # abort: what was dispatched stays until it ran
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


def test_waits_for_a_fetch_at_most_its_budget_and_never_again() -> None:
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


def test_fetch_that_arrives_lets_the_request_pass() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    request = make_request("r", "A")
    assert not bench.ensure(request)
    assert not bench.scheduler.has_cache_item("A"), "pending is not here"
    bench.build(0)
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)
    assert bench.allocate(request)
    assert [load.mm_hash for load in bench.build().mm_datas] == ["A"]
    assert bench.prefetched() == [["A"]], "one call for the request's whole life"


def test_first_sights_of_a_pass_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(first_sight_seconds=0.001)
    slow = bench.buffer.prefetch

    def prefetch(keys: Any, *, timeout: float) -> Any:
        bench.clock.now += min(timeout, 0.0007)
        return slow(keys, timeout=timeout)

    monkeypatch.setattr(bench.buffer, "prefetch", prefetch)
    for name in "abcd":
        bench.ensure(make_request(name, name))
    timeouts = [timeout for _, _, timeout in bench.buffer.calls]
    assert timeouts == pytest.approx([0.001, 0.0003, 0.0, 0.0])
    bench.build(0)
    bench.ensure(make_request("e", "e"))
    assert bench.buffer.calls[-1][2] == pytest.approx(0.001)


def test_asks_only_for_items_ahead_that_the_engine_lacks() -> None:
    bench = Bench()
    first = make_request("first", "B")
    bench.ensure(first)
    bench.allocate(first)
    bench.build()
    bench.buffer.calls.clear()
    request = make_request("r", "A", "B", "C")
    end_of_a = request.mm_features[0].mm_position.offset + EMBEDS
    bench.ensure(request, end_of_a)
    assert bench.prefetched() == [["C"]], "A lies behind, B is in vLLM's own cache"


def test_evicted_item_is_asked_for_after_all() -> None:
    bench = Bench()
    first = make_request("first", "B")
    bench.ensure(first)
    bench.allocate(first)
    bench.build()
    bench.store("B")
    later = make_request("later", "B")
    assert bench.ensure(later)
    assert not bench.scheduler.has_cache_item("B")
    bench.build(freed=["B"])
    assert bench.ensure(later)
    assert bench.allocate(later), "A-B-A: vLLM evicted it, so it is loaded"


def test_request_above_the_pin_budget_goes_on_without() -> None:
    bench = Bench(prefetch_bytes=2 * EMBEDS * EMBED_BYTES)
    for name in "ABCDE":
        bench.store(name)
    fits = make_request("fits", "A")
    assert bench.ensure(fits)
    too_many_now = make_request("now", "B", "C")
    assert bench.ensure(too_many_now)
    assert not bench.scheduler.has_cache_item("B")
    never = make_request("never", "C", "D", "E")
    assert bench.ensure(never)
    assert bench.prefetched() == [["A"]], "all or nothing"
    assert bench.scheduler.counters.totals()["over_budget"] == 2
    bench.build(0, finished=["fits"])
    assert bench.ensure(too_many_now)
    assert bench.prefetched() == [["A"], ["B", "C"]], "asked once there is room"
    bench.ensure(never)
    assert len(bench.prefetched()) == 2


@pytest.mark.parametrize("way", ["finished", "passed", "encoded", "request_finished"])
def test_undispatched_pin_goes(way: str) -> None:
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


def test_promise_holds_to_the_end_of_the_pass_even_if_the_request_goes() -> None:
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


def test_promise_that_vllm_did_not_use_ends_with_the_pass() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    assert bench.scheduler.has_cache_item("A")
    assert bench.build().mm_datas == []
    assert len(bench.buffer.pinned) == 1, "the request still wants it"
    bench.scheduler.gate.forget("r")
    assert bench.buffer.pinned == {}


def test_answers_are_remembered_in_a_pass() -> None:
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


def test_preempted_request_gets_its_item_again() -> None:
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


@pytest.mark.parametrize(
    "identifier", ["renderer0-mm-1-image-0", "adapter:renderer12-mm-3-audio-1", "r-image-0"]
)
def test_counted_identifiers_stay_here(identifier: str) -> None:
    bench = Bench()
    bench.store(identifier)
    request = make_request("r-1a2b3c4d", identifier)
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert bench.build().saves == {}
    assert bench.buffer.calls == []
    assert bench.scheduler.counters.totals() == {"skipped:identifier_counted": 1}


def test_client_embeddings_are_neither_looked_up_nor_stored() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    request.mm_features[0].data = {"image_embeds": pixels()["pixel_values"]}
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert bench.build().saves == {}
    assert bench.buffer.calls == []


def test_request_with_metadata_alone_waits_then_fails_alone() -> None:
    bench = Bench()
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    assert bench.scheduler.gate.take_unavailable_requests() == set()
    bench.clock.now += WAIT_SECONDS
    assert not bench.ensure(request)
    assert bench.scheduler.gate.take_unavailable_requests() == {"r"}
    assert bench.scheduler.gate.take_unavailable_requests() == set()


def test_request_with_metadata_alone_passes_once_its_producer_published() -> None:
    bench = Bench()
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.store("A")
    assert not bench.ensure(request), "it is not asked for at every poll"
    bench.clock.now += 0.02
    assert bench.ensure(request)
    assert bench.allocate(request)
    bench.build()
    assert bench.ensure(request, EMBEDS - 1), "vLLM's cache holds it for this very request"


def test_request_with_metadata_alone_does_not_rely_on_vllms_cache() -> None:
    bench = Bench()
    first = make_request("first", "A")
    bench.ensure(first)
    bench.allocate(first)
    bench.build()
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.store("A")
    bench.clock.now += 0.02
    assert bench.ensure(request)
    assert bench.scheduler.has_cache_item("A")


def test_item_that_arrived_is_promised_to_the_one_who_depends_on_it() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    first, dependent = make_request("first", "A"), make_request("r", "A", metadata_only=True)
    assert not bench.ensure(first)
    assert not bench.scheduler.has_cache_item("A")
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(dependent)
    assert bench.scheduler.has_cache_item("A"), "the no of before would send it to the encoder"


def test_pure_producer_locates_and_never_fetches() -> None:
    bench = Bench(consumer=False)
    bench.store("A")
    request = make_request("r", "A", "B")
    assert bench.ensure(request)
    assert [name for name, _, _ in bench.buffer.calls] == ["has_caches"]
    assert bench.allocate(request, 0), "stored already: no second encode"
    assert not bench.allocate(request, 1)
    metadata = bench.build(0)
    assert metadata.mm_datas == []
    assert metadata.saves == {"B": "B"}
    bench.build(finished=["r"])
    assert not bench.scheduler.has_cache_item("A")
    assert bench.scheduler.gate.located == {}


def test_pin_in_the_arena_of_a_lost_node_is_not_promised() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.buffer.boot = "c" * 16
    assert not bench.allocate(request)
    assert bench.build().mm_datas == []


def test_request_preempted_between_two_polls_gets_its_item_again() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    bench.build()
    request.num_preemptions += 1
    bench.build(freed=["A"])
    assert bench.ensure(request, 0)
    assert bench.allocate(request)


def test_close_gives_everything_back() -> None:
    bench = Bench()
    for name in "AB":
        bench.store(name)
    request = make_request("r", "A", "B")
    bench.ensure(request)
    bench.allocate(request, 0)
    bench.scheduler.close()
    bench.scheduler.close()
    assert bench.buffer.pinned == {}
    assert bench.buffer.is_closed


def test_settings_of_the_bench_are_valid() -> None:
    assert parse_settings({"capacity_bytes": "64MiB"}).pin_budget_bytes == 16 << 20
