"""Which requests vLLM's front end accepts without their media.

A request may describe an item by the size of its embeddings alone, for an engine that is sent the
rest. vLLM accepts that of every KV consumer: it takes for granted that the KV of the prompt
arrives. Our KV connector is a cache. What it lacks is computed, and an encoder that runs on an item
without media ends the engine: one request of any client would do. So such a request is refused,
unless the engine is an EC consumer too, whose connector holds it back until its items are here.

Runs in vLLM's processes at start; imports vLLM only inside the function that needs it.
"""

import functools
import logging
from typing import Any

# A child of vLLM's own logger, as in `counters`, which imports more than a plugin should.
logger = logging.getLogger("vllm.lookup_buffer")
_OURS = "_lookup_buffer_requires_media"


def require_media(connector_name: str) -> None:
    """Patch vLLM to refuse items without media in engines that have the KV connector of this name
    and are no EC consumer.

    vLLM decides it as it completes its configuration. Idempotent. A vLLM that decides otherwise, or
    has no such requests, is not patched.
    """
    try:
        from vllm.config import VllmConfig

        original = VllmConfig._resolve_mm_embedding_inputs
    except (ImportError, AttributeError):
        return
    if hasattr(original, _OURS):
        return

    @functools.wraps(original)
    def resolve(self: Any) -> None:
        multimodal: Any = getattr(self.model_config, "multimodal_config", None)
        was_enabled = getattr(multimodal, "enable_mm_embeds", False)
        original(self)
        if getattr(multimodal, "allow_missing_mm_embeddings", False) and _is_only_cached(
            self, connector_name
        ):
            multimodal.allow_missing_mm_embeddings = False
            multimodal.enable_mm_embeds = was_enabled
            logger.info(
                "%s: requests have to carry their media all the same, since KV that is not stored "
                "is computed here; an ec_consumer accepts them without",
                connector_name,
            )

    setattr(resolve, _OURS, True)
    VllmConfig._resolve_mm_embedding_inputs = resolve


def _is_only_cached(vllm_config: Any, connector_name: str) -> bool:
    """Whether the KV of a prompt may be absent here, and nothing delivers its encoder outputs."""
    kv, ec = vllm_config.kv_transfer_config, vllm_config.ec_transfer_config
    is_delivered = ec is not None and ec.is_ec_consumer
    return kv is not None and kv.has_connector(connector_name) and not is_delivered
