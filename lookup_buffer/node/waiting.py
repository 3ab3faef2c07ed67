"""Those who wait for a key that is not there yet.

Woken when a client of this node inserts it; what other nodes publish they find by asking again,
each at its own pace. Runs on the loop's thread.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.inventory import Address

ASK_AGAIN_SECONDS = (0.005, 0.01, 0.02, 0.05)
"""How long who waits pauses before it asks the store again; the last one repeats."""


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

    def watch(self, address: Address, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` whenever something may have become of `address`, until the answer is
        called: it was published, anywhere, or its claim was released or ended.

        Nothing that happens after this call goes unnoticed; a call may also be for nothing.
        """
        pauses = itertools.chain(ASK_AGAIN_SECONDS, itertools.repeat(ASK_AGAIN_SECONDS[-1]))
        watching = True

        def woken() -> None:
            if watching:
                self.sleep(address, next(pauses), woken)
                notify()

        def stop() -> None:
            nonlocal watching
            watching = False

        self.sleep(address, next(pauses), woken)
        return stop

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
