"""The attacker is an end user of the model: he writes the body of a request to an engine.

vLLM passes `kv_transfer_params` from the body to the connector. By them an end user could have his
prompts' KV kept for an engine that never comes, or take what was handed to another.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from connectors.kv.handoffs import transfer_params
from connectors.kv.metadata import KvStepMetadata
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey
from lookup_buffer.namespace import Namespace
from nodes import NodeProcess, StartNode, tensor_of, wait_until, with_store
from test_kv_scheduler import CHUNK, Engine, Request
from test_kv_worker import BLOCKS, Rank

PROMPT = 3 * CHUNK
KEPT = {"do_remote_decode": True}
PROMPTS = 4


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node()


@pytest.fixture
def buffer(node: NodeProcess) -> Iterator[LookupBuffer]:
    with LookupBuffer(node.config, Namespace.named("end-user")) as client:
        yield client


@pytest.fixture
def rank(buffer: LookupBuffer) -> Iterator[Rank]:
    made = Rank(buffer)
    yield made
    made.worker.close()


def decided(engine: Engine, request: Request) -> tuple[int | None, bool]:
    """How many tokens are loaded, once the node's answers are there."""
    wait_until(lambda: engine.side.matched(request, 0)[0] is not None, 5.0, "it waits for nothing")
    return engine.side.matched(request, 0)


def serve(engine: Engine, rank: Rank, name: str, seed: int, params: Any) -> Any:
    """One request through scheduler side and worker; what is added to its answer."""
    request = Request(name, PROMPT, seed)
    request.kv_transfer_params = params
    assert decided(engine, request) == (0, False)
    metadata = engine.start(request, engine.allocate(request, 0, PROMPT), PROMPT)
    # The worker's cache is small, and the stand-in for vLLM never uses a block again.
    saves = [
        replace(save, blocks=tuple(block % BLOCKS for block in save.blocks))
        for save in metadata.saves
    ]
    rank.step(KvStepMetadata(saves=saves))
    assert rank.worker.saves.drain(10.0)
    return engine.side.finished(request)


def test_kv_is_not_kept_for_an_engine_that_never_comes(
    node: NodeProcess, buffer: LookupBuffer, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored for all instances as usual, where it can be evicted."""
    engine = Engine(client_over=lambda _: buffer, clock=time.monotonic)
    for number in range(PROMPTS):
        answered = serve(engine, rank, f"r{number}", number, KEPT)
        assert answered is None
    assert node.stats()["handoff_bytes"] == 0
    assert node.stats()["items"] == PROMPTS * PROMPT // CHUNK
    assert engine.side.counters.totals()["handoff_refused"] == PROMPTS
    lines = [line for line in caplog.messages if "kv_transfer_params" in line]
    assert len(lines) == 1
    assert "behind_router" in lines[0]


def test_what_was_handed_to_another_is_not_taken(buffer: LookupBuffer, rank: Rank) -> None:
    """Nor waited for, however well he knows the id and the prompt."""
    params = transfer_params("known")
    sender = Engine(client_over=lambda _: buffer, clock=time.monotonic, behind_router=True)
    sent = serve(sender, rank, "sent", 1, {**KEPT, "transfer_id": "known"})
    assert sent == params
    engine = Engine(client_over=lambda _: buffer, clock=time.monotonic)
    stolen = Request("stolen", PROMPT, 1)
    stolen.kv_transfer_params = params
    assert decided(engine, stolen) == (0, False)
    assert engine.side.counters.totals()["handoff_refused"] == 1


def test_a_router_may_do_both(node: NodeProcess, buffer: LookupBuffer, rank: Rank) -> None:
    """The control of the tests before."""
    engine = Engine(client_over=lambda _: buffer, clock=time.monotonic, behind_router=True)
    params = serve(engine, rank, "sent", 7, KEPT)
    assert node.stats()["handoff_bytes"] > 0
    taken = Request("taken", PROMPT, 7)
    taken.kv_transfer_params = params
    assert decided(engine, taken) == (PROMPT, True)
    assert "handoff_refused" not in engine.side.counters.totals()


# -- names of images


def test_an_item_with_the_longest_name_comes_from_another_node(start_node: StartNode) -> None:
    """A client chooses it (`uuid`). Such a transfer always failed, and the node that was asked came
    after all others for up to a minute."""
    nodes, name = [start_node(), start_node()], TensorKey("n" * MAX_KEY_CHARACTERS)
    with_store(*nodes)
    with nodes[0].client() as there, nodes[1].client() as here:
        there.insert(name, tensor_of("named", 1000))
        tensor = here.select(name, timeout=10.0)
    assert tensor is not None
    assert torch.equal(tensor, tensor_of("named", 1000))
    assert nodes[1].stats().get("fetches_failed_peer_failed", 0) == 0
