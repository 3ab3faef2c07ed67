"""Real engines that have one model, or nearly: by a hub's commit, and by every byte of its weights.

All are on one node, and are asked about pictures that those before have stored, or have not.
"""

import dataclasses
import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import (
    CHUNK,
    OUTCOME_SECONDS,
    START_SECONDS,
    Album,
    Engine,
    ask_for,
    connector,
    engine_settings,
    kv_connector,
    kv_engine_settings,
    prompt,
    weights,
)
from examples.demo.engine import Question
from examples.demo.engine_settings import EngineSettings, Placement
from models import REPOSITORY, add_commit, commit_named, environment, hub_over, point
from nodes import NodeProcess, StartNode, wait_until

pytestmark = pytest.mark.vllm

FIRST, SECOND = commit_named("first"), commit_named("second")


@contextmanager
def started(settings: EngineSettings) -> Iterator[Engine]:
    with Engine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        yield engine


def stored(node: NodeProcess) -> int:
    return node.stats().get("inserts_stored", 0)


def origin(engine: Engine, question: Question, node: NodeProcess) -> str:
    """How the engine came by a picture; what it encoded is stored afterwards."""
    before = stored(node)
    (where,) = engine.generate(question).origins
    if where == "encoded":
        wait_until(lambda: stored(node) > before, OUTCOME_SECONDS)
    return where


@pytest.mark.part(name="engines")  # a hub's variables: a fork server each
def test_a_hubs_model_offline_and_online(
    start_node: StartNode, album: Album, tmp_path: Path
) -> None:
    """Same commit, same identity; another commit shares nothing, although its files are equal."""
    cache, node = tmp_path / "hub", start_node()
    for commit in (FIRST, SECOND):
        add_commit(cache, weights(seed=0), commit)
    point(cache, "main", FIRST)
    usual = engine_settings(
        "offline",
        Path(REPOSITORY),
        tmp_path,
        placement=Placement.TWO_PROCESSES,
        ec_transfer_config=connector(node),
    )

    def with_hub(name: str, endpoint: str | None, **arguments: Any) -> EngineSettings:
        return dataclasses.replace(
            usual,
            name=name,
            environment={**usual.environment, **environment(cache, endpoint)},
            extra_arguments={**usual.extra_arguments, **arguments},
        )

    with started(with_hub("offline", None)) as engine:
        assert origin(engine, album.about(0), node) == "encoded"
    with hub_over(cache) as endpoint, started(with_hub("online", endpoint)) as engine:
        assert origin(engine, album.about(0), node) == "loaded"
    with started(with_hub("other", None, revision=SECOND)) as engine:
        assert origin(engine, album.about(0), node) == "encoded"


def change_byte(path: Path, tensor: str) -> None:
    """Within one tensor of a checkpoint's file, at a quarter of it."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[tensor]["data_offsets"]
        position = 8 + length + begin + (end - begin) // 4
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1]))


MATRICES = {
    "one": "",
    "copy": "",
    "encoder": "vision_model.encoder.layers.1.mlp.fc1.weight",
    "language": "text_model.layers.1.self_attn.k_proj.weight",
}
"""Folders of weights, and the matrix of which one byte is another one's."""
PROMPT_TOKENS = 2 * CHUNK + 8


def test_a_byte_of_any_matrix_counts(start_node: StartNode, album: Album, tmp_path: Path) -> None:
    """One `--model` path, under which the folders lie one after the other."""
    node, link = start_node(), tmp_path / "model"
    origins, computed = {}, {}
    for name, matrix in MATRICES.items():
        shutil.copytree(weights(seed=0), tmp_path / name)
        if matrix:
            (file,) = (tmp_path / name).glob("*.safetensors")
            change_byte(file, a_matrix_of(file, matrix))
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        settings = kv_engine_settings(
            name,
            link,
            tmp_path,
            0,
            Placement.ONE_PROCESS,
            ec_transfer_config=connector(node),
            kv_transfer_config=kv_connector(node),
        )
        with started(settings) as engine:
            # Behind a text of its own: with the KV of the picture nobody would ask for its output.
            question = album.about(1)
            question = dataclasses.replace(question, prompt=f"{name}: {question.prompt}")
            origins[name] = origin(engine, question, node)
            computed[name] = computed_of_prompt(engine, node)
    alone = {"encoder": "encoded", "language": "encoded"}
    assert origins == {"one": "encoded", "copy": "loaded", **alone}
    assert computed["copy"] == PROMPT_TOKENS - 2 * CHUNK
    assert {computed[name] for name in ("one", *alone)} == {PROMPT_TOKENS}


def computed_of_prompt(engine: Engine, node: NodeProcess) -> int:
    """How many tokens of one prompt the engine computed; their KV is stored afterwards."""
    before, steps = stored(node), len(engine.schedule.steps())
    answer = engine.generate(ask_for(prompt(PROMPT_TOKENS, seed=1), 1))
    count = sum(step.tokens for step in engine.schedule.steps()[steps:]) - (len(answer.tokens) - 1)
    if count == PROMPT_TOKENS:
        wait_until(lambda: stored(node) >= before + 2, OUTCOME_SECONDS)
    return count


def a_matrix_of(file: Path, name: str) -> str:
    """The tensor whose name ends so."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        (found,) = [key for key in json.loads(opened.read(length)) if key.endswith(name)]
    return str(found)
