"""The item source of an engine that only encodes: it looks up which items are stored already.

`EcGate` and `EcScheduler` call it on vLLM's scheduler thread.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connectors.ec.items import StoredItems, Variant
from connectors.ec.supply import ItemSource, Lookup
from connectors.ec.watch import Phase, RequestItem, RequestState
from connectors.pass_time import PassTime

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer


class LocatingSource(ItemSource):
    """The lookup ends within the call, so no request is FETCHING.

    Args:
        wait_seconds: limit for holding a request back until a pass has time for its lookup.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        stored_items: StoredItems,
        first_sights: PassTime,
        wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._stored_items = stored_items
        self._first_sights = first_sights
        self._wait_seconds = wait_seconds
        self._clock = clock

    def look_up(self, state: RequestState, needed: Sequence[RequestItem]) -> Lookup:
        if self._first_sights.is_over and state.hold_back(self._clock(), self._wait_seconds):
            return Lookup.DEFERRED
        new = [item for item in needed if item.identifier not in state.wanted]
        if new:
            self._locate(state, new)
        state.phase = Phase.RESOLVED
        return Lookup.STARTED

    def _locate(self, state: RequestState, items: list[RequestItem]) -> None:
        keys = [item.key for item in items]
        found = self._first_sights.spend_on(
            lambda seconds: self._buffer.has_caches(keys, timeout=seconds)
        )
        for item, is_stored in zip(items, found, strict=True):
            if is_stored:
                self._stored_items.add(item.identifier, state.request_id)
                state.wanted[item.identifier] = item
            else:
                state.absent.add(item.identifier)
                state.mark_missing(item)

    def holds(self, state: RequestState, identifier: str) -> bool:
        return identifier in state.wanted

    def promise(self, identifier: str, variants: Sequence[Variant]) -> bool:
        return identifier in self._stored_items

    def drop(self, identifier: str, request_id: str) -> None:
        self._stored_items.drop(identifier, request_id)
