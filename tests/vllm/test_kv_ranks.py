"""A real vLLM engine with two tensor parallel workers: each stores and loads its own part of a
chunk."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines import (
    CHUNK,
    SAVE_SECONDS,
    START_SECONDS,
    TwoHosts,
    ask_for,
    kv_connector,
    kv_engine_settings,
    prompt,
)
from examples.demo.engine import DemoEngine
from examples.demo.engine_settings import Placement
from nodes import wait_until

pytestmark = pytest.mark.vllm


def test_both_workers_load_what_they_stored(places: TwoHosts, model: Path, tmp_path: Path) -> None:
    places.start()
    settings = kv_engine_settings(
        "ranks",
        model,
        tmp_path,
        0,
        Placement.TWO_PROCESSES,
        kv_transfer_config=kv_connector(places.a),
        tensor_parallel_size=2,
    )
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    settings = replace(settings, cores=(), environment=settings.environment | threads)
    question = ask_for(prompt(500, seed=80), answer=8)
    with DemoEngine(settings) as engine:
        engine.wait_ready(timeout_seconds=START_SECONDS)
        first = engine.generate(question)
        chunks = 500 // CHUNK

        def stored() -> bool:
            parts = [record.key.partition("#") for record in places.store.scan()]
            return all(sum(rank == of for _, _, rank in parts) >= chunks for of in ("0", "1"))

        wait_until(stored, SAVE_SECONDS, "both ranks' parts are published")
        before = len(engine.schedule.steps())
        again = engine.generate(question)
        computed = sum(step.tokens for step in engine.schedule.steps()[before:]) - 7
    assert again.tokens == first.tokens
    assert computed == 500 - chunks * CHUNK
    assert "Traceback" not in settings.log_path.read_text(), engine.log_tail()
    places.stop()
