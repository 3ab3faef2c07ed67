"""What vLLM's own encoder cache holds, derived from its allocations and evictions.

A hint, never a promise. vLLM evicts within a pass and reports it at the end of the pass.
`reset_encoder_cache` (also through `/pause` and `/sleep`) has no hook; it shows when vLLM asks for
an item that its cache should hold. `EcScheduler` updates it on vLLM's scheduler thread.
"""

from collections.abc import Container
from typing import Any

from lookup_buffer.key import TensorKey

HELD_MAX = 1 << 16
"""Far more than fits into a cache. Bounds the entries that unreported resets leave behind."""


class EngineCache:
    """The identifiers that vLLM's cache holds, and the number of its evictions."""

    def __init__(self) -> None:
        self._held: dict[str, TensorKey | None] = {}
        self._empty: dict[str, None] = {}
        self.evictions = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def add(self, identifier: str, key: TensorKey | None = None) -> None:
        """vLLM allocated the item, and a worker writes an output there. `key` is the key under
        which the output may be stored."""
        self._empty.pop(identifier, None)
        _keep(self._held, identifier, key)

    def add_empty(self, identifier: str) -> None:
        """vLLM allocated the item, and no worker writes to it. An engine that only encodes skips
        items that are stored, and vLLM then takes them for encoded."""
        _keep(self._empty, identifier, None)

    def is_empty(self, identifier: str) -> bool:
        return identifier in self._empty

    def key_of(self, identifier: str) -> TensorKey | None:
        """The key under which the cached output may be stored; None where it is not known."""
        return self._held.get(identifier)

    def discard(self, identifier: str) -> None:
        self._held.pop(identifier, None)
        self._empty.pop(identifier, None)

    def clear(self, keep: Container[str]) -> None:
        """vLLM's cache was reset and holds only what vLLM allocated since, which is `keep`."""
        self._held = {name: key for name, key in self._held.items() if name in keep}
        self._empty = {name: None for name in self._empty if name in keep}
        self.evictions += 1


def _keep(kept: dict[str, Any], identifier: str, value: Any) -> None:
    kept[identifier] = value
    if len(kept) > HELD_MAX:
        del kept[next(iter(kept))]
