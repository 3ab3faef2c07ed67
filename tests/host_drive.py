"""Drives one vLLM release's own scheduler with our connector in it; see host_checks.

The connector's buffer is a stand-in that keeps a ledger of pins; everything between vLLM's queue
and the step's metadata is real, and so is the worker side but for the model.
"""

import hashlib
import time
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.v1.request import RequestStatus

import host_engine
from connector_standins import EMBED_BYTES, EMBEDS, LedgerBuffer, Stored
from connectors.ec import seat as ec_seat
from connectors.ec.connector import LookupBufferECConnector
from lookup_buffer.client.buffer import InsertOutcome
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.key import TensorKey

HAS_GATE = hasattr(ECConnectorBase, "ensure_cache_available")
CAN_FAIL = hasattr(ECConnectorBase, "take_unavailable_requests")
SAVED_SECONDS = 5.0


def content(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


class TensorLedger(LedgerBuffer):
    """The worker's surface too: what is stored has bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    def keep(self, identifier: str) -> None:
        self.stored[identifier] = Stored()
        self.tensors[identifier] = torch.rand(EMBEDS, EMBED_BYTES // 4)

    def load(self, order: LoadOrder) -> torch.Tensor:
        return self.tensors[self.pinned[order.ticket].key.mm_hash].clone()

    def insert(self, key: TensorKey, tensor: torch.Tensor, **_: Any) -> InsertOutcome:
        self.tensors[key.mm_hash] = tensor.clone()
        return InsertOutcome.STORED


class HostEngine:
    """One engine of this release: its scheduler, our connector on both sides."""

    def __init__(self, role: str, **extra: Any) -> None:
        self.buffer = TensorLedger()
        ec_seat.open_buffer = self._open  # type: ignore[assignment]
        config = host_engine.host_config(role, **extra)
        self.scheduler = host_engine.host_scheduler(config)
        self.connector: LookupBufferECConnector = self.scheduler.ec_connector
        self.worker = LookupBufferECConnector(config, ECConnectorRole.WORKER)
        if hasattr(ECConnectorBase, "start_worker_services"):
            self.worker.start_worker_services()
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []

    def _open(self, config: Any, settings: Any, rank: int | None) -> Any:
        ec_seat.identity(config, settings)
        return self.buffer

    def add(self, request_id: str, *names: str, **kwargs: Any) -> None:
        identifiers = [content(name) for name in names]
        self.scheduler.add_request(host_engine.host_request(request_id, *identifiers, **kwargs))

    def step(self) -> list[str]:
        """One pass and one step of a worker. Returns what the step loaded."""
        output = self.scheduler.schedule()
        metadata = output.ec_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        if hasattr(ECConnectorBase, "start_save_caches"):
            self.worker.start_save_caches(encoder_cache=self.encoder_cache)
        self.worker.start_load_caches(self.encoder_cache)
        for request_id, indices in output.scheduled_encoder_inputs.items():
            features = self.scheduler.requests[request_id].mm_features
            for identifier in (features[index].identifier for index in indices):
                self.encoder_cache[identifier] = torch.rand(EMBEDS, 2)
                self.encoded.append(identifier)
                self.worker.save_caches(encoder_cache=self.encoder_cache, mm_hash=identifier)
        self.worker.get_finished(output.finished_req_ids)
        self.worker.clear_connector_metadata()
        for identifier in output.free_encoder_mm_hashes:
            self.encoder_cache.pop(identifier, None)
        self.scheduler.update_from_output(output, host_engine.sampled(output))
        return [load.mm_hash for load in metadata.mm_datas]

    def end(self) -> None:
        ids = list(self.scheduler.requests)
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        for _ in range(4):
            self.step()
        assert self.buffer.pinned == {}, "pins outlived their requests"
        assert self.connector.scheduler is not None
        assert len(self.connector.scheduler.gate) == 0
        without_gate = self.connector.without_gate
        assert without_gate is None or len(without_gate) == 0
        self.connector.shutdown()
        self.worker.shutdown()


def drive(roles: list[str]) -> list[str]:
    """Raises AssertionError; returns what was driven."""
    hit_and_miss("ec_both" if "both" in roles else "ec_consumer")
    produce()
    done = ["own scheduler: hit, miss, load, save"]
    if HAS_GATE:
        wait_for_a_fetch()
        without_media()
        done.append("gate" + (" and failing" if CAN_FAIL else ", holds back"))
    else:
        local_only()
        done.append("no gate")
    return done


def hit_and_miss(role: str) -> None:
    engine = HostEngine(role)
    engine.buffer.keep(content("hit"))
    engine.add("one", "hit", "miss")
    assert engine.step() == [content("hit")]
    assert engine.encoded == [content("miss")]
    loaded = engine.encoder_cache[content("hit")]
    assert torch.equal(loaded, engine.buffer.tensors[content("hit")])
    engine.buffer.calls.clear()
    for _ in range(5):
        assert engine.step() == []
    assert engine.buffer.calls == [], "decoding asks nobody"
    engine.add("two", "hit", "miss")
    assert engine.step() == [], "both are in vLLM's own cache"
    assert len(engine.encoded) == 1
    engine.end()
    assert (content("miss") in engine.buffer.tensors) is (role == "ec_both")


def produce() -> None:
    engine = HostEngine("ec_producer")
    engine.buffer.keep(content("stored"))
    engine.add("one", "stored", "new")
    assert engine.step() == []
    assert engine.encoded == [content("new")], "what is stored is not encoded again"
    encoded = engine.encoder_cache[content("new")].clone()
    deadline = time.monotonic() + SAVED_SECONDS
    while content("new") not in engine.buffer.tensors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(engine.buffer.tensors[content("new")], encoded)
    engine.end()


def wait_for_a_fetch() -> None:
    from lookup_buffer.client.handles import PrefetchState

    engine = HostEngine("ec_consumer", fetch_wait_seconds=600)
    engine.buffer.keep(content("far"))
    engine.buffer.stored[content("far")].needs_fetch = True
    engine.add("one", "far")
    assert engine.step() == []
    assert engine.encoded == [], "held back"
    engine.buffer.settle(0, PrefetchState.RESIDENT)
    assert engine.step() == [content("far")]
    assert engine.encoded == []
    engine.end()


def without_media() -> None:
    """A request that cannot be encoded here is failed where the host can, else held back."""
    engine = HostEngine("ec_consumer", metadata_wait_seconds=0)
    engine.add("one", "nowhere", metadata_only=True)
    for _ in range(3):
        assert engine.step() == []
    assert engine.encoded == []
    assert ("one" in engine.scheduler.requests) is not CAN_FAIL
    engine.end()


def local_only() -> None:
    engine = HostEngine("ec_consumer")
    engine.buffer.keep(content("far"))
    engine.buffer.stored[content("far")].needs_fetch = True
    engine.add("one", "far")
    assert engine.step() == []
    assert engine.encoded == [content("far")], "nobody can hold it back"
    engine.end()
