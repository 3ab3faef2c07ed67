"""The scheduler side's rules for identifiers, adapters, client embeddings and metadata-only
items."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from connector_standins import (
    EMBED_BYTES,
    EMBEDS,
    METADATA_WAIT_SECONDS,
    Bench,
    Position,
    Request,
    make_request,
    pixels,
)
from connectors.ec.watch import RequestItem
from connectors.settings import parse_settings
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import wait_until


@pytest.mark.parametrize(
    "identifier", ["renderer0-mm-1-image-0", "adapter:renderer12-mm-3-audio-1", "r-image-0"]
)
def test_counted_identifiers_are_not_shared(identifier: str) -> None:
    bench = Bench()
    bench.store(identifier)
    request = make_request("r-1a2b3c4d", identifier)
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert bench.build().saves == {}
    assert bench.buffer.calls == []
    assert bench.scheduler.counters.totals() == {"skipped:identifier_counted": 1}


def with_adapter(request: Request, name: str, folder: Path) -> Request:
    request.lora_request = SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(folder))
    return request


def encoded_as(bench: Bench, request: Request) -> str | None:
    """The key under which the request's first item is to be stored, once its adapter is read."""
    adapters = bench.scheduler.gate._adapters
    wait_until(lambda: adapters.digest_of(request.lora_request), 5.0)
    assert bench.ensure(request)
    assert not bench.allocate(request)
    return bench.build().saves.get(request.mm_features[0].identifier)


def test_an_item_of_an_adapter_is_shared_by_what_the_adapter_contains(tmp_path: Path) -> None:
    for folder, weights in (("one", b"w"), ("copy", b"w"), ("other", b"v")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(weights)
    keys = [
        encoded_as(Bench(), with_adapter(make_request("r", f"{name}:A"), name, tmp_path / folder))
        for name, folder in (("cats", "one"), ("dogs", "copy"), ("cats", "other"))
    ]
    assert None not in keys
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]
    assert keys[0] != "A"


def test_an_item_of_an_adapter_that_is_not_read_yet_is_not_shared(tmp_path: Path) -> None:
    bench = Bench()
    request = with_adapter(make_request("r", "cats:A"), "cats", tmp_path)  # its files do not exist
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert bench.build().saves == {}
    assert bench.buffer.calls == []
    assert bench.scheduler.counters.totals() == {"skipped:lora": 1}


def test_another_adapter_under_the_same_name_does_not_get_the_pin_of_the_first(
    tmp_path: Path,
) -> None:
    bench = Bench()
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.bin").write_bytes(folder.encode())
    first = with_adapter(make_request("first", "cats:A"), "cats", tmp_path / "one")
    second = with_adapter(make_request("second", "cats:A"), "cats", tmp_path / "other")
    adapters = bench.scheduler.gate._adapters
    for request in (first, second):
        wait_until(lambda r=request: adapters.digest_of(r.lora_request), 5.0)  # type: ignore[misc]
    bench.store("A")
    assert bench.ensure(first)
    (held,) = bench.buffer.pinned.values()
    assert bench.ensure(second)
    (held_now,) = bench.buffer.pinned.values()
    assert held.key != held_now.key
    assert held_now.key.part == f"lora-{adapters.digest_of(second.lora_request)}"


def test_client_embeddings_are_neither_looked_up_nor_stored() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    request.mm_features[0].data = {"image_embeds": pixels()["pixel_values"]}
    assert bench.ensure(request)
    assert not bench.allocate(request)
    assert bench.build().saves == {}
    assert bench.buffer.calls == []


def assert_fails_after_its_wait(bench: Bench, request: Request) -> None:
    for _ in range(2):
        assert not bench.ensure(request)
        assert not bench.scheduler.gate.take_unavailable_requests()
        bench.clock.now += METADATA_WAIT_SECONDS / 2
    assert not bench.ensure(request)
    (why,) = bench.scheduler.gate.take_unavailable_requests().values()
    assert why.reason == "absent"


def test_a_metadata_request_waits_then_fails_alone() -> None:
    bench = Bench()
    request = make_request("r", "A", metadata_only=True)
    assert_fails_after_its_wait(bench, request)
    assert bench.scheduler.counters.totals()["unavailable:absent"] == 1
    assert not bench.scheduler.gate.take_unavailable_requests()
    assert bench.buffer.fleet.given_back == ["A"], "the query releases its claim"


@pytest.mark.parametrize("bare", [0, 1])
def test_an_item_with_media_and_without_needs_its_output(bare: int) -> None:
    """Two parts of a prompt have one uuid. vLLM would encode the one that it comes to first."""
    bench = Bench()
    request = make_request("r", "A", "A")
    request.mm_features[bare].data = None
    assert_fails_after_its_wait(bench, request)
    bench.store("A")
    delivered = make_request("delivered", "A", "A")
    delivered.mm_features[bare].data = None
    assert bench.ensure(delivered)
    assert bench.allocate(delivered), "it is loaded"


def test_a_metadata_request_passes_once_the_item_is_published() -> None:
    bench = Bench()
    request = make_request("r", "A", metadata_only=True)
    for _ in range(100):
        assert not bench.ensure(request)
        bench.clock.now += METADATA_WAIT_SECONDS / 200
    assert len(bench.prefetched()) == 2, "not one prefetch per poll"
    bench.store("A")
    assert bench.ensure(request)
    assert bench.allocate(request)
    bench.build()
    assert bench.ensure(request, EMBEDS - 1), "vLLM's cache holds it for this request"


def test_a_metadata_request_waits_longer_for_a_claimant() -> None:
    bench = Bench()
    bench.buffer.fleet.answers = ClaimOutcome.PENDING
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.clock.now += METADATA_WAIT_SECONDS
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)  # another engine holds the claim
    bench.clock.now += 500 - METADATA_WAIT_SECONDS
    assert not bench.ensure(request)
    assert not bench.scheduler.gate.take_unavailable_requests()
    bench.store("A")
    assert bench.ensure(request)
    assert bench.buffer.fleet.cancelled == bench.buffer.fleet.sets


@pytest.mark.parametrize(
    ("end", "reason"),
    [(ClaimOutcome.HELD, "claimed"), (ClaimOutcome.GRANTED, "absent")],
)
def test_a_metadata_request_fails_when_the_claim_ends(end: ClaimOutcome, reason: str) -> None:
    bench = Bench()
    bench.buffer.fleet.answers = ClaimOutcome.PENDING
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.clock.now += METADATA_WAIT_SECONDS
    assert not bench.ensure(request)
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    assert not bench.ensure(request)
    assert not bench.scheduler.gate.take_unavailable_requests()
    bench.buffer.fleet.settle(end)
    assert not bench.ensure(request)
    (why,) = bench.scheduler.gate.take_unavailable_requests().values()
    assert why.reason == reason
    assert ("other:1" in why.text) == (reason == "claimed")


def test_a_metadata_request_waits_for_at_most_600_seconds() -> None:
    bench = Bench()
    bench.buffer.fleet.answers = ClaimOutcome.PENDING
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.clock.now += METADATA_WAIT_SECONDS
    assert not bench.ensure(request)
    assert bench.buffer.fleet.waits_seconds == [600 - METADATA_WAIT_SECONDS]
    bench.buffer.fleet.settle(ClaimOutcome.PENDING)
    bench.clock.now += 600 - METADATA_WAIT_SECONDS
    assert not bench.ensure(request)
    assert bench.scheduler.gate.take_unavailable_requests()["r"].reason == "claimed"


def test_a_preempted_metadata_request_waits_as_well() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A", metadata_only=True)
    assert bench.ensure(request)
    bench.allocate(request)
    bench.build()
    del bench.buffer.stored["A"]
    bench.build(freed=["A"])
    request.num_preemptions += 1
    assert not bench.ensure(request)
    bench.clock.now += METADATA_WAIT_SECONDS / 2
    assert not bench.ensure(request)
    assert not bench.scheduler.gate.take_unavailable_requests()
    bench.store("A")
    assert bench.ensure(request)


def test_a_metadata_request_does_not_fail_for_time_without_polls() -> None:
    """The item was published while vLLM had no free slot for the request."""
    bench = Bench()
    request = make_request("r", "A", metadata_only=True)
    assert not bench.ensure(request)
    bench.buffer.end_waits()
    bench.store("A", needs_fetch=True)
    bench.buffer.fleet.answers = ClaimOutcome.STORED
    bench.clock.now += 3 * METADATA_WAIT_SECONDS
    for _ in range(2):
        assert not bench.ensure(request)
        bench.clock.now += 0.02
    assert not bench.scheduler.gate.take_unavailable_requests()
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(request)


def test_one_of_two_items_is_lost_again_before_the_other_arrives() -> None:
    """The node was replaced, so both items are prefetched again."""
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A", "B", metadata_only=True)
    assert not bench.ensure(request)
    bench.buffer.lose_session()
    bench.buffer.end_waits()
    bench.store("A", needs_fetch=True)
    assert not bench.ensure(request)
    bench.store("B")
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    for _ in range(2):
        bench.clock.now += 0.2
        passes = bench.ensure(request)
    assert passes, "it passes before its time limit"


def test_requests_with_some_of_their_items_leave_space_for_each_other() -> None:
    bench = Bench(prefetch_bytes=4 * EMBEDS * EMBED_BYTES)
    left = [make_request(names, *names, metadata_only=True) for names in ("ABC", "DEF")]
    for published in ["AD", "BE", "CF", *[""] * 20]:
        for name in published:
            bench.store(name)
        for request in list(left):
            if bench.ensure(request):
                assert all(bench.allocate(request, index) for index in range(3))
                left.remove(request)
        bench.build()
        bench.clock.now += 0.05
    assert not left, "they pass before their time limit"


@pytest.mark.parametrize("first", ["stored", "published later"])
def test_requests_that_wait_for_space_pin_no_more_than_the_budget(first: str) -> None:
    """By more metadata alone than vLLM has room for, a client had all of their items pinned in each
    second pass, beside the budget, and so kept other engines of the host out."""
    fits, names = 2, [f"item-{number}" for number in range(20)]
    bench = Bench(prefetch_bytes=fits * EMBEDS * EMBED_BYTES, fetch_wait_seconds=0.5)
    requests = [make_request(f"of-{name}", name, metadata_only=True) for name in names]
    most = 0
    if first == "stored":
        for name in names:
            bench.store(name)
    for step in range(200):
        if step == 10:
            for name in names:
                bench.store(name)
        passed = [request for request in requests if bench.ensure(request)]
        if step not in (10, 11):  # what waits without bytes is pinned when it is published
            most = max(most, len(bench.buffer.pinned))
        bench.build()
        bench.clock.now += 0.02
    assert most == len(passed) == fits
    assert not bench.scheduler.gate.take_unavailable_requests()
    bench.build(finished=[request.request_id for request in passed])
    others = [request for request in requests if request not in passed]
    for _ in range(20):
        passed = [request for request in others if bench.ensure(request)]
        assert len(bench.buffer.pinned) <= fits
        bench.build()
        bench.clock.now += 0.02
    assert len(passed) == fits, "others take their space"
    bench.build(finished=[request.request_id for request in others])
    assert bench.scheduler.pins.held_bytes == 0
    assert not bench.buffer.pinned


@pytest.mark.parametrize("row_bytes", [EMBED_BYTES, 2 * EMBED_BYTES])
@pytest.mark.parametrize("smaller_at", [0, 5])
def test_requests_that_wait_for_space_hold_none_of_it(row_bytes: int, smaller_at: int) -> None:
    """The larger items find no space, the smaller ones do, at the same time or later: with these
    held, the larger ones never would. Nor if the last item that was loaded had larger rows."""
    unit = EMBEDS * EMBED_BYTES
    bench = Bench(prefetch_bytes=4 * unit)
    other = make_request("other", "o1", "o2")
    for name in ("o1", "o2"):
        bench.store(name)
    left = [make_request(one, f"A{one}", f"B{one}", metadata_only=True) for one in ("1", "2")]
    for request in left:
        large, small = request.mm_features
        large.mm_position = Position(2, 3 * EMBEDS)
        small.mm_position = Position(3 * EMBEDS + 4, EMBEDS)
        request.num_tokens = 4 * EMBEDS + 6
        assert not bench.ensure(request)
    assert bench.ensure(other)
    for one in ("1", "2"):
        bench.store(f"A{one}", rows=3 * EMBEDS)
    bench.scheduler.pins.record_size(1, row_bytes)
    for step in range(40):
        if step == smaller_at:
            bench.store("B1")
            bench.store("B2")
        for request in list(left):
            if bench.ensure(request):
                assert all(bench.allocate(request, index) for index in range(2))
                left.remove(request)
        bench.build(finished=["other"] if step == 10 else [])
        bench.clock.now += 0.05
    assert not left, "they pass long before their time limit"


def test_a_request_whose_items_exceed_the_budget_together_fails_alone() -> None:
    """Each of them fits, so their sizes are only known one after the other. They were pinned
    together, beside the budget."""
    unit = EMBEDS * EMBED_BYTES
    bench = Bench(prefetch_bytes=4 * unit)
    names = [f"item-{number}" for number in range(5)]
    for name in names:
        bench.store(name)
    request = make_request("all", *names, metadata_only=True)
    for _ in range(40):
        assert not bench.ensure(request)
        assert len(bench.buffer.pinned) <= 4
        bench.build()
        bench.clock.now += 0.05
    assert bench.scheduler.gate.take_unavailable_requests()["all"].reason == "over_budget"
    bench.build(finished=["all"])
    assert bench.scheduler.pins.held_bytes == 0
    assert not bench.buffer.pinned


def test_a_pass_takes_as_long_as_a_request_has_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was compared with all others: vLLM allows 999, and scheduled nothing for seconds."""

    def compared(*_: object) -> bool:
        raise AssertionError("items are told apart by their names")

    bench = Bench(prefetch_bytes=10 * EMBEDS * EMBED_BYTES)
    request = make_request("many", *(f"item-{n}" for n in range(100)), metadata_only=True)
    monkeypatch.setattr(RequestItem, "__eq__", compared)
    for _ in range(40):
        assert not bench.ensure(request)
        bench.build()
        bench.clock.now += 0.05


def test_one_of_two_items_is_no_output_of_the_encoder() -> None:
    bench = Bench()
    request = make_request("r", "A", "B", metadata_only=True)
    assert not bench.ensure(request)
    bench.store("A", rows=EMBEDS + 1)
    bench.store("B")
    assert not bench.ensure(request)
    why = bench.scheduler.gate.take_unavailable_requests()["r"]
    assert why.reason == "shape"
    assert why.text.startswith("A is stored")


def test_a_metadata_request_does_not_rely_on_vllms_cache() -> None:
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


def test_an_item_that_arrived_is_promised_to_a_metadata_request() -> None:
    bench = Bench()
    bench.store("A", needs_fetch=True)
    first, dependent = make_request("first", "A"), make_request("r", "A", metadata_only=True)
    assert not bench.ensure(first)
    assert not bench.scheduler.has_cache_item("A")
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(dependent)
    assert bench.scheduler.has_cache_item("A"), "a cached no would send it to the encoder"


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
    assert len(bench.scheduler.stored_items) == 0


def test_pin_in_the_arena_of_a_lost_node_is_not_promised() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    assert bench.ensure(request)
    bench.buffer.lose_session()
    assert not bench.allocate(request)
    assert bench.build().mm_datas == []


def test_a_metadata_request_keeps_its_promise_when_the_node_is_lost_in_the_pass() -> None:
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A", metadata_only=True)
    assert bench.ensure(request)
    bench.buffer.lose_session("")
    assert bench.allocate(request), "vLLM would encode an item without media"
    assert len(bench.build().mm_datas) == 1


def test_an_item_lost_with_its_node_is_not_counted_as_a_shape_miss() -> None:
    bench = Bench(claim_wait_seconds=0)
    bench.store("A")
    bench.store("B", needs_fetch=True)
    request = make_request("r", "A", "B")
    assert not bench.ensure(request)
    bench.buffer.lose_session()
    bench.buffer.settle(0, PrefetchState.FAILED)
    assert bench.ensure(request)
    counts = bench.scheduler.counters.totals()
    assert counts["miss:node_down"] >= 1
    assert "miss:shape" not in counts


def test_a_request_preempted_between_two_polls_loads_its_item_again() -> None:
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


def test_close_releases_every_pin() -> None:
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


def test_the_load_of_an_item_evicted_and_allocated_again_in_one_pass_is_kept() -> None:
    """vLLM needs it in this step; some versions report it as evicted nevertheless."""
    bench = Bench()
    bench.store("A")
    request = make_request("r", "A")
    bench.ensure(request)
    bench.allocate(request)
    metadata = bench.build(freed=["A"], scheduled=["r"])
    assert [load.mm_hash for load in metadata.mm_datas] == ["A"]
    assert "A" in bench.scheduler.engine_cache


def test_an_item_promised_before_and_after_a_node_was_replaced_is_pinned_once() -> None:
    bench = Bench()
    bench.store("A")
    media, bare = make_request("media", "A"), make_request("bare", "A", metadata_only=True)
    assert bench.ensure(media)
    assert bench.scheduler.has_cache_item("A")
    bench.buffer.lose_session()
    assert bench.ensure(bare)
    assert bench.allocate(bare)
    bench.build()
    for request_id in ("media", "bare"):
        bench.scheduler.gate.forget(request_id)
    for _ in range(3):
        bench.build()
    assert bench.scheduler.pins.held_bytes == 0
    assert bench.buffer.pinned == {}
