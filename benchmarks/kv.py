"""Prompts without a connector, with vLLM's file-based KV connector on tmpfs, and with ours.

One engine for each, all three on core 0, with vLLM's own prefix cache off. Each prompt is sent
twice: cold, before any of its KV is stored, and warm, when its stored KV is available. The same
prompts go to each engine in turn, and the engine that begins changes from prompt to prompt, so a
slow moment of the machine affects all. A prompt is computed in one step: the file connector stores
only such prompts correctly. Its length is 30 tokens more than a multiple of our chunk, so that both
connectors compute the same 30 tokens when warm.

Time to first token is vLLM's own, from queued to first token. Prints JSON: for each length medians
in milliseconds, and medians of the ratios prompt by prompt.

    python -m benchmarks.kv [--rounds 8] [--lengths 542 2078 4126]
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gauge import emit, machine
from connectors.plugin import KV_CONNECTOR_NAME
from examples.demo.engine import DemoEngine, Question
from examples.demo.engine_settings import EngineSettings
from examples.demo.fleet import Fleet
from examples.demo.model import ensure_model
from examples.demo.model_size import ModelSize, TextSize, VisionSize

WITHOUT, FILES, OURS = "no connector", "files on tmpfs", "lookup buffer"
START_SECONDS = 300.0
STORED_SECONDS = 0.5
"""Time for the background thread to store what was computed."""

SIZE = ModelSize(
    name="kv",
    vision=VisionSize(
        image_size=224, patch_size=14, hidden=128, intermediate=256, layers=1, heads=4
    ),
    text=TextSize(hidden=384, intermediate=1024, layers=6, heads=6, kv_heads=2, head_dim=64),
)
TOKEN_BYTES = 6 * 2 * 2 * 64 * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[542, 2078, 4126])
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="lb-kv-", dir="/dev/shm") as directory,
        engines(Path(directory), max(options.lengths)) as all_of_them,
    ):
        cell(all_of_them, 542, 2, seed=0)  # the first answers of an engine are slow
        emit(
            {
                "machine": machine(),
                "rounds": options.rounds,
                "bytes_per_token": TOKEN_BYTES,
                "lengths": {
                    str(length): cell(all_of_them, length, options.rounds, seed=length)
                    for length in options.lengths
                },
            }
        )


@contextmanager
def engines(directory: Path, longest: int) -> Iterator[dict[str, DemoEngine]]:
    model = ensure_model(SIZE, Path("build/models"), progress=None).resolve()
    files = directory / "files"
    files.mkdir()
    with ExitStack() as stack:
        node = stack.enter_context(Fleet(("host",), directory)).nodes["host"].config
        configs: dict[str, dict[str, Any]] = {
            WITHOUT: {},
            FILES: transfer("ExampleConnector", {"shared_storage_path": str(files)}),
            OURS: transfer(
                KV_CONNECTOR_NAME,
                {
                    "store_url": node.store_url,
                    "node_socket": str(node.socket_path()),
                    "capacity_bytes": node.capacity_bytes,
                    "required": True,
                },
            ),
        }
        started = {}
        for name, config in configs.items():
            settings = EngineSettings(
                name=name.replace(" ", "-"),
                size=SIZE,
                model_directory=model,
                work_directory=directory,
                cores=(0,),
                extra_arguments={
                    "max_model_len": longest + 32,
                    "max_num_batched_tokens": longest + 32,
                    "block_size": 32,
                    "kv_cache_memory_bytes": 4 * longest * TOKEN_BYTES,
                    **config,
                },
            )
            started[name] = stack.enter_context(DemoEngine(settings))
            started[name].wait_ready(timeout_seconds=START_SECONDS)
        yield started


def transfer(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    }


def cell(of: dict[str, DemoEngine], length: int, rounds: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    seconds: dict[str, dict[str, list[float]]] = {
        heat: {name: [] for name in of} for heat in ("cold", "warm")
    }
    names = list(of)
    for _ in range(rounds):
        question = Question((), "", 4, tuple(chance.choices(range(7, 263), k=length)))
        names.append(names.pop(0))
        answers = set()
        for heat in ("cold", "warm"):
            for name in names:
                answer = of[name].generate(question)
                seconds[heat][name].append(answer.ttft_seconds)
                answers.add(answer.tokens)
            time.sleep(STORED_SECONDS)
        assert len(answers) == 1, "the engines' tokens differ"
    return {heat: summary(measured) for heat, measured in seconds.items()}


def summary(measured: dict[str, list[float]]) -> dict[str, Any]:
    def ratio(other: str) -> float:
        pairs = zip(measured[OURS], measured[other], strict=True)
        return round(statistics.median(ours / theirs for ours, theirs in pairs), 3)

    return {
        "median_ms": {
            name: round(1000 * statistics.median(values), 2) for name, values in measured.items()
        },
        "ours / no connector": ratio(WITHOUT),
        "ours / files": ratio(FILES),
    }


if __name__ == "__main__":
    main()
