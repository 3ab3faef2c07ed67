"""Stores again what vLLM's own encoder cache holds and this host's node has lost.

vLLM asks a connector for no item that its own cache holds, so a request for such an item would
never restore it for others. A node loses items when it dies, when a time to live ends, or when a
namespace is invalidated. Each request is checked once, against this host alone. That needs no
message, and information about other hosts may be out of date until a dead node is detected. If
another host has the item, one more copy exists. An item with a time to live is not visible to this
check. It is offered again, at most once a second to one boot of the node, which reports that it
exists.

`EcGate` and `EcScheduler` call it on vLLM's scheduler thread.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from connectors.ec.items import EngineCache
from connectors.ec.watch import RequestState

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

REPUBLISH_INTERVAL_SECONDS = 1.0
"""Minimum time between two orders to store the same item; workers store in the background."""
BLOCKED_MAX = 4096


class EcRepublishing:
    """See the module.

    Args:
        engine_cache: what vLLM's own cache holds, and under which keys that may be stored.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        engine_cache: EngineCache,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._engine_cache = engine_cache
        self._clock = clock
        self._lost: dict[str, str] = {}
        self._blocked_until: dict[str, float] = {}
        """By identifier: until when the item is not given to the workers again."""
        self._boot = ""
        """The boot of the node that the workers stored in. A new one has nothing yet."""

    def check(self, state: RequestState) -> None:
        """Find the request's items that vLLM's cache holds and this host has lost."""
        key_of = self._engine_cache.key_of
        held = [item for item in state.items if key_of(item.identifier) == item.key]
        if held:
            if self._boot != self._buffer.boot:
                self._boot = self._buffer.boot
                self._blocked_until.clear()
            found = self._buffer.has_caches([item.key for item in held], timeout=0.0)
            for item, is_stored in zip(held, found, strict=True):
                if not is_stored:
                    self._add_lost(item.identifier, item.key.text)

    def _add_lost(self, identifier: str, key: str) -> None:
        now = self._clock()
        if now < self._blocked_until.get(identifier, now):
            return
        self._blocked_until.pop(identifier, None)  # keeps the dictionary sorted by time
        self._blocked_until[identifier] = now + REPUBLISH_INTERVAL_SECONDS
        if len(self._blocked_until) > BLOCKED_MAX:
            del self._blocked_until[next(iter(self._blocked_until))]
        self._lost[identifier] = key

    def take(self) -> dict[str, str]:
        """What the workers store in the step that is being built: identifier -> text of the key."""
        taken, self._lost = self._lost, {}
        return taken
