"""What vLLM's own encoder cache holds, as far as its allocations and evictions tell us.

Owned by the scheduler's thread. A hint, never a promise: vLLM evicts within a pass and says so at
its end, and `reset_encoder_cache` (also by `/pause` and `/sleep`) has no hook at all: it shows when
vLLM asks for what it should hold.
"""

from collections.abc import Container

HELD_MAX = 1 << 16
"""Far above what fits into a cache; bounds what resets, which nobody tells us of, leave behind."""


class EngineCache:
    """A set of identifiers, and how often vLLM evicted."""

    def __init__(self) -> None:
        self._held: dict[str, None] = {}
        self.evictions = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._held

    def add(self, identifier: str) -> None:
        self._held[identifier] = None
        if len(self._held) > HELD_MAX:
            del self._held[next(iter(self._held))]

    def discard(self, identifier: str) -> None:
        self._held.pop(identifier, None)

    def was_reset(self, but: Container[str]) -> None:
        """vLLM holds nothing of this any more but what it made room for since."""
        self._held = {identifier: None for identifier in self._held if identifier in but}
        self.evictions += 1
