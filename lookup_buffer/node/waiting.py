"""Waiting for a key that is absent, or for its claim.

A waiter is resumed when a client of this node inserts the key, when the store may have its record
or a free claim, and at its deadline. Used by `read`, `insert`, `claims` and `takes` on the loop's
thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.locate import Locator

LOOK_AGAIN_SECONDS = 1.0
"""A waiter is resumed at least this often: some changes cause no notification, such as the
recovery of a peer that failed."""


@dataclass(slots=True, eq=False)
class _Waiter:
    again: Callable[[], None]
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Watcher:
    """One waiter that is resumed repeatedly until `cancel`."""

    waiting: "Waiting"
    address: QualifiedKey
    until: float
    wake: Callable[[], None]
    _unwatch: Callable[[], object] | None = None
    _asleep: Callable[[], None] | None = None
    _over: bool = False

    def begin(self) -> None:
        self._sleep()
        self._unwatch = self.waiting.locator.watch(self.address, self.wake)

    def cancel(self) -> None:
        """Idempotent."""
        self._over = True
        for end in (self._unwatch, self._asleep):
            if end is not None:
                end()

    def _sleep(self) -> None:
        left = self.until - self.waiting.loop.time()
        seconds = max(0.0, min(left, LOOK_AGAIN_SECONDS))
        self._asleep = self.waiting.sleep(self.address, seconds, self._look)

    def _look(self) -> None:
        if not self._over:
            if self.waiting.loop.time() < self.until:
                self._sleep()
            self.wake()


@dataclass(slots=True)
class Waiting:
    loop: asyncio.AbstractEventLoop
    locator: Locator
    _waiters: dict[QualifiedKey, set[_Waiter]] = field(default_factory=dict)

    def sleep(
        self, address: QualifiedKey, seconds: float, again: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `again` once: when `address` arrives here, or after `seconds`.

        Returns the cancellation, which is idempotent.
        """
        waiter = _Waiter(again)
        waiter.timer = self.loop.call_later(seconds, self._wake, address, waiter)
        self._waiters.setdefault(address, set()).add(waiter)
        return partial(self._forget, address, waiter)

    async def pause(self, address: QualifiedKey, seconds: float) -> None:
        """Return when `address` arrives here, or after `seconds`."""
        event = asyncio.Event()
        cancel = self.sleep(address, seconds, event.set)
        try:
            await event.wait()
        finally:
            cancel()

    def watch(self, address: QualifiedKey, until: float, wake: Callable[[], None]) -> Watcher:
        """Call `wake` whenever another attempt may succeed, and at `until` by the loop's clock.

        The first call comes when no later change can be missed. Calls continue until `cancel`.
        """
        watcher = Watcher(self, address, until, wake)
        watcher.begin()
        return watcher

    @contextmanager
    def changes(
        self, address: QualifiedKey, until: float
    ) -> Iterator[Callable[[], Awaitable[None]]]:
        """A coroutine function: waits until another attempt may succeed, or until `until`.

        It returns once for all changes since its last return; the first call returns when no later
        change can be missed.
        """
        event = asyncio.Event()
        watchers: list[Watcher] = []  # most requests never wait

        async def changed() -> None:
            if not watchers:
                watchers.append(self.watch(address, until, event.set))
            await event.wait()
            event.clear()

        try:
            yield changed
        finally:
            for watcher in watchers:
                watcher.cancel()

    def arrived(self, address: QualifiedKey) -> None:
        """A client of this node inserted the key: resume its waiters."""
        for waiter in list(self._waiters.get(address, ())):
            self._wake(address, waiter)

    def _wake(self, address: QualifiedKey, waiter: _Waiter) -> None:
        self._forget(address, waiter)
        waiter.again()

    def _forget(self, address: QualifiedKey, waiter: _Waiter) -> None:
        waiters = self._waiters.get(address, set())
        waiters.discard(waiter)
        if not waiters:
            self._waiters.pop(address, None)
        if waiter.timer is not None:
            waiter.timer.cancel()
