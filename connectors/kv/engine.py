"""An engine's settings, cache shape and namespace for the KV connector, and which engines it
refuses.

Read from vLLM's configuration at start, on the scheduler side and in the workers. The settings are
those in `kv_connector_extra_config`. `validate_cache` refuses engines whose KV cache cannot be
shared, and says what to do instead.

The namespace covers all that the KV's bytes depend on and chunk names do not cover: all that
encoder outputs depend on, and the layout of KV in a block. Scheduler and workers of one engine
build equal namespaces. In doubt a part is included, because a missing part causes wrong answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from connectors.counters import logger
from connectors.namespace import Identity, canonical, namespace_parts
from connectors.settings import SharedSettings, parse_as, unsupported_layout
from connectors.weights import weights_source
from lookup_buffer.config import GIB, Bytes
from lookup_buffer.errors import ConfigError

_GROWING_ROPES = ("longrope", "dynamic")
"""Kinds of position embedding that depend on the longest possible prompt."""
_TUNED_TOKENS = 32768
_WITHOUT_US = "start this engine without LookupBufferKVConnector"


class KvSettings(SharedSettings):
    """Settings of one engine's KV connector. Immutable; unknown names are refused."""

    chunk_tokens: int = Field(default=128, ge=1, le=65536)
    """Tokens of one chunk, the unit of storing and loading; rounded up to whole blocks."""
    store_generated: bool = True
    """Whether the KV of generated tokens is stored too, for prompts that continue an answer."""
    behind_router: bool = False
    """Whether a router stands before this engine and it alone sets `kv_transfer_params`. Otherwise
    an end user could: they are ignored then, because a hand-off is never evicted."""
    handoff_wait_seconds: float = Field(default=5.0, ge=0, le=600)
    """How long a request waits for the hand-off of another engine; then its KV is computed here."""
    save_queue_bytes: Bytes = Field(default=4 * GIB, ge=0)
    """Bound on the bytes of KV that wait to be stored, in vLLM's blocks or as copies."""
    save_queue_items: int = Field(default=4096, ge=1, le=65536)
    """Bound on the number of chunks that wait to be stored."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """An engine's KV cache, as the scheduler side needs it; known at start."""

    is_producer: bool
    is_consumer: bool
    block_size: int
    """Tokens of a block."""
    chunk_tokens: int
    """Tokens of a chunk, whole blocks."""
    chunk_bytes: int
    """Bytes of a chunk, of all ranks together."""
    ranks: int
    stores_generated: bool
    """Whether chunks that end in generated tokens are stored. False with speculative decoding: it
    may reject computed tokens."""
    adapters_encode: bool = False
    """Whether LoRA adapters influence encoder outputs."""
    adapters_mixed: bool = False
    """Whether vLLM may use KV of one adapter for another one of the same name."""


def parse_kv_settings(raw: Mapping[str, Any]) -> KvSettings:
    """The settings in `kv_connector_extra_config`. Raises as `parse_as`."""
    return parse_as(KvSettings, raw, "kv_connector_extra_config")


def validate_cache(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine whose KV cannot be shared.

    Raises:
        ConfigError: attention other than over all tokens, KV that changes while the engine runs, or
            a layout of workers that is not supported. The text says why and what to do.
    """
    for why in (_unsupported_cache(kv_cache_config), _unsupported_engine(vllm_config)):
        if why:
            raise ConfigError(f"{why}; {_WITHOUT_US}")


def set_recompute_policy(transfer_config: Any) -> None:
    """Set vLLM's policy to recompute KV that failed to load, and log it.

    By default vLLM fails such a request. It reads the policy after it has made the connectors.
    Inside a MultiConnector this configuration is a copy, and only the outer option has an effect:
    hence the log line.
    """
    if transfer_config.kv_load_failure_policy != "recompute":
        transfer_config.kv_load_failure_policy = "recompute"
        logger.info(
            "LookupBufferKVConnector: kv_load_failure_policy is set to 'recompute', so that KV "
            "that fails to load is computed; with a MultiConnector, set it yourself beside "
            '"kv_connector": "MultiConnector", or such a request fails'
        )


def kv_identity(vllm_config: Any, settings: KvSettings, spec: Any) -> Identity:
    """The engine's identity for KV. Raises as `engine_identity`."""
    source = weights_source(vllm_config, settings.weights_version)
    return Identity(kv_namespace_parts(vllm_config, settings, spec), source)


def kv_namespace_parts(vllm_config: Any, settings: KvSettings, spec: Any) -> dict[str, str]:
    """Name and readable value of each part except the weights. `spec`: vLLM's, of the cache."""
    block_size: int = spec.block_size
    parts = namespace_parts(vllm_config, settings, for_kv=True)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache = vllm_config.cache_config
    return parts | {
        "content": "kv_cache",
        "block_size": str(block_size),
        "chunk_tokens": str(chunk_blocks(settings.chunk_tokens, block_size) * block_size),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "layers": str(model.get_num_layers(parallel)),
        "kv_heads": str(model.get_num_kv_heads(parallel)),
        "head_size": str(model.get_head_size()),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_layout": _layout(vllm_config, spec),
        "positions": _positions(model),
        "speculation": _speculation(vllm_config),
    }


def chunk_blocks(chunk_tokens: int, block_size: int) -> int:
    """The blocks of a chunk, rounded up."""
    return -(-chunk_tokens // block_size)


def _unsupported_cache(kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"this model keeps {len(groups)} kinds of state (a hybrid of attention with another "
            "attention or a state space), and only attention over all tokens can be shared by "
            "prefix; if only windows differ, --disable-hybrid-kv-cache-manager makes it one kind"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if getattr(spec, "non_causal", False):
        return (
            "in this model tokens attend to later tokens, so the KV of a prefix depends on the rest"
        )
    if kind == "FullAttentionSpec":
        return ""
    if "MLA" in kind:
        return "multi-head latent attention (MLA) is not supported yet"
    return f"a KV cache of {kind} is not supported, only attention over all tokens"


def _unsupported_engine(vllm_config: Any) -> str:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if why := unsupported_layout(parallel):
        return why
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallel engines are not supported yet"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} > 1 is not supported: a block then has different tokens on each worker"
    if getattr(cache, "calculate_kv_scales", False):
        return "--calculate-kv-scales computes different scales for the same KV in each engine"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "--enable-sleep-mode frees the KV cache while its chunks may still be stored"
    if getattr(vllm_config, "weight_transfer_config", None):
        return "--weight-transfer-config changes the weights while the engine runs"
    return ""


def _layout(vllm_config: Any, spec: Any) -> str:
    """What determines the layout of a block: device, attention backend, and what the backend has
    made of the cache's `spec`."""
    from vllm.platforms import current_platform

    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(getattr(attention, "backend", None), "name", "auto")
    device = str(current_platform.device_type)
    if device == "cpu":  # keys are packed for an instruction set
        device = f"{device}-{_instructions(vllm_config, spec.block_size)}"
    else:  # the capability determines which kernel vLLM chooses
        device = f"{device}-{current_platform.get_device_capability()}"
    kinds = {
        str(kind): getattr(one, "name", str(one))
        for kind, one in (getattr(attention, "backend_per_kind", None) or {}).items()
    }
    names = ("num_head_slots", "state_content_bytes")  # of a backend with pages of its own
    pages = {name: getattr(spec, name, None) for name in names}
    chosen = kinds | {name: value for name, value in pages.items() if value is not None}
    return f"{device}, {backend}" + (f", {canonical(chosen)}" if chosen else "")


def _instructions(vllm_config: Any, block_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return str(_get_attn_isa(model.dtype, block_size, model.get_head_size(), cache_dtype))


def _positions(model: Any) -> str:
    """The longest prompt, if the position embedding depends on it; and how Llama 4 scales attention
    by the position."""
    text = getattr(model, "hf_text_config", None)
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        return f"temperature tuning: {_is_tuned(model)}"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return ""
    # One for all layers, or one for each kind of layer, by its name.
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    kinds = {values.get("rope_type", values.get("type", "")) for values in each}
    return "" if kinds.isdisjoint(_GROWING_ROPES) else str(_longest_prompt(model))


def _longest_prompt(model: Any) -> int:
    """As the model's layers were built for it: with `--max-model-len auto`, vLLM then lowers it to
    what fits the cache."""
    is_auto = getattr(model, "original_max_model_len", None) == -1
    return int(model.get_and_verify_max_len(-1) if is_auto else model.max_model_len)


def _is_tuned(model: Any) -> bool:
    """As vLLM decides it (`Llama4ForCausalLM`), when it loads the model."""
    chosen = model.try_get_generation_config() | (model.override_generation_config or {})
    return bool(chosen.get("attn_temperature_tuning", _longest_prompt(model) > _TUNED_TOKENS))


def _speculation(vllm_config: Any) -> str:
    """The draft model, whose layers are in the cache, too."""
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is None:
        return ""
    names = ("method", "model", "num_speculative_tokens")
    return canonical({name: getattr(speculation, name, None) for name in names})
