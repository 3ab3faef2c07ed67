"""Hand-offs by a transfer id: which requests they concern, and what becomes of each. No engine."""

import time
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector_standins import LedgerBuffer, Stored
from connectors.identifiers import Adapters
from connectors.kv.chunks import ChunkChain, key_of
from connectors.kv.handoffs import (
    CHECKS_APART,
    incoming_id,
    outgoing_id,
    piece_names,
    transfer_params,
)
from connectors.kv.metadata import KvWorkerReport
from lookup_buffer.key import TensorKey
from nodes import StartNode, wait_until
from proxies import Relay
from servers import StartServer
from test_kv_scheduler import BLOCK, CHUNK, Engine, Request

PROMPT = 2 * CHUNK + BLOCK + 1
"""Two chunks, and two blocks of which one is not full."""


def request(length: int = PROMPT, **params: Any) -> Request:
    made = Request("r", length)
    made.kv_transfer_params = params
    return made


def handed_over(engine: Engine, asked: Request) -> None:
    """The other engine has handed it over; the stand-in knows no ids."""
    for name in piece_names(ChunkChain(asked, CHUNK, Adapters()), asked):
        engine.buffer.stored[name] = Stored()


def test_the_producer_stores_the_hand_off_in_the_step_that_completes_the_prompt() -> None:
    engine = Engine(role="producer", behind_router=True)
    asked = request(do_remote_decode=True, transfer_id="id")
    assert engine.side.matched(asked, 0) == (0, False)
    blocks = engine.allocate(asked, 0, PROMPT)
    assert not engine.start(asked, blocks, CHUNK).saves
    metadata = engine.step({asked: PROMPT - CHUNK}, req_ids=["r"], new_block_ids=[None])
    assert [save.blocks for save in metadata.saves] == [
        tuple(blocks[:2]),
        tuple(blocks[2:4]),
        tuple(blocks[4:]),
    ]
    assert {save.transfer for save in metadata.saves} == {"id"}
    assert not engine.step({asked: 1}, req_ids=["r"], new_block_ids=[None]).saves
    assert engine.side.finished(asked) == transfer_params("id")


def test_a_request_that_ends_before_its_prompt_is_computed_stores_no_hand_off() -> None:
    engine = Engine(role="producer", behind_router=True)
    asked = request(do_remote_decode=True)
    engine.side.matched(asked, 0)
    engine.start(asked, engine.allocate(asked, 0, PROMPT), CHUNK)
    assert engine.side.finished(asked) is None


def test_the_consumer_takes_all_pieces_and_computes_one_token() -> None:
    engine = Engine(role="consumer", behind_router=True)
    asked = request(**transfer_params("id"))
    assert engine.side.matched(asked, 0) == (None, False), "not there yet"
    handed_over(engine, asked)
    engine.clock.now += 0.1
    assert engine.side.matched(asked, 0) == (PROMPT, True)
    blocks = engine.allocate(asked, PROMPT, PROMPT)
    (load,) = engine.step({}).loads
    assert [chunk.blocks for chunk in load.chunks] == [
        tuple(blocks[:2]),
        tuple(blocks[2:4]),
        tuple(blocks[4:]),
    ]
    assert {chunk.transfer for chunk in load.chunks} == {"id"}
    assert not engine.buffer.pinned, "nothing is read that is to be taken"


def test_pieces_that_vllm_has_are_taken_too() -> None:
    engine = Engine(role="consumer", behind_router=True)
    asked = request(**transfer_params("id"))
    handed_over(engine, asked)
    own = CHUNK + BLOCK
    assert engine.side.matched(asked, own) == (PROMPT - own, True)
    blocks = engine.allocate(asked, PROMPT - own, PROMPT)
    (load,) = engine.step({}).loads
    assert [(chunk.first, chunk.blocks) for chunk in load.chunks] == [
        (3, ()),
        (1, (blocks[3],)),
        (0, tuple(blocks[4:])),
    ]


def test_a_hand_off_that_was_never_stored_is_computed_after_the_wait() -> None:
    """A second request with one id is the same: what was handed over is gone."""
    engine = Engine(role="consumer", behind_router=True, handoff_wait_seconds=5.0)
    asked = request(**transfer_params("id"))
    engine.know(asked, [0])
    questions = 0
    while engine.side.matched(asked, 0) == (None, False):
        engine.clock.now += 0.01
        questions += 1
    assert 490 <= questions <= 510
    assert engine.side.matched(asked, 0) == (CHUNK, True), "what is stored for all still counts"
    assert engine.side.counters.totals()["miss:not_handed_over"] == 1


def test_the_node_gets_no_unnecessary_requests() -> None:
    engine = Engine(role="consumer", behind_router=True)
    asked = request(**transfer_params("id"))
    for _ in range(100):
        engine.side.matched(asked, 0)
        engine.clock.now += 0.0005
    assert len(engine.buffer.calls) <= 11


@pytest.mark.parametrize("node_seconds", [0.0005, 0.003, 0.05])
def test_a_node_that_needs_its_time_is_given_it(node_seconds: float) -> None:
    """And vLLM's scheduler waits for it a sixth of the time at most."""
    waited = 0.0

    class SlowBuffer(LedgerBuffer):
        def has_caches(self, keys: Sequence[TensorKey], *, timeout: float = 0.05) -> list[bool]:
            nonlocal waited
            took = min(timeout, node_seconds)
            waited, clock.now = waited + took, clock.now + took
            found = super().has_caches(keys, timeout=timeout)
            return [there and timeout > node_seconds for there in found]

    engine = Engine(role="consumer", behind_router=True, buffer=SlowBuffer())
    clock = engine.clock
    asked, began = request(**transfer_params("id")), clock.now
    for _ in range(1000):
        assert engine.side.matched(asked, 0) == (None, False)
        clock.now += 0.001
    assert waited < (clock.now - began) / CHECKS_APART
    handed_over(engine, asked)
    arrived = clock.now
    while engine.side.matched(asked, 0) == (None, False):
        clock.now += 0.001
    assert clock.now - arrived < 0.5


def test_many_requests_that_wait_cost_a_pass_one_check() -> None:
    engine = Engine(role="consumer", behind_router=True)
    waiting = [Request(f"r{number}", PROMPT, number) for number in range(20)]
    for number, one in enumerate(waiting):
        one.kv_transfer_params = transfer_params(f"id{number}")
    for _ in range(3):
        before = len(engine.buffer.calls)
        assert {engine.side.matched(one, 0) for one in waiting} == {(None, False)}
        assert len(engine.buffer.calls) == before + 1
        engine.clock.now += 0.1
    for one in waiting[1:]:
        handed_over(engine, one)
    found = [engine.side.matched(one, 0) for one in waiting]
    assert found == [(None, False)] + 19 * [(PROMPT, True)]
    for one in waiting:
        engine.side.finished(one)
    engine.clock.now += 0.1
    engine.side.matched(request(**transfer_params("last")), 0)
    assert len(engine.buffer.calls[-1][1]) == 1, "nothing is asked for requests that have ended"


def test_of_two_requests_for_one_hand_off_the_second_does_not_wait() -> None:
    """vLLM gives `n` samples of one request the same parameters."""
    engine = Engine(role="consumer", behind_router=True)
    first, second = Request("0_r", PROMPT), Request("1_r", PROMPT)
    for one in (first, second):
        one.kv_transfer_params = transfer_params("id")
        assert engine.side.matched(one, 0) == (None, False)
    handed_over(engine, first)
    engine.clock.now += 0.1
    assert engine.side.matched(first, 0) == (PROMPT, True)
    assert engine.side.matched(second, 0) == (None, False)
    engine.allocate(first, PROMPT, PROMPT)
    engine.step({})
    assert engine.side.matched(second, 0) == (None, False)
    engine.buffer.stored.clear()
    engine.side.process_report(None, {"0_r"})
    engine.clock.now += 0.1
    assert engine.side.matched(second, 0) == (0, False)
    assert engine.side.counters.totals()["miss:not_handed_over"] == 1


@pytest.mark.parametrize("ends", ["before its load", "after its load"])
def test_a_hand_off_whose_taker_has_ended_is_there_for_the_next(ends: str) -> None:
    """As where a router repeats the request, with the same id."""
    engine = Engine(role="consumer", behind_router=True)
    first, second = Request("a", PROMPT), Request("b", PROMPT)
    first.kv_transfer_params = second.kv_transfer_params = transfer_params("id")
    handed_over(engine, first)
    assert engine.side.matched(first, 0) == (PROMPT, True)
    assert engine.side.matched(second, 0) == (None, False)
    if ends == "after its load":
        engine.allocate(first, PROMPT, PROMPT)
        engine.step({})
        engine.side.process_report(None, {"a"})  # and it was handed over again
    engine.side.finished(first)
    engine.clock.now += 0.1
    assert engine.side.matched(second, 0) == (PROMPT, True)


def test_after_a_piece_was_lost_the_prompt_is_computed() -> None:
    engine = Engine(role="consumer", behind_router=True)
    asked = request(**transfer_params("id"))
    handed_over(engine, asked)
    engine.side.matched(asked, 0)
    engine.allocate(asked, PROMPT, PROMPT)
    engine.step({})
    engine.side.process_report(KvWorkerReport({}, {"r"}), {"r"})
    assert engine.side.matched(asked, 0) == (0, False)


def test_roles_do_not_mix() -> None:
    engine = Engine(role="producer", behind_router=True)
    asked = request(**transfer_params("id"))
    handed_over(engine, asked)
    assert engine.side.matched(asked, 0) == (0, False)
    engine = Engine(role="consumer", behind_router=True)
    asked = request(do_remote_decode=True)
    engine.side.matched(asked, 0)
    assert not engine.start(asked, engine.allocate(asked, 0, PROMPT), PROMPT).saves


@pytest.mark.parametrize("wrong", [None, 7, "", "x" * 257, ["id"], {"id": 1}])
def test_an_invalid_transfer_id_is_ignored(wrong: Any) -> None:
    asked = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True, "transfer_id": wrong})
    assert incoming_id(asked) == ""
    asked = SimpleNamespace(kv_transfer_params={"do_remote_decode": True, "transfer_id": wrong})
    assert len(outgoing_id(asked)) == 32, "one of our own"
    odd: tuple[Any, ...] = (None, [], "text", {})
    for params in odd:
        assert incoming_id(SimpleNamespace(kv_transfer_params=params)) == ""
        assert outgoing_id(SimpleNamespace(kv_transfer_params=params)) == ""


def test_the_last_partial_chunk_is_named_by_the_whole_prompt() -> None:
    def rest(tokens: list[int], size: int = CHUNK) -> str:
        chain = ChunkChain(SimpleNamespace(request_id="r", mm_features=[]), size, Adapters())
        chain.grow(tokens, 100)
        return chain.rest(tokens)

    tokens = list(range(PROMPT))
    others = [tokens[:-1], [9, *tokens[1:]], [*tokens[:-1], 9], tokens[:CHUNK], tokens[:3]]
    assert len({rest(each) for each in [tokens, *others]}) == 6
    assert rest(tokens) == rest(list(tokens))


@pytest.mark.parametrize("mirror", [True, False])
def test_a_hand_off_is_seen_over_a_store_that_is_far_away(
    start_server: StartServer, start_node: StartNode, mirror: bool
) -> None:
    server, asked = start_server(), request(**transfer_params("id"))
    with closing(Relay()) as relay:
        relay.connect_to(str(server.directory / "server.sock"))
        far = start_node(store_url=f"redis://127.0.0.1:{relay.port}", mirror=mirror)
        near = start_node(store_url=server.url)
        wait_until(lambda: far.stats()["nodes_alive"] == 2, 10.0, "they know each other")
        relay.delay(0.02)
        with far.client() as here, near.client() as there:
            for name in piece_names(ChunkChain(asked, CHUNK, Adapters()), asked):
                there.insert(key_of(name, 0, "id"), torch.ones(3))
            engine = Engine(
                role="consumer",
                behind_router=True,
                client_over=lambda _: here,
                clock=time.monotonic,
                handoff_wait_seconds=60.0,
            )
            wait_until(lambda: engine.side.matched(asked, 0)[0] is not None, 5.0, "it is seen")
            assert engine.side.matched(asked, 0) == (PROMPT, True)
