"""A selection: one `select` of what is not here, until it is or its time is up.

Fetched as soon as some node has it. A store that hangs is a miss, in time for its client. Runs on
the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.loans import Loans
from lookup_buffer.node.resolver import Resolver
from lookup_buffer.node.waiting import Vigil, Waiting
from lookup_buffer.times import CALL_SECONDS, NODE_SHARE


@dataclass(slots=True, eq=False)
class Selection:
    """`look(reason, last)` looks whether the item is here and says whether that was the end of it.

    `reason` is why it was not brought here, `last` that nobody will look again.
    """

    loop: asyncio.AbstractEventLoop
    resolver: Resolver | Loans
    waiting: Waiting
    address: QualifiedKey
    until: float
    look: Callable[[MaybeMissed, bool], bool]
    fetching: Callable[[int], None]
    _vigil: Vigil | None = None
    _bound: asyncio.TimerHandle | None = None
    _under_way: bool = False
    _fetching: bool = False
    _again: bool = False
    _over: bool = False

    def begin(self) -> None:
        """Attempt it, once; what is not even located when the client waits no longer is a miss."""
        last = self.until + NODE_SHARE * CALL_SECONDS
        self._bound = self.loop.call_at(last, self._too_late)
        self.attempt()

    def attempt(self) -> None:
        """Locate and fetch it; once more after that, if something changed meanwhile."""
        if self._over:
            return
        if self._under_way:
            self._again = True
            return
        self._under_way = True
        self._again = False
        self.resolver.resolve([self.address], lambda _: self._settled, self._begun)

    def _begun(self, nbytes: int) -> None:
        if not self._over:
            self._fetching = True
            self.fetching(nbytes)

    def _settled(self, reason: MaybeMissed) -> None:
        if self._over:
            return
        self._under_way = self._fetching = False
        if self.look(reason, self.loop.time() >= self.until):
            self._end()
        elif self._vigil is None:
            self._vigil = self.waiting.watch(self.address, self.until, self.attempt)
        elif self._again:
            self.attempt()

    def _too_late(self) -> None:
        if not self._fetching:  # which has a bound of its own
            self.look(MissReason.STORE_DOWN, True)
            self._end()

    def _end(self) -> None:
        self._over = True
        if self._bound is not None:
            self._bound.cancel()
        if self._vigil is not None:
            self._vigil.cancel()
