"""One real engine as the demo commands it: what it answers, what it counts, how it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines import Engine
from examples.demo.engine import DemoEngine, EngineFailure, Question
from examples.demo.engine_settings import (
    EngineSettings,
    Placement,
    engine_arguments,
    engine_environment,
)
from examples.demo.model import ensure_model
from examples.demo.model_size import TINY
from examples.demo.story import question
from patience import scaled

ROOT = Path(__file__).parents[2]


def _settings(directory: Path, model: Path, placement: Placement) -> EngineSettings:
    return EngineSettings("engine", TINY, model, directory, placement=placement)


def _group_is_gone(group: int, timeout_seconds: float) -> bool:
    deadline = time.monotonic() + scaled(timeout_seconds)
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_the_encoder_cache_holds_as_many_images_as_asked_for(tmp_path: Path) -> None:
    rows = TINY.embeddings_per_image
    for images in (1, 2, 5):
        settings = _settings(tmp_path, tmp_path, Placement.ONE_PROCESS)
        arguments = engine_arguments(replace(settings, images_cached=images))
        assert arguments["max_num_batched_tokens"] // rows == images


def test_the_callers_own_arguments_and_variables_win(tmp_path: Path) -> None:
    settings = replace(
        _settings(tmp_path, tmp_path, Placement.ONE_PROCESS),
        extra_arguments={"max_num_seqs": 9},
        environment={"HF_HUB_OFFLINE": "0"},
        cores=(3, 5),
    )
    assert engine_arguments(settings)["max_num_seqs"] == 9
    environment = engine_environment(settings)
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "3,5"
    assert environment["OMP_NUM_THREADS"] == "2"


def test_an_engine_ends_with_the_process_that_commands_it(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from examples.demo.engine import DemoEngine\n"
        "from examples.demo.engine_settings import EngineSettings\n"
        "from examples.demo.model_size import TINY\n"
        f"directory = Path({str(tmp_path)!r})\n"
        "engine = DemoEngine(EngineSettings('engine', TINY, directory, directory))\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    commander = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    with commander:
        assert commander.stdout is not None
        group = int(commander.stdout.readline())
        os.killpg(group, 0)
        commander.kill()
    assert _group_is_gone(group, 10.0)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=list(Placement), ids=str)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[DemoEngine]:
    settings = _settings(tmp_path_factory.mktemp("engine"), tiny_model, request.param)
    with Engine(settings) as running:
        running.wait_ready()
        yield running
    assert _group_is_gone(running.pid, 5.0)


@pytest.mark.vllm
def test_tokens_depend_on_photograph_and_prompt_and_on_nothing_else(engine: DemoEngine) -> None:
    cat = engine.generate(question("cat"))
    tokens = {name: engine.generate(question(name)).tokens for name in ("coffee", "rocket", "cat")}
    assert tokens["cat"] == cat.tokens
    assert len(set(tokens.values())) == 3
    other_prompt = Question(question("coffee").images, "<image>Name the colours.")
    assert engine.generate(other_prompt).tokens != tokens["coffee"]
    assert all(len(sequence) == question("cat").tokens for sequence in tokens.values())


@pytest.mark.vllm
def test_encoder_runs_are_what_the_scheduler_scheduled(engine: DemoEngine) -> None:
    engine.generate(question("rocket"))
    before = engine.encoder_runs
    story = [engine.generate(question(name)) for name in ("cat", "cat", "coffee", "cat")]
    assert [answer.origins for answer in story] == [("encoded",), (), ("encoded",), ("encoded",)]
    assert engine.encoder_runs == before + 3
    assert story[0].identifiers == story[3].identifiers != story[2].identifiers
    assert all(0 <= answer.queued_seconds <= answer.ttft_seconds for answer in story)


@pytest.mark.vllm
def test_questions_asked_together_are_answered_in_their_order(engine: DemoEngine) -> None:
    alone = [engine.generate(question(name)).tokens for name in ("cat", "coffee")]
    engine.submit([question("cat"), question("coffee")])
    assert [answer.tokens for answer in engine.collect()] == alone


@pytest.mark.vllm
def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = _settings(tmp_path, tmp_path / "no-such-model", Placement.ONE_PROCESS)
    with DemoEngine(settings) as engine, pytest.raises(EngineFailure, match="no-such-model"):
        engine.wait_ready()
    assert _group_is_gone(engine.pid, 5.0)


@pytest.mark.vllm
def test_a_killed_engine_is_gone_with_all_its_processes(tmp_path: Path, tiny_model: Path) -> None:
    engine = Engine(_settings(tmp_path, tiny_model, Placement.TWO_PROCESSES))
    engine.wait_ready()
    engine.submit([question("cat")])
    engine.kill()
    assert _group_is_gone(engine.pid, 5.0)
    with pytest.raises(EngineFailure):
        engine.generate(question("cat"))
    engine.close()
