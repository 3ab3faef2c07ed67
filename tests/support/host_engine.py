"""The real scheduler of one vLLM release with our connector in it, over a model that there is not.

Configuration, requests, queues, encoder cache and scheduling are the host's own; only the model's
configuration is a stand-in, and the worker's output is made up. The connector's buffer is a
stand-in that keeps a ledger of pins; everything between vLLM's queue and the step's metadata is
real, and so is the worker side but for the model. See host_checks.
"""

import hashlib
import inspect
import time
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from vllm.config import CacheConfig, ECTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from connector_standins import EMBED_BYTES, EMBEDS, LedgerBuffer, Stored, pixels
from connectors.ec import seat as ec_seat
from connectors.ec.connector import LookupBufferECConnector
from connectors.plugin import CONNECTOR_MODULE, CONNECTOR_NAME
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import InsertOutcome

BLOCK_TOKENS = 32
BLOCKS = 1000
ENCODER_EMBEDS = 100
GAP = 2


def made(kind: Any, **values: Any) -> Any:
    """One of the host's classes, with those of the values that this release has."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in values.items() if name in known})


class ModelConfig:
    """A small decoder that takes images; what a release asks besides is answered with no."""

    model = "host/matrix"
    max_model_len = 1024
    runner_type = "generate"
    architectures: tuple[str, ...] = ()
    dtype = torch.float32
    hf_config = None
    multimodal_config = SimpleNamespace(mm_processor_cache_gb=4, mm_encoder_only=False)
    # The budget would ask a processor; the scheduler's own numbers are set in its place.
    supports_multimodal_inputs = False

    def get_hidden_size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def host_config(
    role: str,
    *,
    scheduling: dict[str, Any] | None = None,
    caching: dict[str, Any] | None = None,
    **extra: Any,
) -> Any:
    """`extra` is the connector's; the others are the scheduler's and the KV cache's own."""
    values: dict[str, Any] = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_model_len": ModelConfig.max_model_len,
        "is_encoder_decoder": False,
        "async_scheduling": False,
    }
    config = VllmConfig(
        scheduler_config=made(SchedulerConfig, **{**values, **(scheduling or {})}),
        cache_config=made(
            CacheConfig,
            **{"block_size": BLOCK_TOKENS, "enable_prefix_caching": False, **(caching or {})},
        ),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    config.model_config = ModelConfig()
    config.ec_transfer_config = ECTransferConfig(
        ec_connector=CONNECTOR_NAME,
        ec_role=role,
        ec_connector_module_path=CONNECTOR_MODULE,
        ec_connector_extra_config={"capacity_bytes": "64MiB", **extra},
    )
    return config


def host_scheduler(
    config: Any,
    *,
    kind: Any = Scheduler,
    blocks: int = BLOCKS,
    cache_embeds: int = ENCODER_EMBEDS,
    step_embeds: int = ENCODER_EMBEDS,
) -> Any:
    """`cache_embeds` is the room in its encoder cache, `step_embeds` what a step may encode."""
    block_tokens = config.cache_config.block_size
    spec = made(
        FullAttentionSpec,
        block_size=block_tokens,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        use_mla=False,
    )
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        ),
        structured_output_manager=SimpleNamespace(
            should_advance=lambda *_, **__: False, accept_tokens=lambda *_, **__: True
        ),
        block_size=block_tokens,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda _: False),
    )
    scheduler.max_num_encoder_input_tokens = step_embeds
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=cache_embeds)
    return scheduler


def host_request(
    request_id: str,
    *identifiers: str,
    metadata_only: bool = False,
    max_tokens: int = 16,
    embeds: int = EMBEDS,
    **values: Any,
) -> Any:
    """A prompt of a few tokens, an item, a few tokens, an item, and a tail."""
    starts = [GAP + index * (embeds + GAP) for index in range(len(identifiers))]
    features = [
        made(
            MultiModalFeatureSpec,
            data=None if metadata_only else pixels(),
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=start, length=embeds),
            mm_hash=identifier,
        )
        for start, identifier in zip(starts, identifiers, strict=True)
    ]
    return made(
        Request,
        request_id=request_id,
        prompt_token_ids=[1] * (GAP + len(identifiers) * (embeds + GAP)),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        eos_token_id=None,
        mm_features=features,
        **values,
    )


def sampled(output: Any) -> Any:
    """What a worker would answer to a step: one token for each request in it."""
    ids = list(output.num_scheduled_tokens)
    wants_arrays = "ndarray" in str(ModelRunnerOutput.__annotations__["sampled_token_ids"])  # 0.11
    return made(
        ModelRunnerOutput,
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[numpy.array([7]) if wants_arrays else [7] for _ in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


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
        config = host_config(role, **extra)
        self.scheduler = host_scheduler(config)
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
        self.scheduler.add_request(host_request(request_id, *identifiers, **kwargs))

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
        self.scheduler.update_from_output(output, sampled(output))
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
