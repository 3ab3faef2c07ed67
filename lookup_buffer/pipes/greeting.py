"""Greetings: those who have connected and are not peers yet, each on a thread of its own.

So who says nothing keeps nobody out; and so many are greeted at once, and no more, that a crowd of
those cannot take all threads.
"""

import threading
from collections.abc import Callable
from typing import Final

GREETINGS_MAX: Final = 256
HANDSHAKE_SECONDS: Final = 5.0
"""How long one may take."""


class Greetings:
    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(GREETINGS_MAX)

    def begin(self, greet: Callable[[], None]) -> bool:
        """Whether there was a place; then `greet` runs, and raises nothing."""
        if not self._places.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                greet()
            finally:
                self._places.release()

        threading.Thread(target=run, name="lb-pipe-greet", daemon=True).start()
        return True
