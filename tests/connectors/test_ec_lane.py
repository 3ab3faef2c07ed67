"""The workers' device pools: which workers have one, and what the scheduler gets from them.

Workers and scheduler run in this process on one node; the producer is a process on another node.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from connectors.ec.lane import WorkerDeviceLane, validate_device_lane
from connectors.ec.metadata import ItemLoad, StepMetadata
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.settings import parse_settings
from device_ends import DeviceEnd, StartEnd, put, start_end
from lookup_buffer.access import user_token
from lookup_buffer.client.buffer import EngineRank, LookupBuffer
from lookup_buffer.client.handles import PrefetchHandle
from lookup_buffer.errors import ConfigError
from lookup_buffer.key import TensorKey
from nodes import NodeProcess, StartNode, at_rest, start_node, wait_until, with_store

__all__ = ["start_end", "start_node"]
SETTINGS = {"device_lane": "gloo", "device_pool_bytes": "16MiB"}
ROWS, WIDTH = 64, 1024


def test_a_lane_with_tensor_parallelism_is_refused_unless_it_is_forced() -> None:
    validate_device_lane(parse_settings({}), ranks=8)
    validate_device_lane(parse_settings(SETTINGS), ranks=1)
    validate_device_lane(parse_settings({**SETTINGS, "device_lane_forced": True}), ranks=2)
    with pytest.raises(ConfigError, match="beside 2 tensor parallel ranks"):
        validate_device_lane(parse_settings(SETTINGS), ranks=2)


def test_a_lane_that_the_device_does_not_support_is_refused() -> None:
    settings = parse_settings({**SETTINGS, "device_lane": "nccl"})
    with pytest.raises(ConfigError, match="an nccl lane connects GPUs, not cpu: choose gloo"):
        WorkerDeviceLane(settings, "cpu")


class Engine:
    """Two workers that both load, and the scheduler's client."""

    def __init__(self, node: NodeProcess, namespace: str, stack: ExitStack) -> None:
        self.node = node
        settings = parse_settings(SETTINGS)

        def client(rank: int | None) -> LookupBuffer:
            return node.client(namespace, engine=EngineRank("engine", rank, 2))

        self.workers = [
            EcWorker(
                lambda rank=rank: client(rank),  # type: ignore[misc]
                settings,
                WorkerSeat(rank, is_producer=True),
                make_lane=lambda: WorkerDeviceLane(settings, "cpu"),
            )
            for rank in (0, 1)
        ]
        for worker in self.workers:
            worker.start()
            stack.callback(worker.close)
        self.scheduler = stack.enter_context(client(None))

    def prefetch(self, name: str) -> PrefetchHandle:
        (handle,) = self.scheduler.prefetch([TensorKey(name)], timeout=20.0)
        return handle

    def load(self, name: str, handle: PrefetchHandle) -> list[torch.Tensor]:
        """Load the item on each worker, and return what each puts into vLLM's encoder cache."""
        loaded = []
        for worker in self.workers:
            cache: dict[str, torch.Tensor] = {}
            metadata = StepMetadata([ItemLoad(name, ROWS, handle.order, name)])
            worker.load(cache, metadata)
            loaded.append(cache[name])
        return loaded

    def tickets(self) -> int:
        lanes = [worker._lane for worker in self.workers]
        return sum(lane._lane.gauges().tickets for lane in lanes if lane is not None)


@pytest.fixture
def engine(
    start_end: StartEnd, start_node: StartNode, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    node = start_node()
    with_store(node)
    with ExitStack() as stack:
        yield Engine(node, request.node.name[:80], stack)
    at_rest(node)


def by_lane(engine: Engine, producer: DeviceEnd) -> tuple[str, torch.Tensor, PrefetchHandle]:
    """The first item that arrived in both workers' pools."""
    got: list[tuple[str, torch.Tensor, PrefetchHandle]] = []

    def comes() -> bool:
        name = f"item-{engine.node.stats().get('hits_remote', 0)}-{torch.rand(1).item()}"
        seed = abs(hash(name)) % 1000
        value = f"torch.full(({ROWS}, {WIDTH}), float({seed}))"
        put(producer, name, value)
        handle = engine.prefetch(name)
        assert handle.order is not None, handle
        expected = torch.full((ROWS, WIDTH), float(seed))
        assert all(torch.equal(one, expected) for one in engine.load(name, handle))
        if handle.order.lane:
            got.append((name, expected, handle))
            return True
        engine.scheduler.release(handle)
        return False

    wait_until(comes, 40.0, f"a lane: {engine.node.stats()}")
    return got[0]


def test_an_item_is_promised_when_every_worker_has_it(engine: Engine, start_end: StartEnd) -> None:
    producer = start_end(token=user_token())
    name, _, handle = by_lane(engine, producer)
    assert handle.order is not None
    assert (handle.order.lane, handle.source) == ("gloo", producer.node.node_id)
    assert engine.node.stats()["lane_received_gloo"] >= 2
    wait_until(lambda: engine.tickets() == 0, 10.0)  # both have released it
    again = engine.prefetch(name)  # from their pools
    wait_until(lambda: engine.tickets() == 2, 10.0)
    engine.scheduler.release(again)
    wait_until(lambda: engine.tickets() == 0, 10.0)
    engine.prefetch(name)
    engine.scheduler.close()
    wait_until(lambda: engine.tickets() == 0, 10.0)


def test_an_item_that_a_pool_lost_after_its_promise_is_loaded_from_the_node(
    engine: Engine, start_end: StartEnd
) -> None:
    name, expected, _ = by_lane(engine, start_end(token=user_token()))
    handle = engine.prefetch(name)
    assert handle.order is not None
    assert handle.order.lane
    for worker in engine.workers:
        assert worker._lane is not None
        worker._lane._lane.pool.release([handle.order.ticket])
    assert all(torch.equal(one, expected) for one in engine.load(name, handle))
    assert all(worker.counters.take()["load_late"] >= 1 for worker in engine.workers)


def test_an_output_that_a_worker_stores_is_offered_from_its_pool(
    engine: Engine, start_end: StartEnd
) -> None:
    reader = start_end(token=user_token())
    worker = engine.workers[0]
    output = torch.rand(ROWS, WIDTH)

    def comes() -> bool:
        name = f"saved-{torch.rand(1).item()}"
        metadata = StepMetadata(saves={name: name})
        worker.save({name: output}, name, metadata)
        assert worker.saves is not None
        assert worker.saves.drain(10.0)
        wait_until(lambda: not engine.node.stats()["unpublished"], 10.0)
        found = reader.do(f"buffer.select(TensorKey({name!r}), timeout=5.0).tolist()")
        assert torch.equal(torch.tensor(found), output)
        return reader.counted("lane_received_gloo") > 0

    wait_until(comes, 40.0)
