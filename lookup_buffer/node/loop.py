"""The node's event loop, which measures how long it is blocked, and calls into it from threads.

An iteration of the loop is blocked time: no other request is answered meanwhile. Each one longer
than BLOCKED_SECONDS is reported; if the log level is debug, it is logged, and by `BlockedLog`
where it is.
`granted` awaits what another request, peer or store may grant until a deadline.
`call_from_thread` is called on every thread of the node that starts with `lb-`.
"""

import asyncio
import logging
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, TypeVar

BLOCKED_SECONDS: Final = 0.02

_log = logging.getLogger(__name__)
T = TypeVar("T")


class _TimedSelector(selectors.DefaultSelector):
    """Measures the time between the end of one `select` and the next: an iteration's callbacks."""

    def __init__(self, blocked: Callable[[float], None]) -> None:
        super().__init__()
        self._blocked = blocked
        self.busy_since: float | None = None
        """None while the loop waits for events, by `time.monotonic`."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.busy_since is not None:
            seconds = time.monotonic() - self.busy_since
            self.busy_since = None
            if seconds > BLOCKED_SECONDS:
                self._blocked(seconds)
                _log.debug("the loop was blocked for %.3f s", seconds)
        events = super().select(timeout)
        self.busy_since = time.monotonic()
        return events


class NodeLoop(asyncio.SelectorEventLoop):
    """`blocked` is called, on the loop's thread, with the seconds of each long iteration."""

    def __init__(self, blocked: Callable[[float], None]) -> None:
        self.selector = _TimedSelector(blocked)
        super().__init__(self.selector)


class BlockedLog:
    """Logs the stack of a loop that is blocked, once for each time, on the thread `lb-blocked`."""

    def __init__(self, loop: NodeLoop) -> None:
        self._selector = loop.selector
        self._thread_id = 0
        self._closing = threading.Event()

    def start(self) -> None:
        """Watch the loop, which runs on this thread, if debug messages are logged."""
        self._thread_id = threading.get_ident()
        if _log.isEnabledFor(logging.DEBUG):
            threading.Thread(target=self._run, name="lb-blocked", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        logged = None
        while not self._closing.wait(BLOCKED_SECONDS / 2):
            since = self._selector.busy_since
            if since is None or since == logged or time.monotonic() - since < BLOCKED_SECONDS:
                continue
            frame = sys._current_frames().get(self._thread_id)
            if self._selector.busy_since == since and frame is not None:
                logged = since
                _log.debug("the loop is blocked here:\n%s", "".join(traceback.format_stack(frame)))


def call_from_thread(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    """Schedule `function` on the loop's thread. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        pass  # closed: the node is shutting down, and no request waits for the answer


async def granted(
    grant: "asyncio.Future[T]", until: float | None, undo: Callable[[T], object] = lambda _: None
) -> T:
    """The result of `grant`, which takes effect when it is set: also if that is in the turn of the
    deadline. If it is in the turn of a cancellation, the result is undone. A grant that comes later
    finds that it is cancelled.

    Raises:
        TimeoutError: there is no result at `until`, by the loop's clock.
    """
    try:
        async with asyncio.timeout_at(until):
            return await grant
    except TimeoutError:
        if grant.cancelled():
            raise
        return grant.result()
    except asyncio.CancelledError:
        if not grant.cancelled():
            undo(grant.result())
        raise
