"""What a request carries for one multimodal item: media to encode, embeddings, or only metadata.

Pure but for one lazy question to vLLM about the model's metadata fields. Scheduler thread.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A field with at least so many bytes is no grid, count or list of timestamps.
_SURELY_MEDIA_BYTES = 1024
_EMBEDDING_SUFFIXES = ("embeds", "embedding", "embeddings")


class Carried(enum.Enum):
    """What the engine could do with the item if nobody else had encoded it."""

    MEDIA = "media"
    """Encode it here; the output may be stored."""
    EMBEDDINGS = "embeddings"
    """Use what the client supplied. Never stored, never looked up: it is not ours to vouch for."""
    METADATA = "metadata"
    """Nothing: the request can only run with bytes from elsewhere."""


def carried_by(feature: Any, metadata_fields: Callable[[str], set[str]]) -> Carried:
    """Look at the fields of one `MultiModalFeatureSpec`.

    Args:
        feature: the item, with `modality` and `data`.
        metadata_fields: names of the modality's metadata fields, asked only in doubt (it may build
            the model's processor).
    """
    if feature.modality == "prompt_embeds":
        return Carried.EMBEDDINGS
    data: Mapping[str, Any] | None = feature.data
    if not data:
        return Carried.METADATA
    values = {name: getattr(field, "data", None) for name, field in data.items()}
    present = {name: value for name, value in values.items() if value is not None}
    if any(name.endswith(_EMBEDDING_SUFFIXES) for name in present):
        return Carried.EMBEDDINGS
    if any(getattr(value, "nbytes", 0) >= _SURELY_MEDIA_BYTES for value in present.values()):
        return Carried.MEDIA
    # vLLM's renderer hands on the fields that stay on the CPU, too. A modality without fields of
    # its own cannot be asked for in a chat without its media.
    sizes = {name for name in present if _stays_on_cpu(data[name])}
    if present.keys() <= sizes or present.keys() <= sizes | metadata_fields(feature.modality):
        return Carried.METADATA
    return Carried.MEDIA


def _stays_on_cpu(element: Any) -> bool:
    return bool(getattr(getattr(element, "field", None), "keep_on_cpu", False))


class MetadataFields:
    """Asks vLLM once per modality which processed fields only size the placeholder."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._resolver: Any = None

    def fields_for(self, modality: str) -> set[str]:
        if self._resolver is None:
            try:
                from vllm.distributed.ec_transfer.ec_connector.utils import (
                    PlaceholderMetadataResolver,
                )
            except ImportError:
                return set()  # hosts without it have no metadata-only requests either
            self._resolver = PlaceholderMetadataResolver(self._model_config)
        fields: set[str] = self._resolver.fields_for(modality)
        return fields

    def report(self, features: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """By identifier, what a request needs that shall carry an item without its media; in the
        form of vLLM's own connectors, so that their routers understand it."""
        try:
            from vllm.distributed.ec_transfer.ec_connector.utils import collect_ec_item_metadata
        except ImportError:
            return {}
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(list(features), self)
        return items
