"""The resolver: how a key that is not here comes here.

Locate, then fetch; one flight per key whoever asks, and everybody who asked is told how it went.
Runs on the loop's thread; the fetcher works on its own and calls back through the loop.
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
"""Told "" when the item is here (look at once: it is held until all were told), else the reason."""


@dataclass(slots=True)
class Flight:
    """One key on its way. `fetching_bytes` is set once a transfer has begun."""

    waiting: list[Settle] = field(default_factory=list)
    fetching_bytes: int | None = None
    doubted: bool = False
    """What is being located may be out of date: who has it is to be asked once more."""
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
        """Bring all `addresses` here; `settle(address)` makes the callback for each.

        `on_fetch(nbytes)` is called when bytes of one of them begin to move.
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
        """A client of this node inserted the key: whoever waits for it has it."""
        if address in self._flights:
            self._settle(address, "")

    def published(self, address: QualifiedKey, *, located: bool) -> None:
        """The store said so to somebody: "nobody has it", read before, does not stand. `located`:
        it said so on the locator's way, which knows the record by that."""
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
                continue  # it arrived meanwhile
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
