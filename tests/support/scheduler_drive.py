"""vLLM's own scheduler with our connector in it, turn by turn; only the model is made up.

`DrivenEngine` does what EngineCore and the V1 model runner do: it schedules up to as many steps
ahead as the configuration allows, runs each as late as it can, and dies where they would: of an
item that is needed and in no cache, of one without media that is to be encoded.

`namespace_of` is the namespace that an engine with some configuration comes to.
"""

import hashlib
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from connector_standins import EMBEDS
from connectors.namespace import Identity, NamespaceTask, engine_identity
from connectors.settings import SharedSettings
from connectors.weights import DigestCache
from lookup_buffer.errors import MissReason
from lookup_buffer.namespace import Namespace
from nodes import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    import host_checks
    from connectors.ec.connector import LookupBufferECConnector

BLOCK_TOKENS = 4
HOOKS = (
    "ensure_cache_available", "has_cache_item", "update_state_after_alloc", "build_connector_meta",
    "take_unavailable_requests", "request_finished",
)  # fmt: skip
"""What the scheduler calls, in the order in which a request comes to it."""


@dataclass(frozen=True, slots=True)
class Room:
    """How little the engine has of everything."""

    is_async: bool = False
    prefix_caching: bool = False
    policy: str = "fcfs"
    blocks: int = 12
    step_tokens: int = 10
    cache_items: int = 2
    step_items: int = 2
    whole_prompts: bool = True
    """Whether vLLM admits a request only when its whole prompt has room."""


def content(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def output_of(identifier: str, width: int) -> torch.Tensor:
    """What encoding the item gives, here and anywhere."""
    seed = int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:7], "big")
    return torch.rand(EMBEDS, width, generator=torch.Generator().manual_seed(seed))


class DrivenEngine:
    """See the module.

    Args:
        width: of an encoder output, in floats.
        is_held: asked, as a worker is about to read, whether the bytes are pinned.
        before_hook: called with the name of each of `HOOKS`, before the scheduler gets through.
    """

    def __init__(
        self,
        room: Room,
        *,
        role: str = "ec_both",
        width: int = 2,
        is_held: Callable[[Any], bool] = lambda _: True,
        before_hook: Callable[[str], None] = lambda _: None,
        **extra: Any,
    ) -> None:
        self.config = host_checks.host_config(
            role,
            scheduling={
                "max_num_batched_tokens": room.step_tokens,
                "max_num_seqs": 4,
                "policy": room.policy,
                "scheduler_reserve_full_isl": room.whole_prompts,
            },
            caching={"block_size": BLOCK_TOKENS, "enable_prefix_caching": room.prefix_caching},
            **extra,
        )
        self.config.model_config.get_hidden_size = lambda: width
        # Set late: vLLM decides against it where no executor is named that can do it.
        self.config.scheduler_config.async_scheduling = room.is_async
        self.scheduler = host_checks.host_scheduler(
            self.config,
            kind=AsyncScheduler if room.is_async else Scheduler,
            blocks=room.blocks,
            cache_embeds=room.cache_items * EMBEDS,
            step_embeds=room.step_items * EMBEDS,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.connector: LookupBufferECConnector = self.scheduler.ec_connector
        self.worker = LookupBufferECConnector(self.config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        self._width = width
        self._is_held = is_held
        self._before_hook = before_hook
        self._depth: int = self.config.max_concurrent_batches
        assert self._depth == 1 + room.is_async
        self._flying: deque[Any] = deque()
        self.cache: dict[str, torch.Tensor] = {}
        self._features: dict[str, list[Any]] = {}
        self._tokens: dict[str, int] = {}
        """By request: how long it is, as far as its tokens are known to the worker."""
        self._phantoms: set[str] = set()
        """Items whose encode vLLM took out of its step, by preemption, and believes to be cached.
        A fault of its own, which kills engines that no connector touches."""
        self._told: list[str] = []
        self.encoded: list[str] = []
        self.loaded: list[str] = []
        self.reasons: dict[str, str] = {}
        """By request: how it ended."""
        self.preemptions = 0
        self.empty_steps = 0
        for name in HOOKS:
            setattr(self.connector, name, self._watched(name, getattr(self.connector, name)))

    def _watched(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before_hook(name)
            if name == "update_state_after_alloc":
                self._allocated(*args)
            return hook(*args, **kwargs)

        return call

    def _allocated(self, request: Any, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if not self.connector.has_cache_item(identifier):
            self._told.append(identifier)
        self._phantoms.discard(identifier)

    # -- its clients

    def add(self, request_id: str, *names: str, bare: Sequence[int] = (), **values: Any) -> None:
        """`bare`: which of the items carry no media."""
        identifiers = [content(name) for name in names]
        request = host_checks.host_request(
            request_id, *identifiers, block_hasher=self._hasher, **values
        )
        for index in bare:
            request.mm_features[index].data = None
        self._features[request_id] = request.mm_features
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.reasons[request_id] = "abort"

    @property
    def unfinished(self) -> list[str]:
        return [name for name, one in self.scheduler.requests.items() if not one.is_finished()]

    # -- its loop

    def step(self) -> None:
        """Schedule one step ahead; the oldest runs when no more may be in flight."""
        if len(self._flying) == self._depth:
            self.finish_oldest()
        if self.scheduler.has_requests():
            self._flying.append(self._schedule())
        elif self._flying:
            self.finish_oldest()

    def _schedule(self) -> Any:
        before = {name: one.num_preemptions for name, one in self.scheduler.requests.items()}
        self._told = []
        output = self.scheduler.schedule()
        for name, one in self.scheduler.requests.items():
            self.preemptions += one.num_preemptions - before[name]
        self.empty_steps += output.total_num_scheduled_tokens == 0
        encodes = self._encodes(output)
        self._phantoms.update(set(self._told) - set(encodes))
        return output

    def _encodes(self, output: Any) -> list[str]:
        return [
            self._features[name][index].identifier
            for name, indices in output.scheduled_encoder_inputs.items()
            for index in indices
        ]

    def finish_oldest(self) -> None:
        output = self._flying.popleft()
        ended = self.scheduler.update_from_output(output, self._execute(output))
        for outputs in ended.values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """As `GPUModelRunner.execute_model`."""
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        metadata = output.ec_connector_metadata
        sampled: dict[str, list[int]] = {}
        told = None
        if output.total_num_scheduled_tokens or not self.connector.is_consumer:
            self.worker.bind_connector_metadata(metadata)
            if self.worker.is_producer:
                self.worker.start_save_caches(encoder_cache=self.cache)
            if self.worker.is_consumer:
                self._load(metadata)
            self._encode(output)
            sampled = self._forward(output)
            told = self.worker.build_connector_worker_meta()
            self.worker.clear_connector_metadata()
        else:
            assert metadata.mm_datas == [], "a step without tokens never reaches the worker"
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            ec_connector_output=SimpleNamespace(
                ec_connector_worker_meta=told, ec_connector_stats=None
            ),
        )

    def _load(self, metadata: Any) -> None:
        held = {load.mm_hash: self._is_held(load) for load in metadata.mm_datas}
        assert all(held.values()), f"read without a pin: {held}"
        self.worker.start_load_caches(self.cache)
        for load in metadata.mm_datas:
            assert load.mm_hash in self.cache, "a promise that did not load"
            expected = output_of(load.mm_hash, self._width)
            assert torch.equal(self.cache[load.mm_hash], expected), "other bytes than promised"
            assert len(expected) == load.num_token, "loaded for who expects other rows"
            self.loaded.append(load.mm_hash)

    def _encode(self, output: Any) -> None:
        for name, indices in output.scheduled_encoder_inputs.items():
            for feature in (self._features[name][index] for index in indices):
                assert feature.data is not None, "nothing there to encode: the engine dies"
                self.cache[feature.identifier] = output_of(feature.identifier, self._width)
                self.encoded.append(feature.identifier)
                self.worker.save_caches(encoder_cache=self.cache, mm_hash=feature.identifier)

    def _forward(self, output: Any) -> dict[str, list[int]]:
        """Gather what the step's tokens need; a token for each request whose end it reaches."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = len(new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            end = computed[name] + count
            # An engine that only encodes gathers nothing.
            for feature in self._features[name] if self.connector.is_consumer else ():
                start = feature.mm_position.offset
                if start < end and start + feature.mm_position.length > computed[name]:
                    known = feature.identifier in self.cache.keys() | self._phantoms
                    assert known, f"Encoder cache miss for {feature.identifier}: the engine dies"
            sampled[name] = [7] if end >= self._tokens[name] else []
            self._tokens[name] += len(sampled[name])
        return sampled

    # -- its end

    def come_to_rest(self) -> None:
        """With no request left: as many passes as it takes until each step has surely run."""
        assert self.unfinished == []
        while self._flying:
            self.finish_oldest()
        for _ in range(self._depth + 1):
            self._flying.append(self._schedule())
            self.finish_oldest()
        side = self.connector.scheduler
        assert side is not None
        held = {"pins": len(side.pins), "gate": len(side.gate), "claims": len(side.claims)}
        assert held == {"pins": 0, "gate": 0, "claims": 0}
        assert side.pins.held_bytes == 0
        assert not side.gate.take_unavailable_requests()

    def close(self) -> None:
        self.connector.shutdown()
        self.worker.shutdown()


HASHED_SECONDS = 60.0


def namespace_of(identity: Identity) -> Namespace:
    """With the weights hashed anew."""
    with tempfile.TemporaryDirectory() as directory:
        naming = NamespaceTask(identity, cache=DigestCache(Path(directory)))
        namespace = when_settled(naming)
        naming.close()
    assert namespace is not None, naming.reason
    return namespace


def when_settled(naming: NamespaceTask) -> Namespace | None:
    """The namespace, once it is known; None where it cannot be told."""
    wait_until(
        lambda: naming.namespace or naming.reason != MissReason.NAMESPACE_PENDING, HASHED_SECONDS
    )
    return naming.namespace


def engine_namespace(vllm_config: Any, settings: SharedSettings) -> Namespace:
    return namespace_of(engine_identity(vllm_config, settings))
