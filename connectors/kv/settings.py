"""Everything a vLLM user may write into `kv_connector_extra_config`, validated before use. Pure."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from connectors.settings import SharedSettings, parse_as
from lookup_buffer.config import GIB, Bytes


class KvSettings(SharedSettings):
    """Settings of one engine's KV connector. Immutable; unknown names are refused."""

    chunk_tokens: int = Field(default=128, ge=1, le=65536)
    """Tokens of one chunk, the unit that is stored and loaded; rounded up to whole blocks."""
    store_generated: bool = True
    """Whether the KV of generated tokens is stored too, for prompts that go on from an answer."""
    handoff_wait_seconds: float = Field(default=5.0, ge=0, le=600)
    """How long a request waits for what another engine is to hand over, before it goes without."""
    save_queue_bytes: Bytes = Field(default=4 * GIB, ge=0)
    """Bound on the KV that waits to be stored. It lies in vLLM's own blocks until it is copied."""
    save_queue_items: int = Field(default=4096, ge=1, le=65536)
    """Bound on the number of chunks that wait to be stored."""


def parse_kv_settings(raw: Mapping[str, Any]) -> KvSettings:
    """The settings in `kv_connector_extra_config`. Raises as `parse_as`."""
    return parse_as(KvSettings, raw, "kv_connector_extra_config")
