"""What vLLM's own encoder cache holds and the buffer has lost, to be published again.

vLLM asks a connector for nothing that its own cache answers, so a request for such an item would
never bring it back for others: a node was lost, a time to live is over, a namespace was
invalidated. Asked about once for each request. Owned by vLLM's scheduler thread.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from connectors.ec.engine_cache import EngineCache
from connectors.ec.watch import RequestWatch
from connectors.pass_time import PassTime

if TYPE_CHECKING:
    from lookup_buffer.client import LookupBuffer

AGAIN_SECONDS = 1.0
"""An item is given to the workers so often at most: they store it in the background."""
GIVEN_MAX = 4096


class EcRepublishing:
    """
    Args:
        engine_cache: what vLLM's own cache holds, and under which keys that may be stored.
        first_sights: what a pass may wait; shared with all who ask for a request's items.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        engine_cache: EngineCache,
        first_sights: PassTime,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._engine_cache = engine_cache
        self._first_sights = first_sights
        self._clock = clock
        self._lost: dict[str, str] = {}
        self._given: dict[str, float] = {}
        """Until when an item that was given to the workers is not given again."""

    def look(self, watch: RequestWatch) -> None:
        """Ask whether the request's items that vLLM's cache holds are stored. Where the pass has no
        time left, only this host is asked: one copy more does no harm."""
        held = [
            item for item in watch.items if self._engine_cache.key_of(item.identifier) == item.key
        ]
        if not held:
            return
        keys = [item.key for item in held]
        found = self._first_sights.spend_on(
            lambda seconds: self._buffer.has_caches(keys, timeout=seconds)
        )
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
