"""The settings of one demo engine, and the vLLM arguments and environment that they become.

Pure: imports no vLLM and starts nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from examples.demo.model_size import ModelSize

# Longest prompt text of the demo and the tests, in tokens (the tokenizer has one per byte).
_PROMPT_TOKENS_MAX = 128
_ANSWER_TOKENS_MAX = 64
# A token costs 2 KiB of KV cache in both sizes of the model.
_KV_CACHE_BYTES = 64 << 20
# The largest value that glibc accepts; the largest tensor of the heavy model has 12 MB.
_MMAP_THRESHOLD_MAX = 32 << 20
MEMORY_VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_MAX),
}
"""glibc returns freed tensors to the system, depending on their position on its heap: the same
prefill then took 0 to 15,000 page faults, 43 to 68 ms. vLLM's documentation for CPU preloads
TCMalloc, which keeps memory; these two variables make glibc keep it."""


class Placement(StrEnum):
    """Where vLLM puts scheduler and worker."""

    ONE_PROCESS = "one_process"
    TWO_PROCESSES = "two_processes"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine.

    Engines that share need the same `model_directory`: the path is part of vLLM's content hash.
    """

    name: str
    size: ModelSize
    model_directory: Path
    work_directory: Path
    """Holds the engine's log and schedule; created if missing, not removed."""
    placement: Placement = Placement.ONE_PROCESS
    ec_transfer_config: dict[str, Any] | None = None
    """As in vLLM's `--ec-transfer-config`; None is an engine without any connector."""
    images_cached: int = 1
    """How many images vLLM's own encoder cache holds."""
    images_per_prompt: int = 1
    cores: tuple[int, ...] = ()
    """Cores for the engine's arithmetic; if empty, vLLM chooses. Engines whose tokens are compared
    need equal numbers of cores: the number of threads sets the order of floating-point sums."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the engine's environment."""
    extra_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`, overriding those below."""

    @property
    def log_path(self) -> Path:
        return self.work_directory / f"{self.name}.log"

    @property
    def schedule_path(self) -> Path:
        return self.work_directory / f"{self.name}.schedule.jsonl"


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables of the engine's processes, to be added to the caller's own."""
    one_process = settings.placement is Placement.ONE_PROCESS
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # An engine imports 3,000 modules in each of its processes: bytecode files halve its start.
        "PYTHONDONTWRITEBYTECODE": "",
        **MEMORY_VARIABLES,
    }
    if settings.cores:
        variables["OMP_NUM_THREADS"] = str(len(settings.cores))
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings.cores))
    return variables | settings.environment


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, without the scheduler's class.

    vLLM's encoder cache has no setting of its own: it holds as many embeddings as a step may have
    tokens. A repeated image reaches that cache only with the prefix cache off. The image then keeps
    its content hash as identifier only with the processor's cache on.
    """
    one_image = settings.size.embeddings_per_image
    images = settings.images_per_prompt
    text_tokens = _PROMPT_TOKENS_MAX + _ANSWER_TOKENS_MAX + 4 * images
    arguments: dict[str, Any] = {
        "model": str(settings.model_directory),
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": images * one_image + text_tokens,
        "max_num_seqs": 4,
        "max_num_batched_tokens": settings.images_cached * one_image + one_image // 2,
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0.25,
        "limit_mm_per_prompt": {"image": images},
        "skip_mm_profiling": True,
        "disable_log_stats": False,
        "generation_config": "vllm",
    }
    if settings.ec_transfer_config is not None:
        arguments["ec_transfer_config"] = settings.ec_transfer_config
    return arguments | settings.extra_arguments
