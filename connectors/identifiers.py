"""Which of vLLM's item identifiers name content, and under which key it may be shared.

Any thread. An identifier is normally a hash over the media and the processor
settings, or a client's uuid. With vLLM's processor cache and its prefix cache both off it is only a
counter, which says nothing about the content and repeats on every instance and after every restart.
"""

import re
from typing import Any

from connectors.adapters import Adapters
from lookup_buffer.errors import ConfigError, InvalidKey
from lookup_buffer.key import MAX_KEY_CHARACTERS, TensorKey

# `lora_name:` may stand in front of either form.
_COUNTED_BY_RENDERER = re.compile(r"(?:^|:)renderer\d+-mm-\d+-")
_COUNTED_IN_REQUEST = re.compile(r"(?:^|:)([^:]+)-(?:image|video|audio|vision_chunk)-\d+$")


class NotShareable(Exception):
    """This item must stay on this instance. The text is a counter's name."""


def shared_key(
    identifier: str, request: Any, adapters: Adapters, mm_hash: str | None = None
) -> TensorKey:
    """The key under which all instances know what `identifier` names on this one.

    Args:
        mm_hash: the item's name without an adapter's, where the host says it.

    Raises:
        NotShareable: it may name something else on another instance.
    """
    if len(identifier) > MAX_KEY_CHARACTERS:  # a client's name may be of any length
        raise NotShareable("identifier_length")
    if _COUNTED_BY_RENDERER.search(identifier):
        raise NotShareable("identifier_counted")
    counted = _COUNTED_IN_REQUEST.search(identifier)
    # Since 0.14 the scheduler's request id is the client's with a random suffix.
    request_id: str = request.request_id
    if counted and (request_id == counted[1] or request_id.startswith(counted[1] + "-")):
        raise NotShareable("identifier_counted")
    lora: Any = getattr(request, "lora_request", None)
    if not _is_prefixed(identifier, lora, mm_hash):
        if adapters.encode:
            _refuse_unnamed(identifier, lora, adapters, mm_hash)
        return _key(identifier)
    # The prefix is the adapter's name, and two instances may load different adapters under one.
    digest = adapters.digest_of(lora)
    if not digest:
        raise NotShareable("lora")
    # A part, which nobody can write into an identifier of his own.
    return _key(identifier.removeprefix(f"{lora.lora_name}:"), part=f"lora-{digest}")


def _is_prefixed(identifier: str, lora: Any, mm_hash: str | None) -> bool:
    """Whether the adapter of the request stands in front of the item's name."""
    if lora is None:
        return False
    prefix: str = lora.lora_name + ":"
    return identifier == prefix + mm_hash if mm_hash else identifier.startswith(prefix)


def _refuse_unnamed(identifier: str, lora: Any, adapters: Adapters, mm_hash: str | None) -> None:
    """Adapters have a part in outputs, and this name says of none that it had.

    Raises:
        NotShareable: one may have had it all the same.
    """
    if lora is not None:
        adapters.encoded_unnamed(identifier)
    is_of_another = lora is None and bool(mm_hash) and identifier != mm_hash
    if is_of_another or adapters.is_ambiguous(identifier):
        raise NotShareable("lora")


def _key(identifier: str, part: str = "") -> TensorKey:
    try:
        return TensorKey(identifier, part=part)
    except InvalidKey as error:  # empty, or too long once it is escaped
        raise NotShareable("identifier_length") from error


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
