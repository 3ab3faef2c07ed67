"""Background copies by a device, on a real node.

`LazyDevice` copies nothing until the test calls `run`, like a busy GPU; the code around it is the
one that runs on a GPU. The last test uses a real GPU where there is one.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from connectors.counters import Counters, RateLimitedLog
from connectors.ec.copies import Device, DeviceCopies, Event
from connectors.ec.metadata import ItemLoad, StepMetadata
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.settings import ConnectorSettings
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.client.handles import LoadOrder
from nodes import NodeProcess, StartNode, at_rest, key, wait_until
from patience import scaled

ROWS = 4
SHORT_SECONDS = 0.2
MakeWorker = Callable[..., EcWorker]


class LazyEvent:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.fault: Exception | None = None

    def synchronize(self) -> None:
        assert self.reached.wait(10.0)
        if self.fault is not None:
            raise self.fault


class LazyStream:
    """Runs its queue in order when `run` is called."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self.fault: Exception | None = None

    def enqueue(self, what: Callable[[], object]) -> None:
        self._queue.append(what)

    def event(self) -> LazyEvent:
        event = LazyEvent()
        event.fault = self.fault
        self.enqueue(event.reached.set)
        if not self._queue[:-1]:
            self.run()  # the queue was empty
        return event

    def run(self) -> None:
        queued, self._queue = self._queue, []
        for what in queued:
            what()


class LazyDevice(Device):
    def __init__(self, _name: str = "") -> None:
        self.model, self.loads = LazyStream(), LazyStream()
        self.pinned: list[memoryview] = []
        self.can_pin = True
        self.refusals = 0
        """Number of uploads that still fail for lack of memory."""

    def pin(self, memory: memoryview) -> bool:
        if self.can_pin:
            self.pinned.append(memory)
        return self.can_pin

    def unpin(self, memory: memoryview) -> None:
        self.pinned.remove(memory)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        if self.refusals > 0:
            self.refusals -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB.")
        tensor = torch.full_like(source, torch.nan)
        self.loads.enqueue(lambda: tensor.copy_(source))
        return tensor

    def uploaded(self) -> Event:
        return self.loads.event()

    def mark(self) -> Event:
        return self.model.event()

    def download(self, tensor: torch.Tensor, after: Event) -> torch.Tensor:
        after.synchronize()
        return tensor.clone()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    """The device of all workers that the test makes."""
    device = LazyDevice()
    monkeypatch.setattr("connectors.ec.cuda.CudaDevice", lambda name: device)
    return device


@pytest.fixture
def make_worker(device: LazyDevice) -> Iterator[MakeWorker]:
    with ExitStack() as stack:

        def make(node: NodeProcess, **settings: Any) -> EcWorker:
            worker = EcWorker(
                lambda: node.client(engine=EngineRank("engine", 0, 1)),
                ConnectorSettings(capacity_bytes=1 << 26, **settings),
                WorkerSeat(0, True, "cuda:0"),
            )
            worker.start()
            stack.callback(worker.close)
            return worker

        yield make
        device.loads.run()
        device.model.run()


@pytest.fixture
def scheduler(node_pair: tuple[NodeProcess, NodeProcess]) -> Iterator[LookupBuffer]:
    with node_pair[0].client(engine=EngineRank("engine", None, 1)) as buffer:
        yield buffer


@pytest.fixture
def node(node_pair: tuple[NodeProcess, NodeProcess]) -> NodeProcess:
    return node_pair[0]


@pytest.fixture
def rank(node: NodeProcess) -> Iterator[LookupBuffer]:
    """The client of a worker. Nothing can be promised unless one is attached."""
    with node.client(engine=EngineRank("engine", 0, 1)) as buffer:
        yield buffer


def promised(buffer: LookupBuffer) -> tuple[torch.Tensor, LoadOrder]:
    """A tensor, and its bytes pinned in the arena."""
    name, tensor = key(), torch.randn(ROWS, 64)
    buffer.insert(name, tensor)
    (handle,) = buffer.prefetch([name], timeout=5.0)
    assert handle.order is not None
    return tensor, handle.order


def step(*orders: LoadOrder | None) -> StepMetadata:
    return StepMetadata([ItemLoad(f"{number}", ROWS, one) for number, one in enumerate(orders)])


def test_a_pin_is_held_until_the_device_has_copied(
    node: NodeProcess, scheduler: LookupBuffer, device: LazyDevice, make_worker: MakeWorker
) -> None:
    worker, cache = make_worker(node), dict[str, torch.Tensor]()
    (first, one), (second, two) = promised(scheduler), promised(scheduler)
    worker.load(cache, step(one, two))
    time.sleep(SHORT_SECONDS)
    assert node.stats()["pins"] == 2
    assert cache["0"].isnan().all(), "the copy is only enqueued"
    device.loads.run()
    assert torch.equal(cache["0"], first)
    assert torch.equal(cache["1"], second)
    at_rest(node)
    third, three = promised(scheduler)
    worker.load(cache, step(three))
    assert torch.equal(cache["0"], first), "a cached item is not overwritten"
    at_rest(node)
    del third


@pytest.mark.parametrize("refusals", [1, 3, 10**9])
def test_a_load_is_retried_while_the_device_has_no_memory(
    refusals: int,
    node: NodeProcess,
    scheduler: LookupBuffer,
    device: LazyDevice,
    make_worker: MakeWorker,
) -> None:
    worker, cache = make_worker(node), dict[str, torch.Tensor]()
    (first, one), (second, two) = promised(scheduler), promised(scheduler)
    device.refusals = refusals
    worker.load(cache, step(one, two))
    device.loads.run()
    is_lost = refusals == 10**9
    assert worker.counters.totals() == (
        {"load_late": 2, "load_lost": 2} if is_lost else {"load_late": 1}
    )
    expected = {} if is_lost else {"0": first, "1": second}  # vLLM reports what is missing
    assert cache.keys() == expected.keys()
    assert all(torch.equal(cache[name], tensor) for name, tensor in expected.items())
    at_rest(node)
    device.refusals = 0
    third, three = promised(scheduler)
    worker.load(cache, StepMetadata([ItemLoad("3", ROWS, three)]))
    device.loads.run()
    assert torch.equal(cache["3"], third)
    at_rest(node)


def test_the_arena_of_a_dead_node_stays_mapped_until_the_copy_ends(
    start_node: StartNode, device: LazyDevice, make_worker: MakeWorker
) -> None:
    node = start_node()
    worker, cache = make_worker(node), dict[str, torch.Tensor]()
    with node.client(engine=EngineRank("engine", None, 1)) as scheduler:
        tensor, order = promised(scheduler)
        worker.load(cache, step(order))
        node.kill()
    assert worker._buffer is not None
    worker._buffer.close()
    device.loads.run()
    assert torch.equal(cache["0"], tensor)


def test_the_arena_is_pinned_once_for_each_start_of_the_node(
    start_node: StartNode, device: LazyDevice, make_worker: MakeWorker
) -> None:
    node = start_node()
    worker = make_worker(node)
    assert worker._buffer is not None
    for is_restarted in (False, True):
        if is_restarted:
            node.kill()
            wait_until(lambda: not worker._buffer.attached, 5.0)  # type: ignore[union-attr]
            node.start()
            wait_until(lambda: worker._buffer.attached, 5.0)  # type: ignore[union-attr]
        with node.client(engine=EngineRank("engine", None, 1)) as scheduler:
            for _ in range(3):
                cache: dict[str, torch.Tensor] = {}
                tensor, order = promised(scheduler)
                worker.load(cache, step(order))
                device.loads.run()
                assert torch.equal(cache["0"], tensor)
        wait_until(lambda: len(device.pinned) == 1, 5.0)
        assert device.pinned[0].nbytes == node.config.capacity_bytes
    worker.close()
    assert device.pinned == []


def test_an_arena_that_cannot_be_pinned_is_counted_and_still_used(
    node: NodeProcess,
    scheduler: LookupBuffer,
    device: LazyDevice,
    make_worker: MakeWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device.can_pin = False
    worker = make_worker(node)
    for _ in range(3):
        cache: dict[str, torch.Tensor] = {}
        tensor, order = promised(scheduler)
        worker.load(cache, step(order))
        device.loads.run()
        assert torch.equal(cache["0"], tensor)
    at_rest(node)
    assert worker.counters.totals() == {"arena_not_pinned": 1}
    assert len([one for one in caplog.records if "pinned" in one.getMessage()]) == 1


def test_an_item_found_by_its_key_is_copied_by_the_device_too(
    node: NodeProcess, scheduler: LookupBuffer, device: LazyDevice, make_worker: MakeWorker
) -> None:
    worker, cache = make_worker(node), dict[str, torch.Tensor]()
    name, tensor = key(), torch.randn(ROWS, 64)
    scheduler.insert(name, tensor)
    worker.load(cache, StepMetadata([ItemLoad("0", ROWS, None, name.text)]))
    device.loads.run()
    assert torch.equal(cache["0"], tensor)


def test_an_output_is_stored_after_the_model_has_computed_it(
    node: NodeProcess, scheduler: LookupBuffer, device: LazyDevice, make_worker: MakeWorker
) -> None:
    worker, name = make_worker(node), key()
    output, encoded = torch.zeros(ROWS, 64), torch.randn(ROWS, 64)
    device.model.enqueue(lambda: output.copy_(encoded))
    cache = {"A": output}
    started = time.monotonic()
    worker.save(cache, "A", StepMetadata(saves={"A": name.text}))
    assert time.monotonic() - started < scaled(SHORT_SECONDS)
    cache.clear()  # vLLM drops it
    time.sleep(SHORT_SECONDS)
    assert scheduler.has_caches([name]) == [False]
    device.model.run()
    assert worker.saves is not None
    assert worker.saves.drain(5.0)
    assert torch.equal(scheduler.select(name, timeout=1.0), encoded)  # type: ignore[arg-type]


def test_close_waits_for_the_device_up_to_its_timeout(
    node: NodeProcess, rank: LookupBuffer, scheduler: LookupBuffer, device: LazyDevice
) -> None:
    copies = DeviceCopies(rank, device, Counters(), RateLimitedLog())
    _, order = promised(scheduler)
    copies.load(order)
    copies.done([order])
    started = time.monotonic()
    copies.close(SHORT_SECONDS)
    assert SHORT_SECONDS <= time.monotonic() - started < scaled(SHORT_SECONDS)
    assert node.stats()["pins"] == 1, "the copy may still run"
    assert len(device.pinned) == 1, "the copy may still read the arena"
    device.loads.run()
    copies.close(5.0)
    assert device.pinned == []
    scheduler.release(order)


def test_after_a_failed_copy_the_pin_is_left_to_the_scheduler(
    node: NodeProcess, rank: LookupBuffer, scheduler: LookupBuffer, device: LazyDevice
) -> None:
    counters = Counters()
    copies = DeviceCopies(rank, device, counters, RateLimitedLog())
    wait_until(lambda: device.pinned, 5.0)
    _, order = promised(scheduler)
    device.loads.fault = RuntimeError("an illegal memory access")
    copies.load(order)
    copies.done([order])
    device.loads.run()
    wait_until(counters.totals, 5.0)
    assert counters.totals() == {"copy_failed": 1}
    assert node.stats()["pins"] == 1
    scheduler.release(order)
    device.loads.fault = None
    copies.close(5.0)
    at_rest(node)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gpu_loads_and_stores(
    node: NodeProcess, rank: LookupBuffer, scheduler: LookupBuffer
) -> None:
    from connectors.ec.cuda import CudaDevice

    counters = Counters()
    copies = DeviceCopies(rank, CudaDevice("cuda:0"), counters, RateLimitedLog())
    for _ in range(3):
        tensor, order = promised(scheduler)
        loaded = copies.load(order)
        assert loaded is not None
        twice = loaded * 2  # on the model's stream
        copies.done([order])
        back = copies.to_host(copies.keep(twice))
        assert torch.equal(back, tensor * 2)
    at_rest(node)
    copies.close(5.0)
    assert counters.totals() == {}
