"""One of vLLM's OpenAI servers with two engines in it (`--data-parallel-size 2`), on one node.

A request's header says which of the two answers it, as vLLM lets a router choose.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.demo.engine import Question
from engines import OUTCOME_SECONDS, START_SECONDS, Album, Reference, connector, engine_settings
from nodes import NodeProcess, StartNode, wait_until
from openai_servers import COMPLETIONS, OpenAIServer, Reply, chat_of, parts_of

pytestmark = pytest.mark.vllm
RANKS = (0, 1)
ROUNDS = 5
AT_ONCE = 8
SLOW_SECONDS = 20.0
"""Were Redis not heard in time, which is no matter here, both engines would encode."""


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node(store_timeout_seconds=SLOW_SECONDS)


@pytest.fixture
def server(node: NodeProcess, model: Path, tmp_path: Path) -> Iterator[OpenAIServer]:
    settings = engine_settings(
        "parallel",
        model,
        tmp_path,
        ec_transfer_config=connector(node, fetch_wait_seconds=SLOW_SECONDS),
        extra_arguments={"data_parallel_size": len(RANKS)},
    )
    # vLLM would not have two engines share a core; each still counts with one thread.
    settings = replace(
        settings,
        cores=(),
        environment={
            **settings.environment,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )
    with OpenAIServer(settings) as started:
        started.wait_ready(START_SECONDS)
        yield started


def test_the_engines_of_one_command_encode_each_image_once(
    server: OpenAIServer, node: NodeProcess, album: Album, reference: Reference
) -> None:
    fresh = iter(reference.telling)

    def ask(question: Question, rank: int) -> Reply:
        body = chat_of(parts_of(question), question.tokens)
        return server.post(COMPLETIONS, body, **{"X-data-parallel-rank": str(rank)})

    def wait_for_items(count: int) -> None:
        wait_until(lambda: node.stats()["items"] == count, OUTCOME_SECONDS)

    for rank in RANKS:  # what one has encoded, the other loads
        question = album.about(next(fresh))
        replies = []
        for asked in (rank, 1 - rank):
            replies.append(ask(question, asked))
            wait_for_items(1 + rank)
        assert [server.origins(reply) for reply in replies] == [("encoded",), ("loaded",)]
        assert {reply.tokens for reply in replies} == {reference.tokens(question)}

    with ThreadPoolExecutor(AT_ONCE) as clients:  # what both want at once, one of them encodes
        for _ in range(ROUNDS):
            question = album.about(next(fresh))
            before = server.schedule.encoder_runs()
            ranks = [number % len(RANKS) for number in range(AT_ONCE)]
            replies = list(clients.map(lambda rank, q=question: ask(q, rank), ranks))
            assert {reply.tokens for reply in replies} == {reference.tokens(question)}
            assert server.schedule.encoder_runs() == before + 1

    counted = node.stats()
    assert counted["encodes"] == server.schedule.encoder_runs() == len(RANKS) + ROUNDS
    assert counted["encodes_saved"] >= len(RANKS)
