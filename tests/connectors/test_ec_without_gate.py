"""vLLM before 0.23, one rule per test: an item is found and pinned inside the call, or is a
miss."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from connector_standins import (
    EMBED_BYTES,
    EMBEDS,
    Clock,
    LedgerBuffer,
    Position,
    Stored,
    make_request,
    step_output,
)
from connectors.counters import logger
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.watch import embeds_of
from connectors.ec.without_gate import LOCAL_SECONDS, LOOKUP_INTERVAL_SECONDS, EcWithoutGate
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import PrefetchState

A, B, C = (letter * 64 for letter in "abc")


class Host:
    """A scheduler without a gate, as far as the connector uses it."""

    def __init__(self, *, producer: bool = False, consumer: bool = True, **raw: Any) -> None:
        self.buffer = LedgerBuffer()
        self.clock = Clock()
        settings = ConnectorSettings(**{"capacity_bytes": "64MiB", **raw})
        shape = EngineShape(producer, consumer, 1, EMBED_BYTES)
        client: Any = self.buffer
        self.scheduler = EcScheduler(
            client, settings, shape, metadata_fields=lambda _: set(), clock=self.clock
        )
        self.without_gate = EcWithoutGate(
            self.scheduler,
            client,
            settings,
            shape,
            metadata_fields=lambda _: set(),
            clock=self.clock,
        )

    def store(self, *identifiers: str, **kwargs: Any) -> None:
        for identifier in identifiers:
            self.buffer.stored[identifier] = Stored(**kwargs)

    def has(self, identifier: str) -> bool:
        """The calls of 0.15."""
        self.without_gate.look_up(identifier)
        return self.scheduler.has_cache_item(identifier)

    def load(self, request: Any, index: int) -> None:
        """The calls for a load, the same in all versions."""
        self.scheduler.item_allocated(request, index, is_hit=True)
        self.without_gate.allocated(request.request_id, index)

    def build(self, **kwargs: Any) -> Any:
        output = step_output(**kwargs)
        self.without_gate.end_pass(output)
        return self.scheduler.build_metadata(output)

    def prefetched(self) -> list[list[str]]:
        return [keys for name, keys, _ in self.buffer.calls if name == "prefetch"]

    def counted(self) -> dict[str, int]:
        return self.scheduler.counters.totals()


def test_an_item_on_this_host_is_pinned_loaded_and_released() -> None:
    host = Host()
    host.store(A)
    request = make_request("r", A)
    assert host.has(A)
    host.load(request, 0)
    (load,) = host.build(new=[request]).mm_datas
    assert load.order.ticket in host.buffer.pinned
    host.build()
    assert host.buffer.pinned == {}
    assert host.scheduler.pins.held_bytes == 0
    host.build(finished=["r"])
    assert len(host.without_gate) == 0


def test_an_unused_promise_ends_when_vllm_stops_asking() -> None:
    host = Host()
    host.store(A)
    for _ in range(3):  # the request cannot be allocated yet, so vLLM looks it up in each pass
        assert host.has(A)
        host.build()
    assert host.prefetched() == [[A]], "prefetched once"
    assert len(host.buffer.pinned) == 1
    host.build()
    assert host.buffer.pinned == {}
    assert len(host.without_gate) == 0


def test_an_item_on_another_host_is_a_miss_unless_it_arrives_within_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sync_fetch_seconds, is_hit in ((0.0, False), (0.5, True)):
        host = Host(sync_fetch_seconds=sync_fetch_seconds)
        host.store(A, needs_fetch=True)
        prefetch = host.buffer.prefetch

        def fetched_in_200_ms(
            keys: Any, *, timeout: float, host: Host = host, prefetch: Any = prefetch
        ) -> Any:
            handles = prefetch(keys, timeout=timeout)
            host.clock.now += min(timeout, 0.2)
            if timeout >= 0.2:
                host.buffer.settle(0, PrefetchState.RESIDENT)
            return handles

        monkeypatch.setattr(host.buffer, "prefetch", fetched_in_200_ms)
        assert host.has(A) is is_hit
        assert host.counted().get("miss:timeout", 0) == (not is_hit)
        host.build()
        host.build()
        assert host.buffer.pinned == {}
        assert all(handle.is_released for handle in host.buffer.pending)


def test_remote_items_share_one_time_limit_per_pass_and_local_items_have_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(sync_fetch_seconds=0.3)
    host.store(B, C)
    prefetch = host.buffer.prefetch

    def slow(keys: Any, *, timeout: float) -> Any:
        host.clock.now += 0.2
        return prefetch(keys, timeout=timeout)

    monkeypatch.setattr(host.buffer, "prefetch", slow)
    unknown = [letter * 64 for letter in "0123"]
    assert not any(host.has(identifier) for identifier in unknown)
    assert host.has(B)
    assert not host.has(C), "a frozen node delays a pass once, not once per item"
    waits = [timeout for name, _, timeout in host.buffer.calls if name == "prefetch"]
    assert waits == pytest.approx([0.3, 0.1, LOCAL_SECONDS])
    host.build()
    assert host.has(C)
    assert not host.has("4" * 64)
    waits = [timeout for name, _, timeout in host.buffer.calls if name == "prefetch"]
    assert waits[3:] == pytest.approx([LOCAL_SECONDS, 0.3]), "a new pass, a new budget"


def test_a_missing_item_is_looked_up_again_after_an_interval() -> None:
    host = Host()
    for _ in range(3):
        assert not host.has(A)
        host.build()
    assert host.prefetched() == [[A]]
    host.clock.now += LOOKUP_INTERVAL_SECONDS
    host.build()
    host.store(A)
    assert host.has(A)


def test_a_late_fetch_is_a_hit_if_vllm_still_asks() -> None:
    host = Host()
    host.store(A, needs_fetch=True)
    assert not host.has(A)
    host.build()
    host.buffer.settle(0, PrefetchState.RESIDENT)
    assert host.has(A)


@pytest.mark.parametrize("identifier", ["photo-of-me", f"adapter:{A}", "renderer0-mm-1-image-0"])
def test_without_the_request_only_content_hashes_are_looked_up(identifier: str) -> None:
    host = Host()
    host.store(identifier)
    assert not host.has(identifier)
    assert host.buffer.calls == []


def test_an_item_beyond_the_pin_budget_is_a_miss_and_is_not_pinned() -> None:
    host = Host(prefetch_bytes=EMBEDS * EMBED_BYTES)
    host.store(A, B)
    assert host.has(A)
    assert not host.has(B)
    assert host.counted()["miss:over_budget"] == 1
    for _ in range(2):
        host.build()
    assert host.buffer.pinned == {}


def test_items_are_looked_up_again_after_a_restart_of_the_node() -> None:
    host = Host()
    host.store(A)
    assert host.has(A)
    host.build()
    host.buffer.lose_session()
    assert not host.has(A), "the pin was lost with the node"
    host.build()
    assert host.has(A)


@pytest.mark.parametrize("by_request", [False, True])
def test_a_producer_skips_stored_items(by_request: bool) -> None:
    host = Host(producer=True, consumer=False)
    host.store(A, needs_fetch=True)
    if by_request:
        assert host.without_gate.has_caches(make_request("r", A, B)) == [True, False]
        host.build(finished=["r"])
    else:
        assert [host.has(item) for item in (A, B)] == [True, False]
    assert host.prefetched() == []
    host.build()
    host.build()
    assert len(host.scheduler.stored_items) == 0


# -- has_caches, before 0.15 -----------------------------------------------------------------------


def test_a_request_is_looked_up_at_once_and_answered_item_by_item() -> None:
    host = Host()
    host.store(A, C)
    request = make_request("r", A, "a client's own name", C)
    host.store("a client's own name", rows=EMBEDS + 1)
    assert host.without_gate.has_caches(request) == [True, False, True]
    assert host.prefetched() == [[A, "a client's own name", C]]
    assert host.counted() == {"miss:shape": 1}


def test_an_identifier_used_twice_is_loaded_only_where_it_fits() -> None:
    host = Host()
    host.store("name")
    fitting, other = make_request("one", "name"), make_request("two", "name")
    other.mm_features[0].mm_position = Position(0, EMBEDS + 1)
    assert host.without_gate.has_caches(fitting) == [True]
    assert host.without_gate.has_caches(other) == [False]


def test_decoding_looks_nothing_up() -> None:
    host = Host()
    host.store(A)
    request = make_request("r", A, B)
    assert host.without_gate.has_caches(request) == [True, False]
    host.load(request, 0)
    host.build(new=[request], encoded={"r": [1]})
    host.buffer.calls.clear()
    request.num_computed_tokens = request.num_tokens
    for _ in range(3):
        assert host.without_gate.has_caches(request) == [False, False]
        host.build()
    assert host.buffer.calls == []
    assert host.buffer.pinned == {}
    host.build(finished=["r"])
    assert len(host.without_gate) == 0


def test_items_that_are_computed_or_cached_are_not_looked_up() -> None:
    host = Host()
    request = make_request("r", A, B, C)
    host.without_gate.has_caches(request)
    host.build(new=[request], encoded={"r": [0, 1]})
    request.num_computed_tokens = request.mm_features[0].mm_position.offset + EMBEDS
    host.clock.now += LOOKUP_INTERVAL_SECONDS
    host.build()
    host.buffer.calls.clear()
    host.without_gate.has_caches(request)
    assert host.prefetched() == [[C]], "A is computed, B is in vLLM's own cache"


def test_embeddings_of_a_client_are_never_looked_up() -> None:
    host = Host()
    request = make_request("r", A)
    request.mm_features[0].data = {"image_embeds": request}
    host.store(A)
    request.mm_features[0].data["image_embeds"] = type("Field", (), {"data": b"x"})()
    assert host.without_gate.has_caches(request) == [False]
    assert host.buffer.calls == []


# -- before 0.18 -----------------------------------------------------------------------------------


def test_an_encoded_item_that_vllm_does_not_report_may_be_saved() -> None:
    host = Host(producer=True, consumer=False)
    request = make_request("r", A, B)
    assert not host.has(A)
    assert host.build(new=[request], encoded={"r": [0]}).saves == {A: A}
    assert host.build(encoded={"r": [1], "unknown": [0]}).saves == {B: B}, "a later chunk"


def test_an_item_that_vllm_reports_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger.name)
    host = Host(producer=True)
    request = make_request("r", A)
    assert not host.has(A)
    host.scheduler.item_allocated(request, 0, is_hit=False)  # as 0.18 does
    host.without_gate.allocated("r", 0)
    host.build(new=[request], encoded={"r": [0]})
    assert caplog.text.count(f"item {A} encoded") == 1


def test_close_releases_every_pin() -> None:
    host = Host()
    host.store(A)
    host.store(B, needs_fetch=True)
    assert host.has(A)
    assert not host.has(B)
    host.without_gate.close()
    host.without_gate.close()
    host.scheduler.close()
    assert host.buffer.pinned == {}
    assert [handle.is_released for handle in host.buffer.pending] == [True]


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, lambda _: 7])
def test_rows_of_an_item_since_vllm_0_13(count: Any) -> None:
    """A method or, in some releases, a property."""
    methods = {"length": 10, "get_num_embeds": count, "get_embeds_indices_in_range": None}
    assert embeds_of(SimpleNamespace(mm_position=type("Range", (), methods)())) == 7


def test_vllm_before_0_13_keeps_a_row_for_each_placeholder() -> None:
    methods = {"length": 10, "get_num_embeds": lambda _: 7}
    assert embeds_of(SimpleNamespace(mm_position=type("Range", (), methods)())) == 10
