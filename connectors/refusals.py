"""Engines in which no connector can do its work, and what their owner is to do instead.

Called at start, before the weights are loaded, on the scheduler's side and on the workers'.
"""

from typing import Any

from lookup_buffer.errors import ConfigError

_WITHOUT_US = "start this engine without --ec-transfer-config"


def refuse_unfit_engine(vllm_config: Any) -> None:
    """Refuse an engine that has no encoder outputs to share, or whose outputs change their meaning.

    Raises:
        ConfigError: a model without media, an encoder-decoder, or weights that change in place.
    """
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
