"""What a vLLM user meets at the start of an engine: wrong settings, and parts that are not there.

That an engine without our settings starts, though the plugin is installed, is what `reference`
shows, by which all tokens here are judged.
"""

import json
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import fork_server
from connectors.plugin import CONNECTOR_NAME
from engines import SIZE, START_SECONDS, Album, Engine, Reference, connector, engine_settings
from examples.demo.engine import EngineFailure, Question
from examples.demo.engine_settings import engine_arguments, engine_environment
from models import Misfit, encoder_decoder, text_only
from nodes import StartNode, at_rest, wait_until
from patience import scaled
from servers import valkey_executable
from store import EmbeddedServer, open_store

pytestmark = pytest.mark.vllm
REFUSED_SECONDS = scaled(120.0)
"""Nearly all of it for importing vLLM on a busy machine; a wrong setting is refused before the
weights are loaded."""
ANSWER_SECONDS = 5.0
SECRET = "correct-horse-battery"


@dataclass(frozen=True, slots=True)
class Mistake:
    """Settings that are refused, and what the one line about them has to name."""

    settings: dict[str, Any]
    named: tuple[str, ...]
    arguments: dict[str, Any]
    model: Misfit | None
    """Writes another model than the usual one."""


def mistake(
    *named: str,
    arguments: dict[str, Any] | None = None,
    model: Misfit | None = None,
    **settings: Any,
) -> Mistake:
    return Mistake(settings, named, arguments or {}, model)


WHAT_TO_DO = "start this engine without --ec-transfer-config"


MISTAKES = {
    "misspelt": mistake("'capacity_byte'", "did you mean 'capacity_bytes'?", capacity_byte="1GiB"),
    "unknown": mistake("'flavour'", "allowed: ", "capacity_bytes", flavour="mild"),
    "negative": mistake(
        "'capacity_bytes' is -1", "allowed: greater than or equal to 1048576", capacity_bytes=-1
    ),
    "no number": mistake(
        "'capacity_bytes' is 'much'", "allowed: a number of bytes", capacity_bytes="much"
    ),
    "too large": mistake("'capacity_bytes' is '900TiB'", "the memory of", capacity_bytes="900TiB"),
    "no url": mistake("'store_url' is 'localhost'", "redis://", store_url="localhost"),
    "password": mistake(
        "'store_url' is 'redis://",
        "allowed: ",
        "'store_password_file'",
        store_url=f"redis://me:{SECRET}@127.0.0.1:6379",
    ),
    "token": mistake("'token' is (hidden)", "'token_file'", token=SECRET),
    "counted identifiers": mistake(
        "mm_processor_cache_gb is 0 and prefix caching is off",
        "allowed: ",
        arguments={"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
    ),
    "text only": mistake("takes no images, video or audio", WHAT_TO_DO, model=text_only),
    "encoder-decoder": mistake(
        "is an encoder-decoder",
        WHAT_TO_DO,
        model=encoder_decoder,
        arguments={
            "max_model_len": 256,
            "max_num_batched_tokens": 2048,
            "limit_mm_per_prompt": {},
        },
    ),
    "weights by transfer": mistake(
        "--weight-transfer-config",
        "vLLM notifies no connector",
        WHAT_TO_DO,
        arguments={"weight_transfer_config": {"backend": "ipc"}},
    ),
}

# One process for all mistakes: importing vLLM takes longer than the refusals.
STARTS = """
import json, sys
from vllm import LLM
for name, arguments in json.loads(sys.argv[1]).items():
    print(f"==== {name}", flush=True)
    try:
        LLM(**arguments)
    except Exception as error:
        print(f"REFUSED {type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def refusals(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each mistake led to: the part of the output that is about it."""
    work = tmp_path_factory.mktemp("refusals")
    usual = engine_settings("refused", model, work)
    starts = {}
    for name, wrong in MISTAKES.items():
        config = {
            "ec_connector": CONNECTOR_NAME,
            "ec_role": "ec_both",
            "ec_connector_extra_config": wrong.settings,
        }
        settings = replace(usual, ec_transfer_config=config, extra_arguments=wrong.arguments)
        if wrong.model is not None:
            misfit = work / name.replace(" ", "-")
            misfit.mkdir()
            wrong.model(misfit, model)
            settings = replace(settings, model_directory=misfit)
        starts[name] = engine_arguments(settings)
    code, output = fork_server.finished(
        STARTS,
        [json.dumps(starts)],
        folder=work,
        environment=os.environ | engine_environment(usual),
        timeout_seconds=START_SECONDS,
    )
    assert code == 0, output
    sections = output.split("==== ")[1:]
    return dict(section.split("\n", 1) for section in sections)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_the_start_with_one_line_that_says_what_is_allowed(
    refusals: dict[str, str], name: str
) -> None:
    lines = refusals[name].splitlines()
    ours = [line for line in lines if "LookupBufferECConnector: " in line]
    raised = [line for line in lines if line.startswith("REFUSED ")]
    assert len(ours) == len(raised) == 1, refusals[name]
    assert "ERROR" in ours[0]
    for line in (*ours, *raised):
        assert all(piece in line for piece in MISTAKES[name].named), line
        assert SECRET not in line


def test_the_server_ends_with_a_failure_and_tells_no_secret(model: Path, tmp_path: Path) -> None:
    """vLLM's own server, as users start it, with engine core and worker in their own processes."""
    secret_file = tmp_path / "token"
    secret_file.write_text(SECRET)
    config = {
        "ec_connector": CONNECTOR_NAME,
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"token_file": str(secret_file), "prefetch_byte": 0},
    }
    settings = engine_settings("server", model, tmp_path)
    arguments = ["--model", str(model), "--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 26)]
    arguments += ["--host", "127.0.0.1", "--port", "0", "--ec-transfer-config", json.dumps(config)]
    environment = os.environ | engine_environment(settings)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = tmp_path / "server.log"
    started = time.monotonic()
    server = fork_server.launch(
        "vllm.entrypoints.openai.api_server", arguments, log=log, environment=environment
    )
    assert server.wait(START_SECONDS) != 0
    output = log.read_text()
    seconds = time.monotonic() - started
    ours = [line for line in output.splitlines() if "LookupBufferECConnector: " in line]
    assert len(ours) == 1, output
    assert "unknown setting 'prefetch_byte'; did you mean 'prefetch_bytes'?" in ours[0]
    assert SECRET not in output
    assert seconds < REFUSED_SECONDS


@pytest.fixture
def absent_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which no server runs yet."""
    return tmp_path_factory.mktemp("absent")


def log_lines(engine: Engine, text: str) -> list[str]:
    log = engine.settings.log_path.read_text(errors="replace")
    return [line for line in log.splitlines() if text in line]


def ask(engine: Engine, reference: Reference, *questions: Question) -> list[tuple[str, ...]]:
    """Where the images came from, after a look at the tokens."""
    origins = []
    for question in questions:
        answer = engine.generate(question)
        assert answer.tokens == reference.tokens(question)
        origins.append(answer.origins)
    return origins


def test_redis_that_cannot_be_reached_is_a_warning_and_misses(
    start_node: StartNode,
    absent_server: Path,
    model: Path,
    album: Album,
    reference: Reference,
    tmp_path: Path,
) -> None:
    node = start_node(store_url=f"unix://{absent_server}/server.sock")
    settings = engine_settings("lonely", model, tmp_path, ec_transfer_config=connector(node))
    first, other = album.about(0), album.about(1)
    with Engine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        (said,) = log_lines(engine, "cannot be reached")
        assert "WARNING" in said
        assert str(absent_server) in said
        # The host's own node needs nobody: what was driven out of the engine's cache is loaded.
        origins = ask(engine, reference, first, other, first)
        assert origins == [("encoded",), ("encoded",), ("loaded",)]
        with (
            EmbeddedServer.start(
                absent_server, timeout_seconds=scaled(10.0), executable=valkey_executable()
            ) as server,
            open_store(server.url, call_timeout_seconds=2.0) as store,
        ):
            wait_until(lambda: len(list(store.scan())) == 2, 10.0, "both are published")
    at_rest(node)


@pytest.mark.parametrize("wrong", ["no node", "no store", "another node's settings"])
def test_a_node_that_cannot_serve_ends_the_start_with_one_line(
    start_node: StartNode, absent_server: Path, model: Path, tmp_path: Path, wrong: str
) -> None:
    """The first two only because the setting `required` is on."""
    node = start_node(store_url=f"unix://{absent_server}/server.sock")
    config = connector(node, required=wrong != "another node's settings")
    named = [str(node.socket_path)]
    if wrong == "no node":
        node.terminate()
    elif wrong == "no store":
        named = [str(absent_server), "'required'"]
    else:
        config["ec_connector_extra_config"]["capacity_bytes"] = 1 << 20
        named = [f"capacity_bytes = {node.config.capacity_bytes}", str(1 << 20)]
    settings = engine_settings("strict", model, tmp_path, ec_transfer_config=config)
    with Engine(settings) as engine:
        with pytest.raises(EngineFailure, match=r"NodeUnavailable|NodeRefused"):
            engine.wait_ready(timeout_seconds=REFUSED_SECONDS)
        (said,) = log_lines(engine, "LookupBufferECConnector: ")
    assert "ERROR" in said
    assert all(piece in said for piece in named), said


def test_an_output_larger_than_the_arena_is_counted_and_not_stored(
    start_node: StartNode, model: Path, album: Album, reference: Reference, tmp_path: Path
) -> None:
    node = start_node(capacity_bytes=1 << 20)
    assert node.config.capacity_bytes < SIZE.nbytes_per_image
    settings = engine_settings("large", model, tmp_path, ec_transfer_config=connector(node))
    first, other = album.about(0), album.about(1)

    def counted() -> int:
        """By vLLM's own statistics; they come with steps, so there has to be one."""
        ask(engine, reference, first)  # which the engine holds
        counts = re.findall(r"save_skipped:too_large=(\d+)", "".join(log_lines(engine, "EC ")))
        return sum(map(int, counts))

    with Engine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        assert ask(engine, reference, first, other, first) == [("encoded",)] * 3
        wait_until(lambda: counted() == 3, ANSWER_SECONDS)
    (said,) = log_lines(engine, "(too_large)")
    assert f"{SIZE.nbytes_per_image} bytes" in said
    assert "capacity_bytes" in said
    assert node.stats()["items"] == 0
    at_rest(node)
