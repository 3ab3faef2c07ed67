"""The namespace of an engine's KV cache: all that its bytes depend on and chunk names do not hold.

What the encoder outputs depend on, KV does too; on top of it all that says how KV lies in a block.
Scheduler and workers of one engine build equal ones. In doubt a part is in: a part too few gives
wrong answers.
"""

from collections.abc import Mapping
from typing import Any

from connectors.kv.settings import KvSettings
from connectors.namespace import canonical, namespace_parts
from connectors.naming import Identity
from connectors.weights import weights_source

_GROWING_ROPES = ("longrope", "dynamic")
"""Position embeddings that depend on how long a prompt may be."""


def kv_identity(vllm_config: Any, settings: KvSettings, block_size: int) -> Identity:
    """See `engine_identity`."""
    source = weights_source(vllm_config, settings.weights_version)
    return Identity(kv_namespace_parts(vllm_config, settings, block_size), source)


def kv_namespace_parts(vllm_config: Any, settings: KvSettings, block_size: int) -> dict[str, str]:
    """Name and readable value of each part but the weights."""
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
        "kv_layout": _layout(vllm_config, block_size),
        "positions": _positions(model),
        "speculation": _speculation(vllm_config),
    }


def chunk_blocks(chunk_tokens: int, block_size: int) -> int:
    """Whole blocks of a chunk."""
    return -(-chunk_tokens // block_size)


def _layout(vllm_config: Any, block_size: int) -> str:
    """What lies in a block, as far as it is known before the model is loaded: who wrote it."""
    from vllm.platforms import current_platform

    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(getattr(attention, "backend", None), "name", "auto")
    device = str(current_platform.device_type)
    if device == "cpu":  # keys are packed for the instructions that read them
        device = f"{device}-{_instructions(vllm_config, block_size)}"
    else:  # which kernels there are, and vLLM chooses, follows from it
        device = f"{device}-{current_platform.get_device_capability()}"
    return f"{device}, {backend}"


def _instructions(vllm_config: Any, block_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return str(_get_attn_isa(model.dtype, block_size, model.get_head_size(), cache_dtype))


def _positions(model: Any) -> str:
    """The longest prompt, where it changes how positions are embedded."""
    text = getattr(model, "hf_text_config", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return ""
    # Of all layers, or of each kind of layers by its name.
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    kinds = {values.get("rope_type", values.get("type", "")) for values in each}
    return "" if kinds.isdisjoint(_GROWING_ROPES) else str(model.max_model_len)


def _speculation(vllm_config: Any) -> str:
    """A draft model has layers of its own in the cache."""
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is None:
        return ""
    names = ("method", "model", "num_speculative_tokens")
    return canonical({name: getattr(speculation, name, None) for name in names})
