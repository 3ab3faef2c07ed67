"""Those who wait for a key that is not there yet, or for the right to produce it.

Woken when a client of this node inserts the key, when the store may have a record of it, or its
claim to give, and when their time is up. Runs on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.locator import Locator

LOOK_AGAIN_SECONDS = 1.0
"""What nobody tells, such as that a peer which failed answers again, is looked for so often."""


@dataclass(slots=True, eq=False)
class _Sleeper:
    again: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Vigil:
    """One who looks again and again; `cancel` ends it."""

    waiting: "Waiting"
    address: QualifiedKey
    until: float
    wake: Callable[[], None]
    _unwatch: Callable[[], None] | None = None
    _over: bool = False

    def begin(self) -> None:
        self._sleep()
        self._unwatch = self.waiting.locator.watch(self.address, self.wake)

    def cancel(self) -> None:
        """Idempotent."""
        self._over = True
        if self._unwatch is not None:
            self._unwatch()

    def _sleep(self) -> None:
        left = self.until - self.waiting.loop.time()
        self.waiting.sleep(self.address, max(0.0, min(left, LOOK_AGAIN_SECONDS)), self._look)

    def _look(self) -> None:
        if not self._over:
            if self.waiting.loop.time() < self.until:
                self._sleep()
            self.wake()


@dataclass(slots=True)
class Waiting:
    loop: asyncio.AbstractEventLoop
    locator: Locator
    _sleepers: dict[QualifiedKey, set[_Sleeper]] = field(default_factory=dict)

    def sleep(self, address: QualifiedKey, seconds: float, again: Callable[[], None]) -> None:
        """Call `again` once: when `address` arrives here, or after `seconds`."""
        sleeper = _Sleeper(again)
        sleeper.timer = self.loop.call_later(seconds, self._wake, address, sleeper)
        self._sleepers.setdefault(address, set()).add(sleeper)

    def watch(self, address: QualifiedKey, until: float, wake: Callable[[], None]) -> Vigil:
        """Call `wake` whenever it is worth looking again, and at `until` by the loop's clock.

        At first when no later change can be missed any more. Until the vigil is cancelled.
        """
        vigil = Vigil(self, address, until, wake)
        vigil.begin()
        return vigil

    def arrived(self, address: QualifiedKey) -> None:
        """The key is here now."""
        for sleeper in list(self._sleepers.get(address, ())):
            self._wake(address, sleeper)

    def _wake(self, address: QualifiedKey, sleeper: _Sleeper) -> None:
        sleepers = self._sleepers[address]
        sleepers.discard(sleeper)
        if not sleepers:
            del self._sleepers[address]
        if sleeper.timer is not None:
            sleeper.timer.cancel()
        sleeper.again()
