"""The real scheduler of one vLLM release, over a model that there is not; see host_checks.

Configuration, requests, queues, encoder cache and scheduling are the host's own; only the model's
configuration is a stand-in, and the worker's output is made up.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from vllm.config import CacheConfig, ECTransferConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from connector_standins import EMBEDS, pixels
from connectors.plugin import CONNECTOR_MODULE, CONNECTOR_NAME

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
