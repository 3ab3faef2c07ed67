"""Real vLLM engines that share KV, on nodes that act as two hosts, and what they have to answer.

A third engine without any connector says what the tokens are. How many tokens an engine computed is
counted from what vLLM's own scheduler planned.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from connectors.plugin import KV_CONNECTOR_NAME
from engines import START_SECONDS, connector, engine_settings
from examples.demo.engine import Answer, DemoEngine, Question
from examples.demo.engine_settings import EngineSettings, Placement
from examples.demo.schedule_log import Step
from nodes import ROOT, NodeProcess, wait_until
from patience import scaled
from two_hosts import TwoHosts

BLOCK, CHUNK = 32, 64
BLOCKS_OF_A = 70
BLOCK_BYTES = 64 << 10
"""Two layers, keys and values of two heads of 64 floats for 32 tokens."""
SAVE_SECONDS = 10.0
HANDOFF_SECONDS = 8.0
FETCH_WAIT_SECONDS = 8.0
"""Both longer than what comes is on its way, also on a busy machine."""
FAULT_VARIABLE = "LOOKUP_BUFFER_TEST_KV_FAULT"
"""Names the file of `faulty_kv_connector`."""
ANSWER_SECONDS = scaled(20.0)
_LETTERS = range(7, 263)
"""Tokens of single bytes."""


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Tokens that no other seed gives."""
    return tuple(random.Random(seed).choices(_LETTERS, k=length))


def ask_for(tokens: tuple[int, ...], answer: int = 8, **transfer: Any) -> Question:
    return Question((), "", answer, tokens, transfer or None)


def kv_connector(node: NodeProcess, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """What the user of an engine on this node's host writes into `--kv-transfer-config`."""
    config = node.config
    return {
        "kv_connector": KV_CONNECTOR_NAME,
        "kv_role": role,
        "kv_connector_extra_config": {
            "store_url": config.store_url,
            "node_socket": str(config.socket_path()),
            "capacity_bytes": config.capacity_bytes,
            "chunk_tokens": CHUNK,
            "handoff_wait_seconds": HANDOFF_SECONDS,
            "fetch_wait_seconds": FETCH_WAIT_SECONDS,
            **extra,
        },
    }


def one_of_several(node: NodeProcess) -> dict[str, Any]:
    """Ours, loaded by its path, as the only one of vLLM's MultiConnector."""
    ours = kv_connector(node) | {
        "kv_connector": "FaultyKVConnector",
        "kv_connector_module_path": "faulty_kv_connector",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours]},
    }


def kv_engine_settings(
    name: str, model: Path, work: Path, core: int, placement: Placement, **arguments: Any
) -> EngineSettings:
    sizes = {"max_model_len": 2048, "max_num_batched_tokens": 512, "block_size": BLOCK}
    extra = {**sizes, **arguments}
    return engine_settings(name, model, work, core=core, placement=placement, extra_arguments=extra)


def interrupted(steps: list[Step]) -> set[str]:
    """Requests that vLLM stopped in the middle and took up again."""
    seen: dict[str, int] = {}
    found = set()
    for number, step in enumerate(steps):
        for request in step.requests:
            if seen.get(request, number) < number - 1:
                found.add(request)
            seen[request] = number
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    answer: Answer
    computed: int
    """Tokens of the prompt that the engine computed; all of them, were it alone."""


class KvPair:
    """Engines a and b under test; every answer is held against one without a connector."""

    def __init__(
        self, hosts: TwoHosts, a: DemoEngine, b: DemoEngine, reference: DemoEngine, fault: Path
    ) -> None:
        self.hosts = hosts
        self.fault = fault
        """While there is this file, engine b's loads fail after as many chunks as it says."""
        self.a = a
        self.b = b
        self.reference = reference

    def tokens(self, question: Question) -> tuple[int, ...]:
        plain = Question(question.images, question.prompt, question.tokens, question.token_ids)
        return self.reference.generate(plain).tokens

    def ask(self, engine: DemoEngine, question: Question) -> Asked:
        """The answer, which is right."""
        before = len(engine.schedule.steps())
        answer = engine.generate(question, timeout_seconds=ANSWER_SECONDS)
        assert answer.tokens == self.tokens(question)
        steps = engine.schedule.steps()[before:]
        return Asked(answer, sum(step.tokens for step in steps) - (len(answer.tokens) - 1))

    def stored(self, node: NodeProcess) -> int:
        """Chunks that Redis says this node holds."""
        store = self.hosts.store
        kinds = store.namespaces()
        return sum(
            kinds[record.namespace].get("content") == "kv_cache"
            for record in store.scan()
            if any(location.node == node.node_id for location in record.locations)
        )

    def ask_and_store(self, engine: DemoEngine, node: NodeProcess, question: Question) -> Asked:
        """Also wait until what is new of it was published: that comes after the answer."""
        before = self.stored(node)
        asked = self.ask(engine, question)
        end = len(question.token_ids) + question.tokens - 1
        fresh = end // CHUNK - (len(question.token_ids) - asked.computed) // CHUNK
        wait_until(lambda: self.stored(node) >= before + fresh, SAVE_SECONDS, "KV is published")
        return asked


@pytest.fixture(scope="module")
def kv_pair(
    places: TwoHosts, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KvPair]:
    """Engine a with scheduler and worker in two processes, and a cache that four prompts fill;
    engine b with both in one, vLLM's own prefix cache on, and our connector as one of several. Both
    share encoder outputs as well."""
    places.start()
    work = tmp_path_factory.mktemp("kv")

    def settings(name: str, core: int, placement: Placement, **arguments: Any) -> EngineSettings:
        return kv_engine_settings(name, model, work, core, placement, **arguments)

    two, one = Placement.TWO_PROCESSES, Placement.ONE_PROCESS
    of_a = settings(
        "a",
        0,
        two,
        kv_transfer_config=kv_connector(places.a),
        ec_transfer_config=connector(places.a),
        kv_cache_memory_bytes=BLOCKS_OF_A * BLOCK_BYTES,
    )
    of_b = settings(
        "b",
        1,
        one,
        kv_transfer_config=one_of_several(places.b),
        ec_transfer_config=connector(places.b),
        enable_prefix_caching=True,
    )
    fault = work / "fault"
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    of_b.environment.update({FAULT_VARIABLE: str(fault), "PYTHONPATH": paths.rstrip(os.pathsep)})
    with (
        DemoEngine(of_a) as a,
        DemoEngine(of_b) as b,
        DemoEngine(settings("reference", 0, one)) as reference,
    ):
        for engine in (a, b, reference):
            engine.wait_ready(timeout_seconds=START_SECONDS)
        yield KvPair(places, a, b, reference, fault)
    for engine in (a, b):
        assert "Traceback" not in engine.settings.log_path.read_text(), engine.log_tail()
    places.stop()
