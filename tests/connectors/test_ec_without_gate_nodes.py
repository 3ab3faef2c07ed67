"""vLLM before 0.23 over two real nodes: what the stand-in of test_ec_without_gate cannot show."""

import hashlib
from collections.abc import Iterator

import pytest
import torch

from connector_standins import EMBEDS, make_request, step_output
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.without_gate import EcWithoutGate
from connectors.settings import ConnectorSettings
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import TensorKey
from nodes import NodeProcess, at_rest, key, wait_until

Pair = tuple[NodeProcess, NodeProcess]
SHARED_SECONDS = 5.0


@pytest.fixture
def buffer(node_pair: Pair) -> Iterator[LookupBuffer]:
    with node_pair[0].client() as buffer:
        yield buffer
    at_rest(node_pair[0])


def content() -> str:
    return hashlib.sha256(key().text.encode()).hexdigest()


@pytest.mark.parametrize(("where", "seconds"), [("here", 0.0), ("elsewhere", 5.0)])
def test_bytes_are_pinned_when_the_lookup_returns(
    where: str, seconds: float, buffer: LookupBuffer, node_pair: Pair
) -> None:
    settings = ConnectorSettings(capacity_bytes="64MiB", sync_fetch_seconds=seconds)
    shape = EngineShape(is_producer=False, is_consumer=True, steps_in_flight=1, embed_bytes=8)
    scheduler = EcScheduler(buffer, settings, shape, metadata_fields=lambda _: set())
    without_gate = EcWithoutGate(
        scheduler, buffer, settings, shape, metadata_fields=lambda _: set()
    )
    identifier, absent, output = content(), content(), torch.rand(EMBEDS, 2)
    with node_pair[where == "elsewhere"].client() as other:
        other.insert(TensorKey(identifier), output)
        wait_until(lambda: buffer.has_caches([TensorKey(identifier)])[0], SHARED_SECONDS)
    for asked in (absent, identifier):
        without_gate.look_up(asked)
    assert not scheduler.has_cache_item(absent)
    assert scheduler.has_cache_item(identifier)
    request = make_request("r", identifier)
    scheduler.item_allocated(request, 0, is_hit=True)
    step = step_output(new=[request])
    without_gate.end_pass(step)
    (load,) = scheduler.build_metadata(step).mm_datas
    assert load.order is not None
    loaded = buffer.load(load.order)
    assert loaded is not None
    assert torch.equal(loaded, output)
    for _ in range(2):
        step = step_output(finished=["r"])
        without_gate.end_pass(step)
        scheduler.build_metadata(step)
    assert buffer.stats()["pins"] == 0
