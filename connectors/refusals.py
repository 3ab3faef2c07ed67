"""Engines in which no connector can do its work, and what their owner is to do instead.

Called at start, before the weights are loaded, on the scheduler's side and on the workers'.
"""

from typing import Any

from lookup_buffer.errors import ConfigError

_WITHOUT_US = "start this engine without --ec-transfer-config"


def refuse_unfit_engine(vllm_config: Any) -> None:
    """Refuse an engine that has no encoder outputs to share, or whose outputs change their meaning.

    Raises:
        ConfigError: a model without media, an encoder-decoder, weights that change in place, or
            workers that the connector does not reach.
    """
    if why := unfit_ranks(vllm_config.parallel_config):
        raise ConfigError(f"{why}; {_WITHOUT_US}")
    model = vllm_config.model_config
    name = getattr(model, "model", "")
    if getattr(model, "multimodal_config", None) is None:
        raise ConfigError(
            f"the model {name} takes no images, video or audio: there is nothing to share; "
            f"{_WITHOUT_US}"
        )
    if getattr(model, "is_encoder_decoder", False):
        # vLLM's workers ask a connector to load nothing for those: a promised item ends the engine.
        raise ConfigError(
            f"the model {name} is an encoder-decoder, whose encoder outputs vLLM takes from no "
            f"connector; {_WITHOUT_US}"
        )
    if getattr(vllm_config, "weight_transfer_config", None):
        raise ConfigError(
            "--weight-transfer-config changes the weights while the engine runs, and vLLM tells no "
            "connector of that: outputs of old weights would be taken for those of new ones; "
            f"{_WITHOUT_US}"
        )


def unfit_ranks(parallel: Any) -> str:
    """Why no connector of ours serves workers in this layout, "" where it does.

    One scheduler has to tell all workers of its engine what to load, and all of them map the arena
    of one node. Data parallel engines have a scheduler each, so each counts for itself.

    Args:
        parallel: vLLM's ParallelConfig.
    """
    if _is_externally_launched(parallel) and parallel.world_size > 1:
        return (
            "with distributed_executor_backend=external_launcher each of the "
            f"{parallel.world_size} processes has a scheduler of its own, and they would not agree "
            "on what is loaded; use the backend mp, which has one scheduler for all workers"
        )
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1:
        return (
            f"--nnodes spreads the workers of one engine over {nodes} hosts, and the memory of a "
            "lookup buffer node is shared on one host only; keep each engine on one host, with "
            "--data-parallel-size for more of them"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        return "--enable-elastic-ep adds and removes workers while the engine runs"
    return ""


def _is_externally_launched(parallel: Any) -> bool:
    backend = getattr(parallel, "distributed_executor_backend", None)
    kinds = [kind.__name__ for kind in getattr(backend, "__mro__", ())]
    return backend == "external_launcher" or "ExecutorWithExternalLauncher" in kinds
