"""Whether the machine is there: what a test that counts on time must not be blamed for."""

import threading
import time
from collections.abc import Callable
from typing import Self

EVERY_SECONDS = 0.02


class Pulse:
    """Looks at something, by a thread of its own, again and again: how long did it ever take?

    Of what the looks themselves need nothing must be under test.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._longest = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse")

    def take(self) -> float:
        """The longest time, in seconds, that a look and the pause before it took beyond the pause,
        since this was last asked."""
        longest, self._longest = self._longest, 0.0
        return longest

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(EVERY_SECONDS):
            self._look()
            began, before = time.monotonic(), began
            self._longest = max(self._longest, began - before - EVERY_SECONDS)
