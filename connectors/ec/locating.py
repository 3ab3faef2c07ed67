"""The supply of an engine that only encodes: it wants to know what is stored already."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connectors.counters import PassTime
from connectors.ec.located import Located
from connectors.ec.meanings import Meaning
from connectors.ec.supply import Asked, ItemSupply
from connectors.ec.watch import Phase, RequestWatch, WatchedItem

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer


class EcLocating(ItemSupply):
    """Answers at once, so nobody is WAITING for it.

    Args:
        wait_seconds: how long a request may be held back, in all, until a pass has time to ask.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        located: Located,
        first_sights: PassTime,
        wait_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._located = located
        self._first_sights = first_sights
        self._wait_seconds = wait_seconds
        self._clock = clock

    def ask(self, watch: RequestWatch, needed: Sequence[WatchedItem]) -> Asked:
        if self._first_sights.is_over and watch.hold(self._clock(), self._wait_seconds):
            return Asked.LATER
        new = [item for item in needed if item.identifier not in watch.wanted]
        if new:
            self._locate(watch, new)
        watch.phase = Phase.ANSWERED
        return Asked.YES

    def _locate(self, watch: RequestWatch, items: list[WatchedItem]) -> None:
        keys = [item.key for item in items]
        found = self._first_sights.spend_on(
            lambda seconds: self._buffer.has_caches(keys, timeout=seconds)
        )
        for item, is_stored in zip(items, found, strict=True):
            if is_stored:
                self._located.add(item.identifier, watch.request_id)
                watch.wanted[item.identifier] = item
            else:
                watch.absent.add(item.identifier)
                watch.lacks(item)

    def holds(self, watch: RequestWatch, identifier: str) -> bool:
        return identifier in watch.wanted

    def promise(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        return identifier in self._located

    def drop(self, identifier: str, request_id: str) -> None:
        self._located.drop(identifier, request_id)
