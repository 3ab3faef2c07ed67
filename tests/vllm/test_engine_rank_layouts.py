"""Real engines with several workers in each: two engines of two, and what is refused."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fork_server
from engines import (
    BLOCK,
    OUTCOME_SECONDS,
    START_SECONDS,
    Album,
    connector,
    engine_settings,
    kv_connector,
    prompt,
)
from examples.demo.engine import Question
from examples.demo.engine_settings import Placement, engine_arguments, engine_environment
from nodes import StartNode, wait_until
from openai_servers import (
    COMPLETIONS,
    MODEL_NAME,
    OpenAIServer,
    Reply,
    chat_of,
    parts_of,
)
from servers import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.part(name="engines")]
CHUNK = 512
"""More than the prompt about an image has, so that its KV is not shared and its encoding is."""
PROMPT_TOKENS = 600
ANSWER = 4
LOADED = "vllm:lookup_buffer_kv_loaded_tokens_total"
START_ALL_SECONDS = 2 * START_SECONDS
REFUSED_SECONDS = 240.0

LAUNCHED = """
import json, sys
from vllm import LLM
LLM(**json.loads(sys.argv[1]))
"""


def test_two_engines_of_two_workers_share_encodings_and_kv(
    start_node: StartNode, album: Album, model: Path, tmp_path: Path
) -> None:
    node = start_node()
    settings = engine_settings(
        "square",
        model,
        tmp_path,
        ec_transfer_config=connector(node, fetch_wait_seconds=20.0),
        extra_arguments={
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            "block_size": BLOCK,
            "kv_transfer_config": kv_connector(node, chunk_tokens=CHUNK, fetch_wait_seconds=20.0),
        },
    )
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    settings = replace(settings, cores=(), environment=settings.environment | threads)
    # Of four workers below two engine cores that were forked, two end while they load.
    with OpenAIServer(settings, forked=False) as server, node.client("stats") as client:
        server.wait_ready(START_ALL_SECONDS)

        def ask(question: Question, engine: int) -> Reply:
            body = chat_of(parts_of(question), question.tokens)
            return server.post(COMPLETIONS, body, **{"X-data-parallel-rank": str(engine)})

        def go_on(tokens: tuple[int, ...], engine: int) -> Reply:
            body = {
                "model": MODEL_NAME,
                "prompt": list(tokens),
                "temperature": 0.0,
                "max_tokens": ANSWER,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            headers = {"X-data-parallel-rank": str(engine)}
            return server.post("/v1/completions", body, **headers)

        def wait_for_items(count: int) -> None:
            wait_until(lambda: client.stats()["items"] == count, OUTCOME_SECONDS)

        def wait_for_loaded(tokens: int) -> None:
            wait_until(lambda: server.metric(LOADED) == tokens, OUTCOME_SECONDS)

        for first in (0, 1):
            question = album.about(first)
            replies = [ask(question, first)]
            wait_for_items(3 * first + 1)
            replies.append(ask(question, 1 - first))
            assert [server.origins(reply) for reply in replies] == [("encoded",), ("loaded",)]
            assert replies[0].tokens == replies[1].tokens

            text = prompt(PROMPT_TOKENS, seed=first)
            replies = [go_on(text, first)]
            wait_for_items(3 * first + 3)  # each worker has its own part
            replies.append(go_on(text, 1 - first))
            assert replies[0].tokens == replies[1].tokens
            wait_for_loaded(CHUNK * (1 + first))
        assert server.is_healthy()
        assert "Traceback" not in server.log_text(), server.log_tail()


@pytest.fixture
def _no_memory_of_ended_workers() -> None:
    """Launched from outside, vLLM's shared memory on CPU has one name for all engines, and stays
    where a worker is killed."""
    for path in Path("/dev/shm").glob("-tp:*-cpushm_*"):
        path.unlink()


@pytest.mark.usefixtures("_no_memory_of_ended_workers")
@pytest.mark.parametrize("kind", ["ec", "kv"])
def test_workers_of_an_external_launcher_are_refused_in_one_line(
    kind: str, model: Path, tmp_path: Path
) -> None:
    usual = engine_settings("launched", model, tmp_path, placement=Placement.ONE_PROCESS)
    both = {
        "ec": {"ec_connector": "LookupBufferECConnector", "ec_role": "ec_both"},
        "kv": {"kv_connector": "LookupBufferKVConnector", "kv_role": "kv_both"},
    }
    extra = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
        f"{kind}_transfer_config": both[kind],
    }
    settings = replace(usual, cores=(), extra_arguments=extra)
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launcher |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environment = os.environ | engine_environment(settings) | launcher
    arguments = json.dumps(engine_arguments(settings))

    def launched(rank: int) -> tuple[int, str]:
        folder = tmp_path / str(rank)
        folder.mkdir()
        return fork_server.finished(
            LAUNCHED,
            [arguments],
            folder=folder,
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            timeout_seconds=REFUSED_SECONDS,
        )

    with ThreadPoolExecutor(max_workers=2) as launcher_threads:
        ended = list(launcher_threads.map(launched, (0, 1)))
    said = [output for _, output in ended]
    name = f"LookupBuffer{kind.upper()}Connector: "
    lines = [line for output in said for line in output.splitlines() if name in line]
    assert len(lines) == 1, said
    assert "external_launcher" in lines[0]
    assert "use the backend mp" in lines[0]
    assert all(code != 0 for code, _ in ended)
