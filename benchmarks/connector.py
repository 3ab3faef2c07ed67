"""The cost of the connector on vLLM's own threads, with a real node and an embedded store.

- `save_caches`: the time that the model's thread is held per encoder output, at three sizes, while
  the background thread stores each (new keys, with eviction once the arena is full). Compared with
  one warm memcpy of the same size, the least cost of storing on the model's thread;
- `ensure_cache_available`: the first call for a request with one resident item, a poll of a waiting
  request, and a poll of a request that decodes;
- `queues`: a pass that polls 1, 32 or 256 waiting requests, for each request and for the whole
  pass. Their items are on this node, in transfer from another node, being encoded by another
  engine, or came as metadata only and are not published (these also 500 at a time). `work` is
  processor time of the thread; the clock also counts time in which other threads and processes
  have its core. `control` is 40 look-ups in a dictionary for each request, timed in turn with
  ours: its tail is the machine's. `longest_pass_before` covers the passes in which the requests
  were first seen and answers arrived;
- `has_cache_item`: within a pass (cached), and the first of a pass.

Prints microseconds as JSON.

    python -m benchmarks.connector [--saves 200]
"""

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from connectors.ec.metadata import StepMetadata
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.settings import ConnectorSettings
from examples.demo.fleet import DemoNode, Fleet
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

SIZES_BYTES = (1 << 20, 8 << 20, 64 << 20)
ENCODE_SECONDS = 0.02
"""The time of an encoder for one item; the background thread works meanwhile."""
POLLS = 2000
QUEUES = (1, 32, 256)
AWAITED = (*QUEUES, 500)
PASSES = 500
SETTLING_SECONDS = 1.0
"""Time from the first answers until the queue is stable: the answers of requests that wait for
another engine's encode arrive one by one."""
ROWS = 676
EMBED_BYTES = 16


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_us": round(statistics.median(ordered) * 1e6, 2),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6, 2),
    }


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def batched(call: Callable[[], object], count: int = 100) -> list[float]:
    """Times of one call, from batches: a single call is shorter than the clock's resolution."""
    times = []
    for _ in range(POLLS // count):
        started = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - started) / count)
    return times


@contextmanager
def engine(directory: Path) -> Iterator[tuple[EcScheduler, EcWorker]]:
    settings = ConnectorSettings(directory=directory, capacity_bytes="512MiB", idle_exit_seconds=5)
    namespace = Namespace.named("benchmark")

    def client(rank: int | None) -> LookupBuffer:
        engine_rank = EngineRank("benchmark", rank, 1)
        return LookupBuffer(settings.buffer_config(), namespace, engine=engine_rank)

    worker = EcWorker(lambda: client(0), settings, WorkerSeat(rank=0, is_producer=True))
    worker.start()
    shape = EngineShape(True, True, 2, 4096)
    scheduler = EcScheduler(client(None), settings, shape, metadata_fields=lambda _: set())
    try:
        yield scheduler, worker
    finally:
        scheduler.close()
        worker.close()


@contextmanager
def another_engine(directory: Path) -> Iterator[LookupBuffer]:
    settings = ConnectorSettings(directory=directory, capacity_bytes="512MiB", idle_exit_seconds=5)
    engine_rank = EngineRank("another", None, 1)
    with LookupBuffer(
        settings.buffer_config(), Namespace.named("benchmark"), engine=engine_rank
    ) as buffer:
        yield buffer


def time_saves(worker: EcWorker, nbytes: int, count: int) -> dict[str, float]:
    tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16).view(-1, 512)
    target = torch.zeros_like(tensor)
    times = []
    for index in range(count):
        identifier = f"save-{nbytes}-{index}"
        cache = {identifier: tensor}
        metadata = StepMetadata(saves={identifier: TensorKey(identifier).text})
        times.append(timed(lambda: worker.save(cache, identifier, metadata)))  # noqa: B023
        time.sleep(ENCODE_SECONDS)
    assert worker.saves is not None
    worker.saves.drain(30)
    time.sleep(0.5)  # the last outputs are still being published
    memcpy = statistics.median(timed(lambda: target.copy_(tensor)) for _ in range(10))
    return {**percentiles(times), "memcpy_us": round(memcpy * 1e6, 2)}


def request(request_id: str, identifier: str, *, with_media: bool = True) -> Any:
    data: Any = {"pixel_values": SimpleNamespace(data=SimpleNamespace(nbytes=1 << 20))}
    position = SimpleNamespace(offset=4, length=ROWS, get_num_embeds=lambda: ROWS)
    feature = SimpleNamespace(
        identifier=identifier,
        modality="image",
        data=data if with_media else None,
        mm_position=position,
    )
    return SimpleNamespace(request_id=request_id, mm_features=[feature], num_preemptions=0)


def end_pass(scheduler: EcScheduler, *finished: str) -> None:
    scheduler.build_metadata(
        SimpleNamespace(
            total_num_scheduled_tokens=1,
            scheduled_encoder_inputs={},
            free_encoder_mm_hashes=[],
            finished_req_ids=set(finished),
        )
    )


def time_gate(scheduler: EcScheduler, worker: EcWorker) -> dict[str, dict[str, float]]:
    item = "gate-item"
    cache = {item: torch.ones(ROWS, 3072, dtype=torch.bfloat16)}
    worker.save(cache, item, StepMetadata(saves={item: item}))
    assert worker.saves is not None
    worker.saves.drain(30)
    ensure = scheduler.gate.ensure_cache_available
    first_sights = []
    for index in range(200):
        first = request(f"first-{index}", item)
        first_sights.append(timed(lambda: ensure(first, 0)))  # noqa: B023
        end_pass(scheduler, first.request_id)
    waiting = request("waiting", item)
    while not ensure(waiting, 0):
        time.sleep(0.001)
    answer = scheduler.has_cache_item(item)
    assert answer, "the benchmark times hits"
    remembered = batched(lambda: scheduler.has_cache_item(item))
    first_of_pass = []
    for _ in range(200):
        end_pass(scheduler)
        first_of_pass.append(timed(lambda: scheduler.has_cache_item(item)))
    return {
        "ensure_first_sight": percentiles(first_sights),
        "ensure_poll_waiting": percentiles(batched(lambda: ensure(waiting, 0))),
        "ensure_poll_decoding": percentiles(batched(lambda: ensure(waiting, ROWS + 10))),
        "has_cache_item": percentiles(remembered),
        "has_cache_item_first_of_a_pass": percentiles(first_of_pass),
    }


def time_queues(scheduler: EcScheduler, worker: EcWorker, other: LookupBuffer) -> dict[str, Any]:
    """Times of passes; `other` is the client of another engine."""
    assert worker.saves is not None
    report: dict[str, Any] = {}
    on_their_way = time_fetches()
    for count in QUEUES:
        here = [f"here-{count}-{index}" for index in range(count)]
        away = [f"away-{count}-{index}" for index in range(count)]
        for item in here:
            rows = {item: torch.ones(ROWS, 8, dtype=torch.bfloat16)}
            worker.save(rows, item, StepMetadata(saves={item: item}))
            worker.saves.drain(30)
        other.encoding([TensorKey(item) for item in away], lease_seconds=60.0)
        time.sleep(1.0)
        report[str(count)] = {
            "here": time_passes(scheduler, here, passes=True),
            "on_their_way": on_their_way[count],
            "encoded_elsewhere": time_passes(scheduler, away, passes=False),
        }
        other.unclaim([TensorKey(item) for item in away])
    for count in AWAITED:
        nowhere = [f"nowhere-{count}-{index}" for index in range(count)]
        awaited = time_passes(scheduler, nowhere, passes=False, with_media=False)
        report.setdefault(str(count), {})["awaited"] = awaited
    return report


def time_fetches() -> dict[int, Any]:
    """Items of a stopped node: requested, and never received."""
    report = {}
    for count in QUEUES:
        with (
            tempfile.TemporaryDirectory() as directory,
            Fleet(("near", "far"), Path(directory)) as fleet,
            at(fleet.nodes["near"], "waits") as near,
            at(fleet.nodes["far"], "has") as far,
        ):
            items = [f"far-{index}" for index in range(count)]
            for item in items:
                far.insert(TensorKey(item), torch.ones(ROWS, 8, dtype=torch.bfloat16))
            wait_for(near, TensorKey(items[-1]))
            settings = ConnectorSettings(capacity_bytes="256MiB", fetch_wait_seconds=60.0)
            shape = EngineShape(True, True, 2, EMBED_BYTES)
            scheduler = EcScheduler(near, settings, shape, metadata_fields=lambda _: set())
            fleet.nodes["far"].process.send_signal(signal.SIGSTOP)
            try:
                report[count] = time_passes(scheduler, items, passes=False)
            finally:
                fleet.nodes["far"].process.send_signal(signal.SIGCONT)
    return report


@contextmanager
def at(node: DemoNode, engine_id: str) -> Iterator[LookupBuffer]:
    """The scheduler side of an engine with one rank."""
    scheduler, rank = (EngineRank(engine_id, index, 1) for index in (None, 0))
    namespace = Namespace.named("benchmark")
    with (
        LookupBuffer(node.config, namespace, engine=rank),
        LookupBuffer(node.config, namespace, engine=scheduler) as buffer,
    ):
        yield buffer


def wait_for(buffer: LookupBuffer, key: TensorKey) -> None:
    until = time.monotonic() + 10.0
    while not buffer.has_caches([key])[0]:
        assert time.monotonic() < until, "the other node did not publish"
        time.sleep(0.05)


def time_passes(
    scheduler: EcScheduler, items: list[str], *, passes: bool, with_media: bool = True
) -> dict[str, Any]:
    """`passes`: the gate's answer for each request once all answers have arrived."""
    ensure = scheduler.gate.ensure_cache_available
    waiting = [request(f"queued-{item}", item, with_media=with_media) for item in items]
    settling: list[float] = []
    until, settled_at = time.monotonic() + 10.0, math.inf
    while time.monotonic() < min(until, settled_at + SETTLING_SECONDS):
        started = time.perf_counter()
        answers = [ensure(one, 0) for one in waiting]
        settling.append(time.perf_counter() - started)
        end_pass(scheduler)
        if answers == [passes] * len(items):
            settled_at = min(settled_at, time.monotonic())
        time.sleep(0.001)  # the model runs; the node's answers arrive
    times, work, control = [], [], []
    table = dict.fromkeys(range(40), True)
    for _ in range(PASSES):
        started = time.thread_time()
        for _one in waiting:
            for number in table:
                table[number]
        control.append(time.thread_time() - started)
        started, worked = time.perf_counter(), time.thread_time()
        answers = [ensure(one, 0) for one in waiting]
        work.append(time.thread_time() - worked)
        times.append(time.perf_counter() - started)
        assert answers == [passes] * len(items), (len(items), scheduler.counters.totals())
        end_pass(scheduler)
    end_pass(scheduler, *(one.request_id for one in waiting))
    by_request = percentiles([seconds / len(items) for seconds in times])
    by_work = percentiles([seconds / len(items) for seconds in work])
    return {
        "a_request": by_request,
        "a_request_work": by_work,
        "control": percentiles([seconds / len(items) for seconds in control]),
        "the_pass": percentiles(times),
        "longest_pass_before_us": round(max(settling) * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=200, help="outputs per size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as directory,
        engine(Path(directory)) as (scheduler, worker),
        another_engine(Path(directory)) as other,
    ):
        report: dict[str, Any] = {
            "save_caches": {
                str(size): time_saves(worker, size, options.saves) for size in SIZES_BYTES
            },
            **time_gate(scheduler, worker),
            "queues": time_queues(scheduler, worker, other),
            "counters": worker.counters.totals(),
        }
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
