"""Loans: reads of hand-offs that are on other nodes.

A hand-off may be removed or replaced at any moment, so a copy of it is never kept: each reader gets
its own copy, which is freed with its pin. Called by `desk` and `prefetches` on the loop's thread;
`fetcher` copies on `lb-fetch`.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.fetcher import FETCH_OWNER, Fetched, Fetcher
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.locator import Located, Locator
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.resolver import Settle
from lookup_buffer.node.shelf import Held, Shelf


@dataclass(slots=True)
class Loans:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    locator: Locator
    fetcher: Fetcher
    _lent: dict[QualifiedKey, Item] = field(default_factory=dict)
    """Copies that the reader whose callback is running may pin."""

    def resolve(
        self,
        addresses: list[QualifiedKey],
        settle: Callable[[QualifiedKey], Settle],
        on_fetch: Callable[[int], None] | None = None,
    ) -> None:
        """As `Resolver.resolve`, but `hold` finds the item only during the call of `settle`."""
        for address in addresses:
            located = partial(self._located, address, settle(address), on_fetch)
            self.locator.ask([address], located)

    def hold(self, address: QualifiedKey, owner: int, ranks: Iterable[int] | None) -> Held | None:
        """A pin for `owner` on the copy that was just fetched for it; None if there is none."""
        item = self._lent.get(address)
        return None if item is None else self.shelf.pin(item, owner, ranks)

    def _located(
        self,
        address: QualifiedKey,
        settle: Settle,
        on_fetch: Callable[[int], None] | None,
        found: list[Located],
    ) -> None:
        located = found[0]
        if not located.sources or located.record is None:
            settle(located.reason)
            return
        if on_fetch is not None:
            on_fetch(located.record.nbytes)
        done = partial(call_from_thread, self.loop, self._fetched, address, settle)
        self.fetcher.fetch(address, located, done, loan=True)

    def _fetched(self, address: QualifiedKey, settle: Settle, fetched: Fetched) -> None:
        if fetched.held is None:
            if fetched.reason == MissReason.STALE:
                self.locator.forget(address)
            settle(fetched.reason)
            return
        self._lent[address] = fetched.held.item
        try:
            settle("")
        finally:
            del self._lent[address]
            self.shelf.release([fetched.held.ticket], FETCH_OWNER)
