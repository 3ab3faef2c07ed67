"""Which of vLLM's item identifiers name content, and may therefore be shared.

Pure functions; any thread. An identifier is normally a hash over the media and the processor
settings, or a client's uuid. With vLLM's processor cache and its prefix cache both off it is only a
counter, which says nothing about the content and repeats on every instance and after every restart.
"""

import re
from typing import Any

from lookup_buffer.errors import ConfigError
from lookup_buffer.key import MAX_KEY_CHARACTERS

# `lora_name:` may stand in front of either form.
_COUNTED_BY_RENDERER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
_COUNTED_IN_REQUEST = re.compile(r"(?:^|:)([^:]+)-(?:image|video|audio|vision_chunk)-\d+$")
# Escaping triples a character at worst; refuse here what the key would refuse there.
_LONGEST = MAX_KEY_CHARACTERS // 3


def why_not_shareable(identifier: str, request_id: str, lora_name: str | None) -> str | None:
    """The reason (a counter's name) why this item must stay on this instance, or None."""
    if not identifier or len(identifier) > _LONGEST:
        return "identifier_length"
    if _COUNTED_BY_RENDERER.search(identifier):
        return "identifier_counted"
    counted = _COUNTED_IN_REQUEST.search(identifier)
    # Since 0.14 the scheduler's request id is the client's with a random suffix.
    if counted and (request_id == counted[1] or request_id.startswith(counted[1] + "-")):
        return "identifier_counted"
    # The prefix is the adapter's name, and two instances may load different adapters under one.
    if lora_name is not None and identifier.startswith(lora_name + ":"):
        return "lora"
    return None


def refuse_counted_identifiers(vllm_config: Any) -> None:
    """Refuse a host whose identifiers are counters.

    Raises:
        ConfigError: vLLM's processor cache and prefix caching are both off.
    """
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", 4) != 0:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "mm_processor_cache_gb is 0 and prefix caching is off: vLLM then names items by a "
            "counter (renderer0-mm-1-image-0) that repeats on every instance, and images would be "
            "mixed up; allowed: mm_processor_cache_gb > 0, or enable_prefix_caching"
        )
