"""Hosts before 0.23, rule by rule: found and pinned inside of the question, or a miss."""

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
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.watch import embeds_of
from connectors.ec.without_gate import ASK_AGAIN_SECONDS, LOCAL_SECONDS, EcWithoutGate
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import PrefetchState

A, B, C = (letter * 64 for letter in "abc")


class Host:
    """A scheduler without a gate, as far as the connector sees it."""

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
        """As 0.15 asks."""
        self.without_gate.look_for(identifier)
        return self.scheduler.has_cache_item(identifier)

    def load(self, request: Any, index: int) -> None:
        """As all of them tell of a load."""
        self.scheduler.item_allocated(request, index, is_hit=True)
        self.without_gate.allocated(request.request_id, index)

    def build(self, **kwargs: Any) -> Any:
        output = step_output(**kwargs)
        self.without_gate.end_pass(output)
        return self.scheduler.build_metadata(output)

    def asked(self) -> list[list[str]]:
        return [keys for name, keys, _ in self.buffer.calls if name == "prefetch"]

    def counted(self) -> dict[str, int]:
        return self.scheduler.counters.totals()


def test_what_this_host_holds_is_pinned_loaded_and_given_back() -> None:
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


def test_promise_that_was_not_used_ends_when_the_host_stops_asking() -> None:
    host = Host()
    host.store(A)
    for _ in range(3):  # no room for the request yet: it asks again in each pass
        assert host.has(A)
        host.build()
    assert host.asked() == [[A]], "asked for once"
    assert len(host.buffer.pinned) == 1
    host.build()
    assert host.buffer.pinned == {}
    assert len(host.without_gate) == 0


def test_what_is_elsewhere_is_a_miss_unless_it_comes_within_the_pass(
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


def test_one_pass_waits_for_others_no_longer_than_it_may_but_for_local_items_always(
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
    assert not host.has(C), "a frozen node holds up one pass once, not for each item"
    waits = [timeout for name, _, timeout in host.buffer.calls if name == "prefetch"]
    assert waits == pytest.approx([0.3, 0.1, LOCAL_SECONDS])
    host.build()
    assert host.has(C)
    assert not host.has("4" * 64)
    waits = [timeout for name, _, timeout in host.buffer.calls if name == "prefetch"]
    assert waits[3:] == pytest.approx([LOCAL_SECONDS, 0.3]), "a new pass, a new budget"


def test_missing_item_is_asked_for_again_only_after_a_while() -> None:
    host = Host()
    for _ in range(3):
        assert not host.has(A)
        host.build()
    assert host.asked() == [[A]]
    host.clock.now += ASK_AGAIN_SECONDS
    host.build()
    host.store(A)
    assert host.has(A)


def test_fetch_that_arrives_late_is_a_hit_if_the_host_still_asks() -> None:
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


def test_more_than_the_pin_budget_is_a_miss_and_held_by_nobody() -> None:
    host = Host(prefetch_bytes=EMBEDS * EMBED_BYTES)
    host.store(A, B)
    assert host.has(A)
    assert not host.has(B)
    assert host.counted()["miss:over_budget"] == 1
    for _ in range(2):
        host.build()
    assert host.buffer.pinned == {}


def test_node_that_restarted_is_asked_anew() -> None:
    host = Host()
    host.store(A)
    assert host.has(A)
    host.build()
    host.buffer.boot = "c" * 16
    assert not host.has(A), "what was pinned is gone with the node"
    host.build()
    assert host.has(A)


@pytest.mark.parametrize("by_request", [False, True])
def test_producer_skips_what_is_stored(by_request: bool) -> None:
    host = Host(producer=True, consumer=False)
    host.store(A, needs_fetch=True)
    if by_request:
        assert host.without_gate.has_caches(make_request("r", A, B)) == [True, False]
        host.build(finished=["r"])
    else:
        assert [host.has(item) for item in (A, B)] == [True, False]
    assert host.asked() == []
    host.build()
    host.build()
    assert len(host.scheduler.located) == 0


# -- has_caches, before 0.15 -----------------------------------------------------------------------


def test_whole_request_is_asked_for_at_once_and_answered_item_by_item() -> None:
    host = Host()
    host.store(A, C)
    request = make_request("r", A, "a client's own name", C)
    host.store("a client's own name", rows=EMBEDS + 1)
    assert host.without_gate.has_caches(request) == [True, False, True]
    assert host.asked() == [[A, "a client's own name", C]]
    assert host.counted() == {"miss:shape": 1}


def test_name_that_a_client_used_twice_is_loaded_only_where_it_fits() -> None:
    host = Host()
    host.store("name")
    fitting, other = make_request("one", "name"), make_request("two", "name")
    other.mm_features[0].mm_position = Position(0, EMBEDS + 1)
    assert host.without_gate.has_caches(fitting) == [True]
    assert host.without_gate.has_caches(other) == [False]


def test_decoding_asks_nobody() -> None:
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


def test_items_behind_or_in_the_engine_are_not_asked_for() -> None:
    host = Host()
    request = make_request("r", A, B, C)
    host.without_gate.has_caches(request)
    host.build(new=[request], encoded={"r": [0, 1]})
    request.num_computed_tokens = request.mm_features[0].mm_position.offset + EMBEDS
    host.clock.now += ASK_AGAIN_SECONDS
    host.build()
    host.buffer.calls.clear()
    host.without_gate.has_caches(request)
    assert host.asked() == [[C]], "A lies behind, B is in vLLM's own cache"


def test_embeddings_of_a_client_are_never_looked_up() -> None:
    host = Host()
    request = make_request("r", A)
    request.mm_features[0].data = {"image_embeds": request}
    host.store(A)
    request.mm_features[0].data["image_embeds"] = type("Field", (), {"data": b"x"})()
    assert host.without_gate.has_caches(request) == [False]
    assert host.buffer.calls == []


# -- before 0.18 -----------------------------------------------------------------------------------


def test_what_is_encoded_without_a_word_may_be_saved() -> None:
    host = Host(producer=True, consumer=False)
    request = make_request("r", A, B)
    assert not host.has(A)
    assert host.build(new=[request], encoded={"r": [0]}).saves == {A: A}
    assert host.build(encoded={"r": [1], "unknown": [0]}).saves == {B: B}, "a later chunk"


def test_what_the_host_told_of_is_not_counted_twice() -> None:
    host = Host(producer=True)
    request = make_request("r", A)
    assert not host.has(A)
    host.scheduler.item_allocated(request, 0, is_hit=False)  # as 0.18 does
    host.without_gate.allocated("r", 0)
    host.build(new=[request], encoded={"r": [0]})
    assert len(host.scheduler.records) == 1


def test_close_gives_everything_back() -> None:
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
def test_rows_of_an_item_in_hosts_since_0_13(count: Any) -> None:
    """A method or, in some releases, a property."""
    methods = {"length": 10, "get_num_embeds": count, "get_embeds_indices_in_range": None}
    assert embeds_of(SimpleNamespace(mm_position=type("Range", (), methods)())) == 7


def test_hosts_before_0_13_keep_a_row_for_each_placeholder() -> None:
    methods = {"length": 10, "get_num_embeds": lambda _: 7}
    assert embeds_of(SimpleNamespace(mm_position=type("Range", (), methods)())) == 10
