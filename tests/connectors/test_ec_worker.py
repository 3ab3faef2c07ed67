"""The worker side and its save queue, with torch tensors and a buffer in memory."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from connectors.counters import Counters, RateLimitedLog
from connectors.ec.metadata import ItemLoad, StepMetadata
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.save_queue import SaveQueue
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.errors import BufferFull, MissingTensor, NodeUnavailable, TensorTooLarge
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import InsertOutcome
from nodes import ROOT, NodeProcess, StartNode, key
from patience import scaled

ROWS = 4
OUTCOME_SECONDS = 60.0


class MemoryBuffer:
    """The methods of the client that a worker uses."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.arena: dict[int, torch.Tensor] = {}
        self.finished: list[int] = []
        self.faults: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inserting_on: set[int] = set()
        self.is_closed = False
        self.given_back: list[str] = []

    def order(self, tensor: torch.Tensor) -> LoadOrder:
        ticket = len(self.arena) + 1
        self.arena[ticket] = tensor
        header = TensorHeader("float32", tuple(tensor.shape), tensor.nbytes)
        return LoadOrder("b" * 16, ticket, 0, tensor.nbytes, 1, header)

    def load(self, order: LoadOrder) -> torch.Tensor:
        if self.faults:
            raise self.faults.pop(0)
        return self.arena[order.ticket].clone()

    def select(self, key: TensorKey, *, timeout: float) -> torch.Tensor:
        if key.mm_hash not in self.tensors:
            raise MissingTensor(key.text)
        return self.tensors[key.mm_hash].clone()

    def done(self, orders: Sequence[LoadOrder]) -> None:
        self.finished += [order.ticket for order in orders]

    def insert(
        self, key: TensorKey, tensor: torch.Tensor, *, ttl_seconds: float | None, timeout: float
    ) -> InsertOutcome:
        self.gate.wait(60)
        self.inserting_on.add(len(os.sched_getaffinity(0)))
        if self.faults:
            raise self.faults.pop(0)
        if key.mm_hash in self.tensors:
            return InsertOutcome.EXISTS
        self.tensors[key.mm_hash] = tensor.clone()
        return InsertOutcome.STORED

    def unclaim(self, keys: Sequence[TensorKey]) -> None:
        self.given_back += [key.text for key in keys]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def buffer() -> MemoryBuffer:
    return MemoryBuffer()


@pytest.fixture
def make_worker(buffer: MemoryBuffer) -> Iterator[Callable[..., EcWorker]]:
    workers: list[EcWorker] = []

    def make(*, rank: int = 0, is_producer: bool = True, **settings: Any) -> EcWorker:
        client: Any = buffer
        worker = EcWorker(
            lambda: client,
            ConnectorSettings(capacity_bytes=1 << 24, **settings),
            WorkerSeat(rank=rank, is_producer=is_producer),
        )
        worker.start()
        workers.append(worker)
        return worker

    yield make
    buffer.gate.set()
    for worker in workers:
        worker.close()


def item(identifier: str, order: LoadOrder | None) -> StepMetadata:
    return StepMetadata([ItemLoad(identifier, ROWS, order)])


def drained(worker: EcWorker) -> EcWorker:
    assert worker.saves is not None
    assert worker.saves.drain(5)
    return worker


def test_a_load_copies_the_bytes_and_releases_the_pin(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    tensor = torch.randn(ROWS, 8)
    order = buffer.order(tensor)
    cache: dict[str, torch.Tensor] = {}
    make_worker().load(cache, item("A", order))
    assert torch.equal(cache["A"], tensor)
    assert buffer.finished == [order.ticket]


def test_a_load_keeps_a_cached_item_and_releases_the_pin(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    mine = torch.zeros(ROWS, 8)
    cache = {"A": mine}
    order = buffer.order(torch.ones(ROWS, 8))
    make_worker().load(cache, item("A", order))
    assert cache["A"] is mine
    assert buffer.finished == [order.ticket]


def test_an_item_with_too_few_rows_is_loaded_as_zeros(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    cache: dict[str, torch.Tensor] = {}
    worker = make_worker()
    worker.load(cache, item("A", buffer.order(torch.ones(ROWS - 1, 8))))
    assert torch.equal(cache["A"], torch.zeros(ROWS, 8)), "as many rows as the model expects"
    assert worker.counters.totals() == {"load_misfit": 1}


def test_a_load_is_retried_until_the_rank_is_attached(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    tensor = torch.randn(ROWS, 8)
    buffer.faults = [NodeUnavailable("not mapped yet") for _ in range(3)]
    cache: dict[str, torch.Tensor] = {}
    worker = make_worker()
    worker.load(cache, item("A", buffer.order(tensor)))
    assert torch.equal(cache["A"], tensor)
    assert worker.counters.totals() == {"load_late": 1}


@pytest.mark.parametrize("order", [None, LoadOrder("x", 9, 0, 1, 1, TensorHeader("", (), 0))])
def test_an_item_whose_order_fails_is_loaded_by_its_key(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker], order: LoadOrder | None
) -> None:
    buffer.tensors["A"] = torch.randn(ROWS, 8)
    buffer.faults = [NodeUnavailable("gone")] * 1000 if order is not None else []
    cache: dict[str, torch.Tensor] = {}
    make_worker(is_producer=False).load(cache, item("A", order))
    assert torch.equal(cache["A"], buffer.tensors["A"])


@pytest.mark.parametrize(
    "other",
    [torch.zeros(ROWS, 16), torch.zeros(ROWS, 4), torch.zeros(ROWS, 8, dtype=torch.int32)],
    ids=["wider", "narrower", "another dtype"],
)
def test_a_tensor_that_was_not_promised_is_not_loaded_by_its_key(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker], other: torch.Tensor
) -> None:
    buffer.tensors["A"] = other
    order = buffer.order(torch.ones(ROWS, 8))
    buffer.faults = [NodeUnavailable("gone") for _ in range(3)]
    cache: dict[str, torch.Tensor] = {}
    make_worker(is_producer=False).load(cache, item("A", order))
    assert torch.equal(cache["A"], torch.ones(ROWS, 8))


def test_lost_item_is_counted_and_does_not_raise(buffer: MemoryBuffer) -> None:
    client: Any = buffer
    ticks = iter(range(1000))
    settings = ConnectorSettings(capacity_bytes=1 << 24)
    worker = EcWorker(
        lambda: client, settings, WorkerSeat(0, False), clock=lambda: float(next(ticks))
    )
    worker.start()
    cache: dict[str, torch.Tensor] = {}
    worker.load(cache, item("A", None))
    assert cache == {}
    assert worker.counters.totals() == {"load_late": 1, "load_lost": 1}


def test_only_items_that_the_scheduler_named_are_saved(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    cache = {"A%": torch.randn(ROWS, 8), "B": torch.randn(ROWS, 8)}
    worker = make_worker()
    metadata = StepMetadata(saves={"A%": "A%25"})
    for identifier in cache:
        worker.save(cache, identifier, metadata)
    drained(worker)
    assert buffer.tensors.keys() == {"A%"}
    assert torch.equal(buffer.tensors["A%"], cache["A%"])
    worker.save(cache, "A%", metadata)
    assert drained(worker).counters.totals() == {"saved": 1, "save_exists": 1}


def test_a_lost_item_is_stored_again_if_vllm_still_has_it(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    held = torch.rand(ROWS, 8)
    lost = StepMetadata(lost={"A": "A", "dropped": "dropped"})
    make_worker(is_producer=False).save_again({"A": held}, lost)
    assert buffer.tensors == {}
    worker = make_worker()
    for _ in range(2):
        worker.save_again({"A": held, "B": held}, lost)
    drained(worker)
    assert buffer.tensors.keys() == {"A"}
    assert torch.equal(buffer.tensors["A"], held)
    assert worker.counters.totals() == {"saved": 1, "save_exists": 1}


@pytest.mark.parametrize("end", [NodeProcess.kill, NodeProcess.terminate])
def test_an_output_waits_for_a_node_that_is_being_replaced(
    start_node: StartNode, end: Callable[[NodeProcess], Any]
) -> None:
    node = start_node()
    seat = WorkerSeat(rank=0, is_producer=True)
    worker = EcWorker(node.client, ConnectorSettings(capacity_bytes=1 << 24), seat)
    worker.start()
    try:
        end(node)
        output = torch.rand(ROWS, 8)
        worker.save({"A": output}, "A", StepMetadata(saves={"A": "A"}))
        node.start()
        assert worker.saves is not None
        assert worker.saves.drain(OUTCOME_SECONDS)
        with node.client() as client:
            stored = client.select(TensorKey("A"))
            assert stored is not None
            assert torch.equal(stored, output)
        assert worker.counters.totals() == {"saved": 1}
    finally:
        worker.close()


@pytest.mark.parametrize(("rank", "is_producer"), [(1, True), (0, False)])
def test_only_rank_0_of_a_producer_saves(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker], rank: int, is_producer: bool
) -> None:
    worker = make_worker(rank=rank, is_producer=is_producer)
    worker.save({"A": torch.ones(ROWS, 8)}, "A", StepMetadata(saves={"A": "A"}))
    worker.close()
    assert buffer.tensors == {}


def test_save_does_not_wait_for_the_buffer_and_a_full_queue_is_a_counted_skip(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    worker = make_worker(save_queue_items=2)
    buffer.gate.clear()
    saves = {name: name for name in "ABCD"}
    cache = {name: torch.ones(ROWS, 8) for name in saves}
    started = time.monotonic()
    for name in saves:
        worker.save(cache, name, StepMetadata(saves=saves))
    assert time.monotonic() - started < scaled(0.5)
    buffer.gate.set()
    drained(worker)
    assert buffer.tensors.keys() == {"A", "B"}
    assert worker.counters.totals() == {"saved": 2, "save_skipped:queue_full": 2}
    assert buffer.given_back == ["C", "D"], "others do not wait for what is not stored"


def test_one_output_above_the_queues_bytes_is_still_accepted(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    worker = make_worker(save_queue_bytes=1)
    worker.save({"A": torch.ones(ROWS, 8)}, "A", StepMetadata(saves={"A": "A"}))
    assert drained(worker).counters.totals() == {"saved": 1}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (TensorTooLarge("64 MiB into 1"), "too_large"),
        (BufferFull("all pinned"), "buffer_full"),
        (NodeUnavailable("killed"), "node"),
        (RuntimeError("a bug of ours"), "internal"),
    ],
)
def test_fault_of_the_buffer_is_a_counted_skip_and_the_next_save_works(
    buffer: MemoryBuffer,
    make_worker: Callable[..., EcWorker],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    reason: str,
) -> None:
    monkeypatch.setattr("connectors.ec.worker.NODE_WAIT_SECONDS", 0.0)
    buffer.faults = [fault, fault]
    worker = make_worker()
    saves = {name: name for name in "ABC"}
    for name in saves:
        worker.save({name: torch.ones(ROWS, 8)}, name, StepMetadata(saves=saves))
    drained(worker)
    assert worker.counters.totals() == {f"save_skipped:{reason}": 2, "saved": 1}
    assert buffer.given_back == ["A", "B"]


def test_an_output_too_large_for_the_arena_is_not_offered_again(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    buffer.faults = [TensorTooLarge("64 MiB into 1")]
    worker = make_worker()
    cache = {"large": torch.ones(2 * ROWS, 8), "small": torch.ones(ROWS, 8)}
    worker.save(cache, "large", StepMetadata(saves={"large": "large"}))
    drained(worker)
    worker.save_again(cache, StepMetadata(lost={name: name for name in cache}))
    drained(worker)
    assert worker.counters.totals() == {"save_skipped:too_large": 1, "saved": 1}
    assert buffer.tensors.keys() == {"small"}


def test_the_background_thread_is_not_bound_to_the_models_core(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        worker = make_worker()
        worker.save({"A": torch.ones(ROWS, 8)}, "A", StepMetadata(saves={"A": "A"}))
        drained(worker)
        assert os.sched_getaffinity(0) == {min(allowed)}, "the model's thread stays bound"
    finally:
        os.sched_setaffinity(0, allowed)
    assert buffer.inserting_on == {len(allowed)}


def test_close_stores_queued_outputs(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    worker = make_worker()
    worker.save({"A": torch.ones(ROWS, 8)}, "A", StepMetadata(saves={"A": "A"}))
    worker.close()
    worker.close()
    assert buffer.tensors.keys() == {"A"}
    assert buffer.is_closed
    worker.save({"B": torch.ones(ROWS, 8)}, "B", StepMetadata(saves={"B": "B"}))
    assert buffer.tensors.keys() == {"A"}


def test_close_is_bounded_when_the_node_hangs(
    buffer: MemoryBuffer, make_worker: Callable[..., EcWorker]
) -> None:
    worker = make_worker(drain_seconds=0.1)
    buffer.gate.clear()
    worker.save({"A": torch.ones(ROWS, 8)}, "A", StepMetadata(saves={"A": "A"}))
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < scaled(0.1)


def test_queue_keeps_no_reference_once_stored() -> None:
    import gc
    import weakref

    queue = SaveQueue(
        lambda key, tensor: True,
        lambda key: None,
        bytes_max=1 << 20,
        items_max=4,
        counters=Counters(),
        log=RateLimitedLog(),
    )
    tensor = torch.ones(8)
    reference = weakref.ref(tensor)
    queue.offer("A", tensor)
    assert queue.drain(5)
    del tensor
    gc.collect()
    assert reference() is None
    queue.close(1)


def test_warnings_are_limited_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RateLimitedLog(interval_seconds=30, clock=lambda: now[0])
    with caplog.at_level("WARNING", logger="vllm.lookup_buffer"):
        for _ in range(5):
            log.report("a", "thing %d", 1)
        log.report("b", "other")
        now[0] = 31
        log.report("a", "thing %d", 2)
    assert [record.getMessage() for record in caplog.records] == [
        "lookup buffer: thing 1",
        "lookup buffer: other",
        "lookup buffer: thing 2 (4 more since the last such line)",
    ]


def test_counters_return_what_is_new() -> None:
    counters = Counters()
    counters.add("a")
    assert counters.take() == {"a": 1}
    assert counters.take() == {}
    counters.add("a", 2)
    assert counters.take() == {"a": 2}
    assert counters.totals() == {"a": 3}


@pytest.mark.parametrize("seconds", [1.0, 3600.0], ids=["for a while", "for good"])
def test_a_load_is_retried_while_the_system_has_no_memory(
    seconds: float, start_node: StartNode
) -> None:
    """A real allocation failure, in a separate process."""
    node, rows = start_node(capacity_bytes=256 << 20), 1024
    name, tensor = key(), torch.ones(rows, 16 << 10)
    with node.client() as buffer:
        buffer.insert(name, tensor)
        config = node.config
        arguments = [config.store_url, str(config.socket_path()), str(config.capacity_bytes)]
        arguments += [name.text, str(rows), str(seconds)]
        finished = subprocess.run(
            [sys.executable, ROOT / "tests" / "support" / "starved_worker.py", *arguments],
            capture_output=True,
            text=True,
            timeout=120.0,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert finished.returncode == 0, finished.stderr
    loaded, counted = json.loads(finished.stdout.splitlines()[-1])
    if seconds < 60:
        assert (loaded, counted) == (tensor.sum().item(), {"load_late": 1})
    else:
        assert (loaded, counted) == (None, {"load_late": 1, "load_lost": 1})
