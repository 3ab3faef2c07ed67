"""One `select` of an absent key: fetched as soon as a node has it, or a miss at its deadline.

A store that hangs is a miss, in time for the client. Created by `desk` and `prefetches`; runs on
the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.loans import Loans
from lookup_buffer.node.resolver import Resolver
from lookup_buffer.node.waiting import Waiting, Watcher
from lookup_buffer.times import CALL_SECONDS, NODE_SHARE


@dataclass(slots=True, eq=False)
class Selection:
    """`look(reason, last)` tries to pin the item and returns whether the request is settled.

    `reason` is why the last fetch failed; `last`: there will be no further attempt.
    """

    loop: asyncio.AbstractEventLoop
    resolver: Resolver | Loans
    waiting: Waiting
    address: QualifiedKey
    until: float
    look: Callable[[MaybeMissed, bool], bool]
    fetching: Callable[[int], None]
    _watcher: Watcher | None = None
    _bound: asyncio.TimerHandle | None = None
    _under_way: bool = False
    _fetching: bool = False
    _again: bool = False
    _over: bool = False

    def begin(self) -> None:
        """Start the first attempt. If the key is not even located shortly after the deadline, it
        is a miss."""
        last = self.until + NODE_SHARE * CALL_SECONDS
        self._bound = self.loop.call_at(last, self._too_late)
        self.attempt()

    def attempt(self) -> None:
        """Locate and fetch; if something changes meanwhile, repeat it afterwards."""
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
        elif self._watcher is None:
            self._watcher = self.waiting.watch(self.address, self.until, self.attempt)
        elif self._again:
            self.attempt()

    def _too_late(self) -> None:
        if not self._fetching:  # a fetch has a deadline of its own
            self.look(MissReason.STORE_DOWN, True)
            self._end()

    def _end(self) -> None:
        self._over = True
        if self._bound is not None:
            self._bound.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
