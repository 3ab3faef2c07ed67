"""Budget: how long one operation may take, whatever it has to dial and to ask on its way."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from store.dialled import Access


class Budget:
    """The call timeout, and once the connect timeout for all dialling together. One thread's.

    What dialling takes is not taken from the call, so a call on a fresh connection has as long.
    """

    def __init__(self, access: Access) -> None:
        self.deadline = time.monotonic() + access.call_timeout_seconds
        self._dialling_left = access.connect_timeout_seconds

    @property
    def left(self) -> float:
        """Seconds; never below 0."""
        return max(self.deadline - time.monotonic(), 0.0)

    @contextmanager
    def dialling(self, share: int = 1) -> Iterator[float]:
        """Seconds that dialling may take within, where `share` servers are still to be dialled."""
        seconds = self._dialling_left / share
        start = time.monotonic()
        try:
            yield seconds
        finally:
            spent = min(time.monotonic() - start, seconds)
            self._dialling_left -= spent
            self.deadline += spent

    @contextmanager
    def half(self) -> Iterator[None]:
        """Within, half of what is left: whoever is asked after one that hangs has a chance too."""
        call, dialling = self.left / 2, self._dialling_left / 2
        self.deadline -= call
        self._dialling_left -= dialling
        try:
            yield
        finally:
            self.deadline += call
            self._dialling_left += dialling
