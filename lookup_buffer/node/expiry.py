"""Removes the items whose time to live is over: some in each turn of the loop.

So many may expire together that to remove them takes seconds. Until an item is removed no look-up
finds it. Called by `registrar` with each beat.
"""

import asyncio
from dataclasses import dataclass

from lookup_buffer.node.arena import Arena


@dataclass(slots=True)
class Expiry:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    _is_removing: bool = False

    def begin(self) -> None:
        """Remove all that has expired: the first of them now."""
        if not self._is_removing:
            self._go_on()

    def _go_on(self) -> None:
        self._is_removing = False
        if self.arena.remove_expired():
            self._is_removing = True
            self.loop.call_soon(self._go_on)
