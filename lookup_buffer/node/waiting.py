"""Those who wait for a key that is not there yet.

Woken when a client of this node inserts it; what other nodes publish they find by asking again,
each at its own pace. Runs on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.inventory import Address


@dataclass(slots=True, eq=False)
class _Sleeper:
    again: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Waiting:
    loop: asyncio.AbstractEventLoop
    _sleepers: dict[Address, set[_Sleeper]] = field(default_factory=dict)

    def sleep(self, address: Address, seconds: float, again: Callable[[], None]) -> None:
        """Call `again` once: when `address` arrives here, or after `seconds`."""
        sleeper = _Sleeper(again)
        sleeper.timer = self.loop.call_later(seconds, self._wake, address, sleeper)
        self._sleepers.setdefault(address, set()).add(sleeper)

    def arrived(self, address: Address) -> None:
        """The key is here now."""
        for sleeper in list(self._sleepers.get(address, ())):
            self._wake(address, sleeper)

    def _wake(self, address: Address, sleeper: _Sleeper) -> None:
        sleepers = self._sleepers[address]
        sleepers.discard(sleeper)
        if not sleepers:
            del self._sleepers[address]
        if sleeper.timer is not None:
            sleeper.timer.cancel()
        sleeper.again()
