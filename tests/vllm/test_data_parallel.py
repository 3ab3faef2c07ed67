"""One of vLLM's OpenAI servers with two engines in it (`--data-parallel-size 2`), on one node.

A request's header says which of the two answers it, as vLLM lets a router choose.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from engines import OUTCOME_SECONDS, START_SECONDS, Album, Reference, connector, engine_settings
from examples.demo.engine import Question
from lookup_buffer.times import INTENT_SECONDS_MAX
from nodes import NodeProcess, StartNode, wait_until
from openai_servers import COMPLETIONS, OpenAIServer, Reply, chat_of, parts_of
from servers import command
from store import EmbeddedServer

EVERY_SECONDS = 0.02


class Pulse:
    """Looks at something, by a thread of its own, again and again: how long did it ever take?

    Of what the looks themselves need nothing must be under test.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse")

    def take(self) -> float:
        """The longest time, in seconds, that a look and the pause before it took beyond the pause,
        since this was last asked."""
        longest, self._longest = self._longest, 0.0
        return longest

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(EVERY_SECONDS):
            self._look()
            began, before = time.monotonic(), began
            self._longest = max(self._longest, began - before - EVERY_SECONDS)


pytestmark = [pytest.mark.vllm, pytest.mark.part(name="engines")]
RANKS = (0, 1)
ROUNDS = 5
ROUNDS_MAX = 20
STILL_SECONDS = 0.25
SLOW_MAX = 2
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
    server: OpenAIServer,
    node: NodeProcess,
    valkey_server: EmbeddedServer,
    album: Album,
    reference: Reference,
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

    def ask_at_once(question: Question) -> float:
        """All of them, of both engines; the seconds that took."""
        began = time.monotonic()
        ranks = [number % len(RANKS) for number in range(AT_ONCE)]
        replies = list(clients.map(lambda rank: ask(question, rank), ranks))
        assert {reply.tokens for reply in replies} == {reference.tokens(question)}
        return time.monotonic() - began

    # What both want at once, one of them encodes. But a store that is not heard of for 0.4 s is
    # not waited for, and an engine that stands still for a second loses its intent: a machine that
    # does that is told from a product that does.
    rounds = still = slow = 0
    runs = server.schedule.encoder_runs()
    with (
        ThreadPoolExecutor(AT_ONCE) as clients,
        Pulse(lambda: command(valkey_server.url, "PING")) as pulse,
    ):
        while rounds - still - slow < ROUNDS and rounds < ROUNDS_MAX:
            pulse.take()
            lasted = ask_at_once(album.about(next(fresh)))
            longest = pulse.take()
            before, runs = runs, server.schedule.encoder_runs()
            rounds += 1
            if longest >= STILL_SECONDS:
                still += 1
            elif lasted >= INTENT_SECONDS_MAX and slow < SLOW_MAX:
                slow += 1
            else:
                assert runs == before + 1, (lasted, longest, node.stats())
    print(f"{rounds} rounds; the machine stood still in {still}, and {slow} took long")
    assert rounds > still + slow, "the machine is never there for long enough"
    assert runs <= len(RANKS) + rounds + still + slow
    wait_until(
        lambda: node.stats().get("inserts_stored", 0) == len(RANKS) + rounds, OUTCOME_SECONDS
    )
    assert node.stats()["encodes_saved"] >= len(RANKS)
