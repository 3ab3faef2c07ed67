"""Budget: the deadline of one operation, including everything that it connects to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from store.dialled import Access


class Budget:
    """The call timeout, plus the connect timeout once for all connections. Not thread-safe.

    Time for connecting does not reduce the time for the call.
    """

    def __init__(self, access: Access) -> None:
        self.deadline = time.monotonic() + access.call_timeout_seconds
        self._connect_left = access.connect_timeout_seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; never below 0."""
        return max(self.deadline - time.monotonic(), 0.0)

    @contextmanager
    def connecting(self, share: int = 1) -> Iterator[float]:
        """Yields the seconds for one connection, if `share` servers are still to be connected."""
        seconds = self._connect_left / share
        start = time.monotonic()
        try:
            yield seconds
        finally:
            spent = min(time.monotonic() - start, seconds)
            self._connect_left -= spent
            self.deadline += spent

    @contextmanager
    def half(self) -> Iterator[None]:
        """Halves the time left inside the block, so the next server also gets time if this one
        hangs.
        """
        call, connect = self.left / 2, self._connect_left / 2
        self.deadline -= call
        self._connect_left -= connect
        try:
            yield
        finally:
            self.deadline += call
            self._connect_left += connect
