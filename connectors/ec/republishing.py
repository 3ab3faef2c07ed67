"""What vLLM's own encoder cache holds and this host's node has lost, to be stored again.

vLLM asks a connector for nothing that its own cache answers, so a request for such an item would
never bring it back for others: a node was lost, a time to live is over, a namespace was
invalidated. Looked for once for each request, on this host alone: that takes no message, and what
is said of other hosts may be out of date while a node is not yet known to be dead. Where another
host does have it, this is one copy more. (Of items with a time to live this look-up knows nothing:
they are offered again, once a second at most, and the node says that they exist.) Owned by vLLM's
scheduler thread.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from connectors.ec.engine_cache import EngineCache
from connectors.ec.watch import RequestWatch

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

AGAIN_SECONDS = 1.0
"""An item is given to the workers so often at most: they store it in the background."""
GIVEN_MAX = 4096


class EcRepublishing:
    """
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
        self._given: dict[str, float] = {}
        """Until when an item that was given to the workers is not given again."""

    def look(self, watch: RequestWatch) -> None:
        """See whether this host still holds the request's items that vLLM's cache holds."""
        key_of = self._engine_cache.key_of
        held = [item for item in watch.items if key_of(item.identifier) == item.key]
        if held:
            found = self._buffer.has_caches([item.key for item in held], timeout=0.0)
            for item, is_stored in zip(held, found, strict=True):
                if not is_stored:
                    self._note(item.identifier, item.key.text)

    def _note(self, identifier: str, key: str) -> None:
        now = self._clock()
        if now < self._given.get(identifier, now):
            return
        self._given.pop(identifier, None)  # the dictionary is in the order of the times
        self._given[identifier] = now + AGAIN_SECONDS
        if len(self._given) > GIVEN_MAX:
            del self._given[next(iter(self._given))]
        self._lost[identifier] = key

    def take(self) -> dict[str, str]:
        """What the workers are to store in the step that is being built: identifier -> key."""
        taken, self._lost = self._lost, {}
        return taken
