"""Engines whose KV cache cannot be shared, and what their owner is to do instead.

Called at start, on the scheduler's side and on the workers'.
"""

from typing import Any

from connectors.counters import logger
from connectors.refusals import unfit_ranks
from lookup_buffer.errors import ConfigError

_WITHOUT_US = "start this engine without LookupBufferKVConnector"


def refuse_unfit_cache(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine whose KV is not that of plain attention over all tokens, or changes its
    meaning.

    Raises:
        ConfigError: see the texts.
    """
    for why in (_refused_model(kv_cache_config), _refused_engine(vllm_config)):
        if why:
            raise ConfigError(f"{why}; {_WITHOUT_US}")


def _refused_model(kv_cache_config: Any) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return (
            f"this model keeps {len(groups)} kinds of state (a hybrid of attention with another "
            "attention or a state space), and only plain attention can be shared by prefix; where "
            "only windows differ, --disable-hybrid-kv-cache-manager makes it one kind"
        )
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if getattr(spec, "non_causal", False):
        return "in this model tokens attend to those behind them, so no prefix stands by itself"
    if kind == "FullAttentionSpec":
        return ""
    if "MLA" in kind:
        return "multi-head latent attention (MLA) is not supported yet"
    return f"a KV cache of {kind} is not supported, only attention over all tokens"


def _refused_engine(vllm_config: Any) -> str:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if why := unfit_ranks(parallel):
        return why
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallel engines are not supported yet"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} > 1 is not supported: a block then holds other tokens on each worker"
    if getattr(cache, "calculate_kv_scales", False):
        return "--calculate-kv-scales gives each engine scales of its own for the same cache"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "--enable-sleep-mode takes the KV cache away while it may be being stored"
    if getattr(vllm_config, "weight_transfer_config", None):
        return "--weight-transfer-config changes the weights while the engine runs"
    return ""


def demand_recomputation(transfer_config: Any) -> None:
    """vLLM's default fails a request whose KV did not load; it is read after connectors are made.

    Inside of a MultiConnector this is a copy, and only the outer option counts: hence the line.
    """
    if transfer_config.kv_load_failure_policy != "recompute":
        transfer_config.kv_load_failure_policy = "recompute"
        logger.info(
            "LookupBufferKVConnector: kv_load_failure_policy is set to 'recompute', so that KV "
            "that does not load is computed; inside of a MultiConnector set it yourself, beside "
            '"kv_connector": "MultiConnector", or such a request fails'
        )
