"""What is checked of the connector under one vLLM release; `host_check.py` runs it.

A release's base class says what may be called, the sources of its scheduler and workers what is
called. Both are compared with our class without running anything.

Then `drive` runs the real scheduler of the release with our connector in it. Configuration,
requests, queues, encoder cache and scheduling are the release's own. Stand-ins are the model's
configuration, the output of the workers, and the buffer, which keeps a ledger of pins. Everything
between vLLM's queue and the metadata of the step is real, and so is the worker side but for the
model.
"""

import ast
import hashlib
import inspect
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from vllm.config import CacheConfig, ECTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
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


_MAKERS = ("get_ec_transfer", "create_connector")
_NAME = "ec_connector"


@dataclass(frozen=True, slots=True)
class Use:
    """One place where the host calls, or reads, something of its connector."""

    where: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    is_call: bool = False

    def refused_by(self, connector: type) -> str | None:
        """Why this use would fail on `connector`, or None."""
        member = getattr(connector, self.name, None)
        if member is None:
            return f"{self.where}: {self.name} does not exist"
        if not self.is_call:
            return None
        arguments = [None] * self.positional
        if not isinstance(inspect.getattr_static(connector, self.name), classmethod):
            arguments.insert(0, None)
        try:
            inspect.signature(member).bind(*arguments, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.where}: {self.name}: {error}"
        return None


def uses(sources: Path, base: type) -> list[Use]:
    """Every use of a connector outside of the connectors' own folder."""
    found: list[Use] = []
    for folder in ("v1", "distributed", "engine", "model_executor"):
        for path in sorted((sources / "vllm" / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "ec_connector" in path.parent.parts or not any(m in text for m in (*_MAKERS, _NAME)):
                continue
            where = str(path.relative_to(sources))
            found += _uses_in(ast.parse(text), where)
    # The V2 runner calls its own wrapper by the same name.
    wrapper = sources / "vllm/v1/worker/gpu/ec_connector.py"
    own = _methods_in(wrapper) if wrapper.exists() else set()
    return [use for use in found if hasattr(base, use.name) or use.name not in own]


def _uses_in(tree: ast.AST, where: str) -> Iterator[Use]:
    holders = _holders(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not _is_connector(node.value, holders):
            continue
        place = f"{where}:{node.lineno}"
        call = calls.get(id(node))
        if call is None:
            yield Use(place, node.attr)
        else:
            positional = sum(not isinstance(a, ast.Starred) for a in call.args)
            keywords = tuple(k.arg for k in call.keywords if k.arg is not None)
            yield Use(place, node.attr, positional, keywords, is_call=True)


def _holders(tree: ast.AST) -> set[str]:
    """Local names that are given a connector."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_made(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    } | {_NAME}


def _is_made(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (
        node.func.id == "get_ec_transfer"
    )  # fmt: skip


def _is_connector(node: ast.AST, holders: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in holders
    if isinstance(node, ast.Attribute):
        return node.attr == _NAME and isinstance(node.value, ast.Name) and node.value.id == "self"
    return _is_made(node)


def _methods_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def refused_parameters(base: Any, connector: Any) -> list[str]:
    """Methods of the base class whose parameters ours would not take, in either way."""
    refused = []
    for name, declared in vars(base).items():
        ours = inspect.getattr_static(connector, name, None)
        if name.startswith("_") or not inspect.isfunction(declared) or ours is declared:
            continue
        kinds = inspect.Parameter
        parameters = list(inspect.signature(declared).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
        signature = inspect.signature(getattr(connector, name))
        any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())
        try:
            signature.bind(None, *named)
            signature.bind(None, **dict.fromkeys(named))
        except TypeError as error:
            refused.append(f"{name}: {error}")
        if not any_keyword and any(p.kind is kinds.VAR_KEYWORD for p in parameters):
            refused.append(f"{name}: the host may pass more by keyword")
    return refused


# What each release must be seen to call, so that a search that finds nothing cannot pass.
ALWAYS_CALLED = {
    "bind_connector_metadata", "build_connector_meta", "clear_connector_metadata", "get_finished",
    "save_caches", "start_load_caches", "update_state_after_alloc",
}  # fmt: skip


def check(sources: Path) -> list[str]:
    """Raises AssertionError; returns what was done."""
    roles = roles_that_parse()
    check_loading()
    count = check_interface(sources)
    driven = drive(roles)
    strangers = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "vllm"
        and not str(getattr(module, "__file__", None) or sources).startswith(str(sources))
    ]
    assert not strangers, f"another vLLM was loaded: {strangers}"
    return ["loads", f"{count} uses fit", f"roles {'/'.join(roles)}", *driven]


def roles_that_parse() -> list[str]:
    parsed = []
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        try:
            ECTransferConfig(ec_connector=CONNECTOR_NAME, ec_role=role)
        except ValueError:
            continue
        parsed.append(role.removeprefix("ec_"))
    assert parsed[:2] == ["producer", "consumer"]
    return parsed


def check_loading() -> None:
    config = ECTransferConfig(
        ec_connector=CONNECTOR_NAME,
        ec_role="ec_consumer",
        ec_connector_module_path=CONNECTOR_MODULE,
    )
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config.ec_connector_module_path = None
    assert ECConnectorFactory.get_connector_class(config) is LookupBufferECConnector


def check_interface(sources: Path) -> int:
    """Nothing is left abstract, and every use fits. Returns how many were found."""
    ours: Any = LookupBufferECConnector
    assert not inspect.isabstract(ours), ours.__abstractmethods__
    assert issubclass(ours, ECConnectorBase)
    found = uses(sources, ECConnectorBase)
    called = {use.name for use in found if use.is_call}
    assert called >= ALWAYS_CALLED, f"not found: {ALWAYS_CALLED - called}"
    assert called & {"has_caches", "has_cache_item"}
    wrong = [why for use in found if (why := use.refused_by(ours))]
    wrong += refused_parameters(ECConnectorBase, ours)
    assert not wrong, "\n".join(wrong)
    return len(found)
