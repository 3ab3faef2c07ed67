"""The resolver: locates an absent key and fetches it, single-flight.

All requests for a key share one look-up and one transfer. Called by `desk` (through `selection`),
`prefetches` and `claims` on the loop's thread; `fetcher` works on `lb-fetch` and calls back on the
loop.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import MaybeMissed
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.fetcher import FETCH_OWNER, Fetched, Fetcher
from lookup_buffer.node.locator import Located, Locator
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.shelf import Shelf

Settle = Callable[[MaybeMissed], None]
"""Called with "" when the item is here (pin it at once: it is held only until all callbacks
ran), or with the reason of the miss."""


@dataclass(slots=True)
class Flight:
    """One key in flight. `fetching_bytes` is set once a transfer has begun."""

    waiting: list[Settle] = field(default_factory=list)
    fetching_bytes: int | None = None
    doubted: bool = False
    """The running look-up may be out of date: repeat it."""
    on_fetch: list[Callable[[int], None]] = field(default_factory=list)


@dataclass(slots=True)
class Resolver:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    locator: Locator
    fetcher: Fetcher
    _flights: dict[QualifiedKey, Flight] = field(default_factory=dict)

    def resolve(
        self,
        addresses: list[QualifiedKey],
        settle: Callable[[QualifiedKey], Settle],
        on_fetch: Callable[[int], None] | None = None,
    ) -> None:
        """Fetch all `addresses`; `settle(address)` makes the callback for each.

        `on_fetch(nbytes)` is called when a transfer begins.
        """
        unasked = []
        for address in addresses:
            flight = self._flights.get(address)
            if flight is None:
                flight = self._flights[address] = Flight()
                unasked.append(address)
            flight.waiting.append(settle(address))
            if on_fetch is not None:
                if flight.fetching_bytes is not None:
                    on_fetch(flight.fetching_bytes)
                flight.on_fetch.append(on_fetch)
        if unasked:
            self.locator.ask(unasked, partial(self._located, unasked))

    def arrived(self, address: QualifiedKey) -> None:
        """A client of this node inserted the key: settle its requests."""
        if address in self._flights:
            self._settle(address, "")

    def published(self, address: QualifiedKey, *, located: bool) -> None:
        """A reply of the store showed that the key is stored: an earlier "absent" is out of
        date. `located`: the locator got the record from that reply."""
        if not located:
            self.locator.forget(address)
        flight = self._flights.get(address)
        if flight is not None and flight.fetching_bytes is None:
            flight.doubted = True

    def _located(self, addresses: list[QualifiedKey], found: list[Located]) -> None:
        doubted = []
        for address, located in zip(addresses, found, strict=True):
            flight = self._flights.get(address)
            if flight is None:
                continue  # it was inserted meanwhile
            was_doubted, flight.doubted = flight.doubted, False
            if not located.sources or located.record is None:
                if was_doubted:
                    doubted.append(address)
                    continue
                self._settle(address, located.reason)
                continue
            flight.fetching_bytes = located.record.nbytes
            for begun in flight.on_fetch:
                begun(located.record.nbytes)
            fetched = partial(call_from_thread, self.loop, self._fetched, address)
            self.fetcher.fetch(address, located, fetched)
        if doubted:
            self.locator.ask(doubted, partial(self._located, doubted))

    def _fetched(self, address: QualifiedKey, fetched: Fetched) -> None:
        self._settle(address, "" if fetched.held or self.shelf.holds(address) else fetched.reason)
        if fetched.held is not None:
            self.shelf.release([fetched.held.ticket], FETCH_OWNER)

    def _settle(self, address: QualifiedKey, reason: MaybeMissed) -> None:
        flight = self._flights.pop(address, None)
        for settle in flight.waiting if flight else ():
            settle(reason)
