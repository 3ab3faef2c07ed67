"""Requests with metadata only wait for their items, on real nodes with a real store.

The engine that waits is on one node; the client that publishes or claims is on another.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from connector_standins import EMBEDS, make_request, step_output
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.settings import ConnectorSettings
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.key import TensorKey
from nodes import NodeProcess, at_rest, key, wait_until

OUTCOME_SECONDS = 30.0
WAIT_SECONDS = 0.5
"""`metadata_wait_seconds`."""
WIDTH = 16
Pair = tuple[NodeProcess, NodeProcess]
Make = Callable[..., "Engine"]


class Engine:
    """The scheduler side of an engine whose vLLM can fail single requests."""

    def __init__(self, node: NodeProcess, **settings: Any) -> None:
        self.buffer = node.client()
        config = ConnectorSettings(fetch_wait_seconds=0.2, **settings)
        shape = EngineShape(False, True, 1, WIDTH * 4)
        self.scheduler = EcScheduler(self.buffer, config, shape, metadata_fields=lambda _: set())

    def run_pass(self, request: Any) -> str:
        """Run one scheduling pass. Returns `passes`, `waits`, or the reason why the request
        fails."""
        passes = self.scheduler.gate.ensure_cache_available(request, 0)
        here = passes and self.scheduler.has_cache_item(request.mm_features[0].identifier)
        self.scheduler.build_metadata(step_output(0))
        unavailable = self.scheduler.gate.take_unavailable_requests()
        time.sleep(0.001)
        if request.request_id in unavailable:
            return unavailable[request.request_id].reason
        assert here == passes, "it passes only with its item"
        return "passes" if passes else "waits"

    def outcome(self, request: Any) -> str:
        until = time.monotonic() + OUTCOME_SECONDS
        while (result := self.run_pass(request)) == "waits":
            assert time.monotonic() < until, "neither passes nor fails"
        return result

    def waits(self, request: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.run_pass(request) == "waits"


@pytest.fixture
def make(node_pair: Pair) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        values = {"metadata_wait_seconds": WAIT_SECONDS, **settings}
        engines.append(Engine(node_pair[0], **values))
        return engines[-1]

    yield make
    for engine in engines:
        engine.scheduler.close()
    for node in node_pair:
        at_rest(node)


@pytest.fixture
def other(node_pair: Pair) -> Iterator[LookupBuffer]:
    with node_pair[1].client() as client:
        yield client


def metadata_request(name: str) -> Any:
    return make_request(f"request-{name}", name, metadata_only=True)


def output() -> torch.Tensor:
    return torch.ones(EMBEDS, WIDTH)


def test_the_request_passes_when_the_item_is_published(make: Make, other: LookupBuffer) -> None:
    engine, name = make(metadata_wait_seconds=OUTCOME_SECONDS), key().text
    request = metadata_request(name)
    engine.waits(request, 1.0)
    other.insert(TensorKey(name), output())
    assert engine.outcome(request) == "passes"
    engine.scheduler.gate.forget(request.request_id)


def test_the_request_fails_when_the_item_is_not_published(make: Make, other: LookupBuffer) -> None:
    engine, name = make(), key().text
    request = metadata_request(name)
    assert engine.outcome(request) == "absent"
    engine.scheduler.gate.forget(request.request_id)
    assert other.claim(TensorKey(name), lease_seconds=5.0).granted, (
        "the query has released its claim"
    )
    other.release_claim(TensorKey(name))


def test_the_request_waits_while_another_engine_holds_the_claim(
    make: Make, other: LookupBuffer
) -> None:
    engine, name = make(), key().text
    assert other.claim(TensorKey(name), lease_seconds=60.0).granted
    request = metadata_request(name)
    engine.waits(request, 6 * WAIT_SECONDS)
    other.insert(TensorKey(name), output())
    assert engine.outcome(request) == "passes"
    engine.scheduler.gate.forget(request.request_id)


@pytest.mark.parametrize("how", ["gives it back", "disconnects"])
def test_the_request_fails_when_the_claim_ends_without_a_publication(
    make: Make, node_pair: Pair, how: str
) -> None:
    engine, name = make(), key().text
    other = node_pair[1].client()
    assert other.claim(TensorKey(name), lease_seconds=60.0).granted
    request = metadata_request(name)
    engine.waits(request, 4 * WAIT_SECONDS)
    if how == "gives it back":
        other.release_claim(TensorKey(name))
    other.close()
    assert engine.outcome(request) == "absent"
    engine.scheduler.gate.forget(request.request_id)


def test_several_items_may_arrive_one_after_the_other(make: Make, other: LookupBuffer) -> None:
    engine, names = make(), [key().text for _ in range(3)]
    for name in names:
        assert other.claim(TensorKey(name), lease_seconds=60.0).granted
    request = make_request("several", *names, metadata_only=True)
    for name in names:
        engine.waits(request, 2 * WAIT_SECONDS)
        other.insert(TensorKey(name), output())
    assert engine.outcome(request) == "passes"
    engine.scheduler.gate.forget(request.request_id)


def test_an_item_of_another_shape_fails_the_request_at_once(
    make: Make, other: LookupBuffer
) -> None:
    engine, name = make(metadata_wait_seconds=600.0), key().text
    other.insert(TensorKey(name), torch.ones(EMBEDS + 1, WIDTH))
    request = metadata_request(name)
    assert engine.outcome(request) == "shape"
    engine.scheduler.gate.forget(request.request_id)


def test_an_aborted_request_leaves_no_pin_and_no_claim(make: Make, other: LookupBuffer) -> None:
    engine = make()
    for after_seconds in (0.1, 2 * WAIT_SECONDS):
        name = key().text
        assert other.claim(TensorKey(name), lease_seconds=60.0).granted
        request = metadata_request(name)
        engine.waits(request, after_seconds)
        engine.scheduler.gate.forget(request.request_id)
        other.insert(TensorKey(name), output())
    assert len(engine.scheduler.claims) == len(engine.scheduler.pins) == 0


def test_a_prefetch_waits_for_a_publication(node_pair: Pair, other: LookupBuffer) -> None:
    here, awaited, never = key(), key(), key()
    with node_pair[0].client() as client:
        client.insert(here, output())
        handles = client.prefetch([here, awaited], timeout=0.5, wait_seconds=OUTCOME_SECONDS)
        assert handles[0].state is PrefetchState.RESIDENT
        assert handles[1].state is PrefetchState.PENDING
        other.insert(awaited, output())
        assert handles[1].wait(OUTCOME_SECONDS) is PrefetchState.RESIDENT
        assert handles[1].source == node_pair[1].node_id
        handles += client.prefetch([never], wait_seconds=0.5)
        assert handles[2].wait(OUTCOME_SECONDS) is PrefetchState.MISSING
        assert handles[2].reason == "absent"
        for handle in handles:
            client.release(handle)
        wait_until(lambda: client.stats()["pins"] == 0, OUTCOME_SECONDS)


def test_an_item_that_arrives_after_its_prefetch_was_released_is_not_pinned(
    node_pair: Pair, other: LookupBuffer
) -> None:
    wanted = key()
    with node_pair[0].client() as client:
        other.insert(wanted, output())
        wait_until(lambda: client.has_caches([wanted])[0], OUTCOME_SECONDS)
        (handle,) = client.prefetch([wanted], wait_seconds=OUTCOME_SECONDS)
        client.release(handle)
        wait_until(lambda: client.has_caches([wanted], timeout=0.0)[0], OUTCOME_SECONDS)
        wait_until(lambda: client.stats()["pins"] == 0, OUTCOME_SECONDS)
