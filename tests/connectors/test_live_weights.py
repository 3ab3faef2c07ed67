"""Weights that change in a running engine: noticed before it, and then nothing is shared."""

import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from connector_standins import EMBED_BYTES, WAIT_SECONDS, Bench, LedgerBuffer, make_request
from connectors.client import SchedulerClient
from connectors.ec.metadata import StepMetadata
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.worker import EcWorker, WorkerSeat
from connectors.namespace import Identity, NamespaceTask
from connectors.settings import ConnectorSettings
from connectors.weights import WeightsFlag, WeightsSource, WeightsWatch, _path
from lookup_buffer.client.handles import PrefetchState
from nodes import ROOT

Weights = Iterable[tuple[str, torch.Tensor]]


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def load_weights(self, weights: Weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)  # as vLLM does it; torch counts no change then


class Model(torch.nn.Module):
    """Built and loaded as vLLM's are."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Part()
        self.language_model = Part()
        self.on_load: Any = lambda: None

    def embed_multimodal(self) -> None:
        raise NotImplementedError

    def load_weights(self, weights: Weights) -> None:
        self.on_load()
        self.vision_tower.load_weights(weights)


class Draft(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Part()

    def load_weights(self, weights: Weights) -> None:
        self.layer.load_weights(weights)


@pytest.fixture
def engine_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def watch(engine_id: str) -> Iterator[WeightsWatch]:
    watch = WeightsWatch(engine_id)
    watch.create_flag()
    yield watch
    watch.close()


@pytest.fixture
def model(watch: WeightsWatch) -> Model:
    """As it is when vLLM has loaded it."""
    model = Model()
    model.load_weights([("w", torch.ones(3))])
    return model


def test_a_reload_is_known_before_the_first_tensor_changes(
    watch: WeightsWatch, model: Model, engine_id: str
) -> None:
    draft = Draft()
    watch.start()
    flag = WeightsFlag.adopt(engine_id)
    draft.load_weights([("w", torch.ones(3))])  # encodes nothing
    assert not flag.is_set()
    assert not watch.changed()
    seen: list[tuple[bool, float]] = []
    model.on_load = lambda: seen.append((flag.is_set(), float(model.vision_tower.weight[0])))
    model.load_weights([("w", torch.zeros(3))])
    assert seen == [(True, 1.0)]
    assert watch.changed()
    assert float(model.vision_tower.weight[0]) == 0.0


def test_a_replaced_load_weights_is_called(
    watch: WeightsWatch, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model's class, after it was loaded, or in the model itself, before."""
    called: list[str] = []
    inner = Model()
    monkeypatch.setattr(inner, "load_weights", lambda weights: called.append("model"))
    watch.start()
    monkeypatch.setattr(Model, "load_weights", lambda self, weights: called.append("class"))
    for one in (model, inner):
        one.load_weights([])
    assert called == ["class", "model"]
    assert watch.changed()


def test_a_write_into_the_encoders_weights_is_detected_in_the_next_step(
    watch: WeightsWatch, model: Model, engine_id: str
) -> None:
    watch.start()
    flag = WeightsFlag.adopt(engine_id)
    model.language_model.weight.add_(1.0)  # experts move, for one
    assert not watch.changed()
    model.vision_tower.weight.copy_(torch.zeros(3))
    assert watch.changed()
    assert flag.is_set()


def test_a_model_that_is_there_already_is_found(watch: WeightsWatch, engine_id: str) -> None:
    """The KV connector is made after the model; another watch may have found it before."""
    model = Model()
    watch.start()
    for change in (lambda: model.load_weights([]), lambda: model.language_model.weight.add_(1.0)):
        late = WeightsWatch(f"{engine_id}-kv", names=())
        late.create_flag()
        late.find_models()
        late.start()
        assert not late.changed()
        change()
        assert late.changed()
        late.close()


def test_a_reload_is_detected_without_a_report_of_the_first_load(
    watch: WeightsWatch, model: Model
) -> None:
    assert not watch.changed()
    model.load_weights([])
    assert watch.changed()


def test_an_adapter_that_replaces_another_is_a_change(
    engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own manager. Requests that wait have the old one, and run with the new one."""
    changed: list[bool] = []

    def load(_: object, request: LoRARequest) -> None:
        changed.append(replaced.changed())

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    replaced: WeightsWatch = WeightsWatch(engine_id, names=(), adapters=True)
    replaced.create_flag()
    manager = object.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = SimpleNamespace(list_adapters=lambda: {1: None})
    with closing(replaced), suppress(AttributeError):
        manager.add_adapter(LoRARequest("other", 2, "folder"))
    assert changed == [False]
    with suppress(AttributeError):  # what is loaded is none
        manager.add_adapter(LoRARequest("cats", 1, "folder", load_inplace=True))
    assert changed == [False, False]
    assert replaced.changed(), "once it is loaded"


def test_so_is_one_whose_number_was_evicted(
    engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for the old one runs with it."""
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda *_: None)
    replaced = WeightsWatch(engine_id, names=(), adapters=True)
    manager = object.__new__(LRUCacheWorkerLoRAManager)
    manager._adapter_manager = SimpleNamespace(list_adapters=dict)
    with closing(replaced), suppress(AttributeError):
        manager.add_adapter(LoRARequest("cats", 1, "folder", load_inplace=True))
    assert replaced.changed()


def test_the_flag_leaves_nothing_behind(engine_id: str) -> None:
    path = _path(engine_id)
    made = WeightsFlag.create(engine_id)
    assert path.parent == Path("/dev/shm")
    assert path.exists()
    again = WeightsFlag.create(engine_id)  # the worker was killed and started again
    adopted = WeightsFlag.adopt(engine_id)
    assert not path.exists()
    made.set()
    assert not adopted.is_set(), "it was of an engine that is gone"
    again.set()
    assert adopted.is_set()
    again.close()
    with pytest.raises(OSError, match="No such file"):
        WeightsFlag.adopt(engine_id)
    WeightsFlag.create(engine_id).close()
    assert not path.exists()


def bench_with(flag: WeightsFlag, *, consumer: bool = True) -> Bench:
    bench = Bench(consumer=consumer)
    naming = NamespaceTask(Identity({}, WeightsSource("tests")))
    buffer: Any = SchedulerClient(bench.buffer, naming, flag)  # type: ignore[arg-type]
    bench.scheduler = EcScheduler(
        buffer,
        ConnectorSettings(
            fetch_wait_seconds=WAIT_SECONDS, idle_wait_seconds=0, capacity_bytes=1 << 26
        ),
        EngineShape(True, consumer, 2, EMBED_BYTES),
        metadata_fields=lambda _: set(),
        clock=bench.clock,
    )
    return bench


@pytest.fixture
def flag(engine_id: str) -> WeightsFlag:
    WeightsFlag.create(engine_id)
    return WeightsFlag.adopt(engine_id)


def test_it_has_every_method_of_the_client_that_the_scheduler_side_calls() -> None:
    """Types cannot show this, since it is a stand-in for the client."""
    modules = ("claims", "fetching", "items", "locating", "scheduler", "without_gate")
    sources = [(ROOT / "connectors/ec" / f"{name}.py").read_text() for name in modules]
    used = {name for source in sources for name in re.findall(r"self\._buffer\.(\w+)", source)}
    assert {"prefetch", "release", "close"} < used
    assert used <= vars(SchedulerClient).keys()


def test_after_a_reload_no_item_is_promised(flag: WeightsFlag) -> None:
    bench = bench_with(flag)
    bench.store("A")
    bench.store("B", needs_fetch=True)
    pinned, waiting = make_request("pinned", "A"), make_request("waiting", "B")
    assert bench.ensure(pinned)
    assert not bench.ensure(waiting)
    bench.build(0)
    flag.set()
    assert not bench.scheduler.has_cache_item("A")
    bench.buffer.settle(0, PrefetchState.RESIDENT)
    assert bench.ensure(waiting)
    anew = make_request("anew", "A")
    assert bench.ensure(anew)
    for request in (pinned, waiting, anew):
        assert not bench.allocate(request)
        bench.scheduler.gate.forget(request.request_id)
    for _ in range(3):
        assert bench.build().mm_datas == []
    assert bench.buffer.pinned == {}
    assert bench.scheduler.pins.held_bytes == 0
    assert bench.buffer.fleet.encoding == [], (
        "no other engine waits for an item that will not be stored"
    )
    assert bench.scheduler.counters.totals()["miss:weights_changed"] == 2, "waiting and anew"


def test_a_request_without_media_fails_alone(flag: WeightsFlag) -> None:
    bench = bench_with(flag)
    bench.store("A")
    flag.set()
    request = make_request("r", "A", metadata_only=True)
    for _ in range(3):
        assert not bench.ensure(request)
        bench.clock.now += WAIT_SECONDS / 2
    (why,) = bench.scheduler.gate.take_unavailable_requests().values()
    assert why.reason == "weights_changed"


def test_a_producer_encodes_items_that_are_stored_already(flag: WeightsFlag) -> None:
    bench = bench_with(flag, consumer=False)
    bench.store("A")
    before, after = make_request("before", "A"), make_request("after", "A")
    assert bench.ensure(before)
    assert bench.allocate(before)
    bench.build()
    bench.scheduler.gate.forget("before")
    flag.set()
    assert bench.ensure(after)
    assert not bench.allocate(after)


def test_a_worker_stores_no_output_of_other_weights(watch: WeightsWatch, model: Model) -> None:
    buffer: Any = LedgerBuffer()
    settings = ConnectorSettings(capacity_bytes=1 << 24)
    worker = EcWorker(lambda: buffer, settings, WorkerSeat(0, is_producer=True), weights=watch)
    worker.start()
    worker.model_loaded()
    model.load_weights([])
    worker.save({"A": torch.zeros(4, 2)}, "A", StepMetadata(saves={"A": "A"}))
    assert worker.saves is not None
    assert worker.saves.drain(5.0)
    worker.close()
    assert worker.counters.totals() == {"save_skipped:weights_changed": 1}
    assert buffer.fleet.given_back == ["A"]


class Experts(Part):
    """A layer of four experts, from which vLLM may request its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4), requires_grad=False)

    def get_expert_weights(self) -> list[torch.Tensor]:
        return [self.weight.view(4, -1)]


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = Experts()


class Alone:
    """A stand-in for a process group of one, and its communicator."""

    needs_profile_buffer_reservation = False

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def balance(experts: Any) -> None:
    """As vLLM does it, in place."""
    rebalance = pytest.importorskip("vllm.distributed.eplb.rebalance_execute")
    weights = experts.get_expert_weights()
    rebalance.rearrange_expert_weights_inplace(
        torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([[1, 0, 3, 2]]),
        [weights],
        [torch.empty_like(weight) for weight in weights],
        Alone(),
        Alone(),
    )
    assert not torch.equal(experts.weight, torch.eye(4))


@pytest.mark.parametrize("is_balanced", [True, False], ids=["enable_eplb", "by another caller"])
def test_experts_that_vllm_moves_are_no_other_weights(is_balanced: bool, engine_id: str) -> None:
    watch = WeightsWatch(engine_id, names=(), experts_move=is_balanced)
    model = Mixture()
    watch.start()
    balance(model.language_model)
    assert watch.changed() is not is_balanced
    model.vision_tower.weight.add_(1.0)
    assert watch.changed()
