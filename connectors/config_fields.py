"""Which fields of vLLM's configuration decide whether two engines share.

Every field of `ModelConfig` and `MultiModalConfig` counts, but for those named here: so a field of
a later vLLM counts until somebody has looked at it. A field that counts without need costs sharing;
one that is left out by mistake gives wrong answers. docs/vllm.md has a row for each name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that does not count."""

    reason: str
    kv_counts: bool = False
    """Whether it counts for KV all the same: it reaches the language model, not the encoder."""


_OWN = "counts by a part of its own"
_TEXT = "makes tokens of text; items and chunks of KV are named by what comes out"
_SAMPLING = "chooses among tokens, behind the last layer"
_MEMORY = "where memory comes from and when it is given back"
_REQUESTS = "which requests are accepted"
_CACHE = "how processed media are kept and passed on between vLLM's processes"
_ROLE = "vLLM sets it by the connector's role, or the user to spare an engine its encoder"
_SCALES = "calibration that is written for later starts"
_DEPTH_MAX = 16
"""Of values in values; what lies deeper counts by its type."""

IGNORED_MODEL: Final[Mapping[str, Ignored]] = {
    "model": Ignored(f"{_OWN}: `model`"),
    "model_weights": Ignored(f"{_OWN}: `weights`"),
    "revision": Ignored(f"{_OWN}: `revision`, the commit"),
    "code_revision": Ignored(f"{_OWN}: `code_revision`"),
    "dtype": Ignored(f"{_OWN}: `dtype`"),
    "quantization": Ignored(f"{_OWN}: `quantization`"),
    "quantization_config": Ignored(f"{_OWN}: `quantization`"),
    "hf_overrides": Ignored(f"{_OWN}: `hf_overrides`"),
    "hf_config": Ignored(f"{_OWN}: `encoder_config`"),
    "hf_text_config": Ignored("a part of `hf_config`"),
    "hf_config_path": Ignored("what is read from it counts as `encoder_config`"),
    "config_format": Ignored("what is read in it counts as `encoder_config`"),
    "model_impl": Ignored(f"{_OWN}: `implementation`, the class that it leads to"),
    "model_class_overrides": Ignored(f"{_OWN}: `implementation`"),
    "multimodal_config": Ignored("its fields count, see below"),
    "seed": Ignored(f"{_SAMPLING}; counts as `load_format` where it makes the weights"),
    "runner": Ignored("what becomes of the last layer's output", kv_counts=True),
    "convert": Ignored("what becomes of the last layer's output", kv_counts=True),
    "pooler_config": Ignored("what becomes of the last layer's output"),
    "tokenizer": Ignored(_TEXT),
    "tokenizer_mode": Ignored(_TEXT),
    "tokenizer_revision": Ignored(_TEXT),
    "skip_tokenizer_init": Ignored(_TEXT),
    "word_embeddings_untied_by_checkpoint": Ignored(
        "of the last layer; vLLM may change it when the weights are loaded"
    ),
    "allowed_local_media_path": Ignored(_REQUESTS),
    "allowed_media_domains": Ignored(_REQUESTS),
    "enable_prompt_embeds": Ignored(_REQUESTS),
    "enable_trace_replay": Ignored(_REQUESTS),
    "allow_deprecated_quantization": Ignored("a permission; the method counts as `quantization`"),
    "max_model_len": Ignored("how long a prompt may be; for KV it counts where positions need it"),
    "spec_target_max_model_len": Ignored("how long a prompt may be"),
    "disable_sliding_window": Ignored("attention of the language model", kv_counts=True),
    "disable_cascade_attn": Ignored("has no effect any more"),
    "enforce_eager": Ignored("whether the same layers run as CUDA graphs"),
    "return_sampling_mask": Ignored(_SAMPLING),
    "max_logprobs": Ignored(_SAMPLING),
    "logprobs_mode": Ignored(_SAMPLING),
    "use_fp64_gumbel": Ignored(_SAMPLING),
    "logits_processors": Ignored(_SAMPLING),
    "generation_config": Ignored(_SAMPLING),
    "override_generation_config": Ignored(_SAMPLING),
    "served_model_name": Ignored("a name for clients"),
    "hf_token": Ignored("a secret; what it gives access to counts by content or commit"),
    "enable_sleep_mode": Ignored(_MEMORY),
    "sleep_mode_backend": Ignored(_MEMORY),
    "sleep_mode_offload_cudagraph": Ignored(_MEMORY),
    "sleep_preserve_parameter_names": Ignored(_MEMORY),
    "enable_nccl_comm_suspend": Ignored(_MEMORY),
    "enable_cumem_allocator": Ignored(_MEMORY),
    "renderer_num_workers": Ignored("how many threads prepare requests"),
}
IGNORED_MULTIMODAL: Final[Mapping[str, Ignored]] = {
    "language_model_only": Ignored(_ROLE, kv_counts=True),
    "mm_encoder_only": Ignored(_ROLE),
    "enable_mm_embeds": Ignored(_ROLE),
    "allow_missing_mm_embeddings": Ignored(_ROLE),
    "limit_per_prompt": Ignored(f"{_REQUESTS}, and what is profiled at start"),
    "skip_mm_profiling": Ignored("what is profiled at start"),
    "interleave_mm_strings": Ignored(_TEXT),
    "mm_processor_cache_gb": Ignored(_CACHE),
    "mm_processor_cache_type": Ignored(_CACHE),
    "mm_shm_cache_max_object_size_mb": Ignored(_CACHE),
    "mm_tensor_ipc": Ignored(_CACHE),
    "mm_ipc_gpu_memory_gb": Ignored(_MEMORY),
    "mm_hasher_algorithm": Ignored("stands in the items' names"),
    "mm_encoder_tp_mode": Ignored("which rank computes what of the encoder"),
    "mm_encoder_attn_backend": Ignored("a kernel; vLLM derives it from the device"),
    "mm_encoder_fp8_scale_path": Ignored("its content counts, as `mm_encoder_fp8_scales`"),
    "mm_encoder_fp8_scale_save_path": Ignored(_SCALES),
    "mm_encoder_fp8_scale_save_margin": Ignored(_SCALES),
}


def counted(config: Any, ignored: Mapping[str, Ignored], *, for_kv: bool) -> dict[str, Any]:
    """The fields of `config` that count, by name, as plain values; None and empty are left out."""
    chosen: dict[str, Any] = {}
    for name in _names(config):
        row = ignored.get(name)
        if row is None or (for_kv and row.kv_counts):
            value = plain(getattr(config, name, None))
            if value not in (None, "", {}, []):
                chosen[name] = value
    return chosen


def _names(config: Any) -> list[str]:
    if is_dataclass(config):
        return [field.name for field in fields(config)]
    members = getattr(config, "__dict__", {})
    return [n for n, value in members.items() if not n.startswith("_") and not callable(value)]


def plain(value: Any, depth: int = _DEPTH_MAX) -> Any:
    """`value` in JSON's own types, the same in every process: no address, no order of a set."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    if isinstance(value, set | frozenset):
        return sorted((plain(member, depth - 1) for member in value), key=str)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, list | tuple):
        return [plain(member, depth - 1) for member in value]
    if not isinstance(value, Mapping):
        # torch's dtypes and devices have no members, and a text of their own.
        members = {name: getattr(value, name, None) for name in _names(value)}
        if not members:
            return str(value)
        value = {"type": type(value).__qualname__, **members}
    return {str(key): plain(member, depth - 1) for key, member in value.items()}
