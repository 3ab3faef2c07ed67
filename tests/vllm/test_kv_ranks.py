"""A real vLLM engine with two tensor parallel workers: each stores and loads its own part of a
chunk."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines import (
    CHUNK,
    SAVE_SECONDS,
    START_SECONDS,
    Engine,
    TwoHosts,
    ask_for,
    kv_connector,
    kv_engine_settings,
    prompt,
)
from examples.demo.engine_settings import Placement
from nodes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.part(name="engines")]


@pytest.fixture
def hosts(places: TwoHosts) -> Iterator[TwoHosts]:
    places.start()
    yield places
    places.stop()


def test_both_workers_load_what_they_stored(hosts: TwoHosts, model: Path, tmp_path: Path) -> None:
    settings = kv_engine_settings(
        "ranks",
        model,
        tmp_path,
        0,
        Placement.TWO_PROCESSES,
        kv_transfer_config=kv_connector(hosts.a),
        tensor_parallel_size=2,
    )
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    settings = replace(settings, cores=(), environment=settings.environment | threads)
    question = ask_for(prompt(500, seed=80), answer=8)
    chunks = 500 // CHUNK
    with Engine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        first = engine.generate(question)

        def stored() -> bool:
            parts = [record.key.partition("#") for record in hosts.store.scan()]
            return all(sum(rank == of for _, _, rank in parts) >= chunks for of in ("0", "1"))

        def loaded() -> bool:
            """A look-up that a busy machine answers too late is a miss: the engine computes all."""
            before = len(engine.schedule.steps())
            assert engine.generate(question).tokens == first.tokens
            computed = sum(step.tokens for step in engine.schedule.steps()[before:]) - 7
            assert computed in (500, 500 - chunks * CHUNK)
            return computed < 500

        wait_until(stored, SAVE_SECONDS, "both ranks' parts are published")
        wait_until(loaded, SAVE_SECONDS, "both ranks' parts are loaded")
    assert "Traceback" not in settings.log_path.read_text(), engine.log_tail()
