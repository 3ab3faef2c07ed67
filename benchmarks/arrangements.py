"""No connector, vLLM's file connector on tmpfs, and ours, side by side on real engines.

Each arrangement has two engines on one host. All six run, each with one core for its arithmetic.
The same requests go to each arrangement, `TURN` at a time, and the arrangement that begins changes
from turn to turn, so a slow moment of the machine affects all. There are two streams, one for each
engine, with one request at a time. A share of the `slots` requests repeats an image that either
engine had at least `APART` requests ago. (With less distance the file connector reads a file that
the other engine is still writing, and the engine ends.) vLLM's own cache holds one image.

Time to first token is vLLM's own, from queued to first token. Prints JSON: for each encoder, reuse
and arrangement the median and the requests per second; and for each pair of arrangements the ratio
of means and the difference of medians, with 95 % confidence (bootstrap over requests, paired by
slot: the same image at the same position of the same stream).

    python -m benchmarks.arrangements [--rounds 5] [--encoders heavy light]
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gauge import emit, machine
from examples.demo.engine import Answer, DemoEngine, Question
from examples.demo.engine_settings import EngineSettings
from examples.demo.fleet import Fleet
from examples.demo.model import ensure_model
from examples.demo.model_size import TINY, ModelSize, TextSize, VisionSize

ENGINES = 2
REUSES = (0.0, 0.5, 0.8)
APART = 4
TURN = 4
RESAMPLES = 2000
PROMPT = "<image>What is in this picture?"
START_SECONDS = 300.0
WITHOUT, FILES, OURS = "no connector", "files on tmpfs", "lookup buffer"

# As slow as the tower of SigLIP-base: about 20 times the time of the rest of a request.
BASE = ModelSize(
    name="base",
    vision=VisionSize(
        image_size=224, patch_size=14, hidden=768, intermediate=3072, layers=12, heads=12
    ),
    text=TextSize(hidden=1152, intermediate=256, layers=1, heads=4, kv_heads=2, head_dim=64),
)
SIZES = {"heavy": BASE, "light": TINY}
SLOTS = {"heavy": 20, "light": 60}


@dataclass(slots=True)
class Arrangement:
    name: str
    engines: list[DemoEngine]
    ttft_seconds: list[float] = field(default_factory=list)
    """Of one cell, by round and slot; `wall_seconds` by round and turn."""
    wall_seconds: list[float] = field(default_factory=list)
    encoded: int = 0

    def clear(self) -> None:
        self.ttft_seconds, self.wall_seconds, self.encoded = [], [], 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoders", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "encoders": {}}
    for encoder in options.encoders:
        with (
            tempfile.TemporaryDirectory(prefix="lb-arr-", dir="/dev/shm") as directory,
            arrangements(SIZES[encoder], Path(directory)) as all_of_them,
        ):
            pictures = Pictures(Path(directory), SIZES[encoder].vision.image_size)
            report["encoders"][encoder] = {
                "slots": SLOTS[encoder],
                "bytes_per_image": SIZES[encoder].nbytes_per_image,
                "reuse": {
                    str(reuse): cell(all_of_them, pictures, reuse, SLOTS[encoder], options.rounds)
                    for reuse in REUSES
                },
            }
    emit(report)


# -- engines


@contextmanager
def arrangements(size: ModelSize, directory: Path) -> Iterator[list[Arrangement]]:
    """Start the engines one after the other: parallel starts would share the cores."""
    model = ensure_model(size, Path("build/models"), progress=None).resolve()
    files = directory / "files"
    files.mkdir()
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(("host",), directory))
        configs: dict[str, dict[str, Any] | None] = {
            WITHOUT: None,
            FILES: {
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"shared_storage_path": str(files)},
            },
            OURS: fleet.nodes["host"].ec_transfer_config(),
        }
        started = []
        for name, config in configs.items():
            engines = []
            for index in range(ENGINES):
                settings = EngineSettings(
                    name=f"{name.replace(' ', '-')}-{index}",
                    size=size,
                    model_directory=model,
                    work_directory=directory,
                    ec_transfer_config=config,
                    cores=(index,),
                )
                engines.append(stack.enter_context(DemoEngine(settings)))
            for engine in engines:
                engine.wait_ready(timeout_seconds=START_SECONDS)
            log(f"{size.name}: {name}: ready")
            started.append(Arrangement(name, engines))
        yield started


class Pictures:
    """Makes pictures of noise from a seed, all different."""

    def __init__(self, directory: Path, edge: int) -> None:
        self._directory, self._edge = directory, edge
        self._chance = random.Random(0)
        self._made = 0

    def take(self, count: int) -> list[Path]:
        from PIL import Image

        paths = []
        for _ in range(count):
            self._made += 1
            path = self._directory / f"{self._made}.png"
            shape = (self._edge, self._edge)
            Image.frombytes("RGB", shape, self._chance.randbytes(3 * self._edge**2)).save(path)
            paths.append(path)
        return paths


# -- requests


def cell(
    all_of_them: list[Arrangement], pictures: Pictures, reuse: float, slots: int, rounds: int
) -> dict[str, Any]:
    for arrangement in all_of_them:
        arrangement.clear()
    for number in range(-1, rounds):  # the first round is a warm-up and is not counted
        images = pictures.take(slots - round(slots * reuse))
        requests = order(images, slots, random.Random(f"{reuse}-{number}"))
        for begin in range(0, slots, TURN):
            first = begin // TURN % len(all_of_them)
            for arrangement in all_of_them[first:] + all_of_them[:first]:
                run(arrangement, requests[begin : begin + TURN], counted=number >= 0)
    log(f"reuse {reuse}: " + ", ".join(f"{a.name} {median_ms(a):.1f} ms" for a in all_of_them))
    by_name = {arrangement.name: arrangement for arrangement in all_of_them}
    return {
        "images": rounds * len(images),
        "arrangements": {a.name: figures(a) for a in all_of_them},
        f"{OURS} against {WITHOUT}": against(by_name[OURS], by_name[WITHOUT]),
        f"{OURS} against {FILES}": against(by_name[OURS], by_name[FILES]),
        f"{FILES} against {WITHOUT}": against(by_name[FILES], by_name[WITHOUT]),
    }


def order(images: Sequence[Path], slots: int, chance: random.Random) -> list[Path]:
    """Each image at least once; the other slots repeat one from at least `APART` requests ago."""
    fresh = list(images)
    requests: list[Path] = []
    while len(requests) < slots:
        known = requests[: max(0, len(requests) - APART + 1)]
        left = slots - len(requests)
        if fresh and (not known or chance.random() < len(fresh) / left):
            requests.append(fresh.pop())
        else:
            requests.append(chance.choice(known))
    return requests


def run(arrangement: Arrangement, images: Sequence[Path], *, counted: bool) -> None:
    """Even slots go to one engine, odd slots to the other, at the same time."""
    answers: dict[int, Answer] = {}

    def stream(index: int) -> None:
        for slot in range(index, len(images), ENGINES):
            question = Question((str(images[slot]),), PROMPT, tokens=1)
            answers[slot] = arrangement.engines[index].generate(question)

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(ENGINES)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if len(answers) != len(images):
        raise SystemExit(f"{arrangement.name}: an engine ended")
    if counted:
        arrangement.wall_seconds.append(seconds)
        arrangement.ttft_seconds += [answers[slot].ttft_seconds for slot in range(len(images))]
        arrangement.encoded += sum(a.origins.count("encoded") for a in answers.values())


# -- figures


def median_ms(arrangement: Arrangement) -> float:
    return statistics.median(arrangement.ttft_seconds) * 1000


def figures(arrangement: Arrangement) -> dict[str, float]:
    times = arrangement.ttft_seconds
    return {
        "encoded": arrangement.encoded,
        "ttft_mean_ms": round(statistics.mean(times) * 1000, 2),
        "ttft_median_ms": round(median_ms(arrangement), 2),
        "requests_per_second": round(len(times) / sum(arrangement.wall_seconds), 3),
    }


def against(ours: Arrangement, theirs: Arrangement) -> dict[str, list[float]]:
    """Each as [value, low, high]."""
    requests = list(zip(ours.ttft_seconds, theirs.ttft_seconds, strict=True))
    turns = list(zip(ours.wall_seconds, theirs.wall_seconds, strict=True))
    return {
        "ttft_ratio": confident(requests, lambda pairs: total(pairs, 0) / total(pairs, 1), 4),
        "ttft_median_difference_ms": confident(
            requests, lambda pairs: statistics.median(a - b for a, b in pairs) * 1000, 2
        ),
        "requests_per_second_ratio": confident(
            turns, lambda pairs: total(pairs, 1) / total(pairs, 0), 4
        ),
    }


Pairs = Sequence[tuple[float, float]]


def total(pairs: Pairs, which: int) -> float:
    return sum(pair[which] for pair in pairs)


def confident(pairs: Pairs, statistic: Callable[[Pairs], float], digits: int) -> list[float]:
    """The statistic, and the bounds of 95 % of its resamples."""
    chance = random.Random(0)
    found = sorted(statistic(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]
    return [round(value, digits) for value in (statistic(pairs), low, high)]


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
