"""What vLLM's own encoder cache holds, as far as its allocations and evictions tell us.

Owned by the scheduler's thread. A hint, never a promise: vLLM evicts within a pass and says so at
its end, and `reset_encoder_cache` (also by `/pause` and `/sleep`) has no hook at all: it shows when
vLLM asks for what it should hold.
"""

from collections.abc import Container
from typing import Any

from lookup_buffer.key import TensorKey

HELD_MAX = 1 << 16
"""Far above what fits into a cache; bounds what resets, which nobody tells us of, leave behind."""


class EngineCache:
    """A set of identifiers, and how often vLLM evicted."""

    def __init__(self) -> None:
        self._held: dict[str, TensorKey | None] = {}
        self._empty: dict[str, None] = {}
        self.evictions = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def add(self, identifier: str, key: TensorKey | None = None) -> None:
        """vLLM made room for the item, and a worker puts an output there, which may be stored
        under `key`."""
        self._empty.pop(identifier, None)
        _keep(self._held, identifier, key)

    def add_empty(self, identifier: str) -> None:
        """vLLM made room for the item, and nobody puts anything there: an engine that only encodes
        skips what is stored, and vLLM will take it for encoded."""
        _keep(self._empty, identifier, None)

    def is_empty(self, identifier: str) -> bool:
        return identifier in self._empty

    def key_of(self, identifier: str) -> TensorKey | None:
        """Under which key the output that is there may be stored; None where that is not known."""
        return self._held.get(identifier)

    def discard(self, identifier: str) -> None:
        self._held.pop(identifier, None)
        self._empty.pop(identifier, None)

    def was_reset(self, but: Container[str]) -> None:
        """vLLM holds nothing of this any more but what it made room for since."""
        self._held = {name: key for name, key in self._held.items() if name in but}
        self._empty = {name: None for name in self._empty if name in but}
        self.evictions += 1


def _keep(kept: dict[str, Any], identifier: str, value: Any) -> None:
    kept[identifier] = value
    if len(kept) > HELD_MAX:
        del kept[next(iter(kept))]
