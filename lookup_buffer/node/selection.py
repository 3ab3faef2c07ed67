"""A selection: one `select` of what is not here, until it is or its time is up.

Fetched as soon as some node has it. Runs on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lookup_buffer.inventory import Address
from lookup_buffer.node.resolver import Resolver
from lookup_buffer.node.waiting import Vigil, Waiting


@dataclass(slots=True, eq=False)
class Selection:
    """`look(reason, last)` looks whether the item is here and says whether that was the end of it.

    `reason` is why it was not brought here, `last` that nobody will look again.
    """

    loop: asyncio.AbstractEventLoop
    resolver: Resolver
    waiting: Waiting
    address: Address
    until: float
    look: Callable[[str, bool], bool]
    fetching: Callable[[int], None]
    _vigil: Vigil | None = None
    _under_way: bool = False
    _again: bool = False
    _over: bool = False

    def attempt(self) -> None:
        """Locate and fetch it; once more after that, if something changed meanwhile."""
        if self._over:
            return
        if self._under_way:
            self._again = True
            return
        self._under_way = True
        self._again = False
        self.resolver.resolve([self.address], lambda _: self._settled, self.fetching)

    def _settled(self, reason: str) -> None:
        self._under_way = False
        if self.look(reason, self.loop.time() >= self.until):
            self._over = True
            if self._vigil is not None:
                self._vigil.cancel()
        elif self._vigil is None:
            self._vigil = self.waiting.watch(self.address, self.until, self.attempt)
        elif self._again:
            self.attempt()
