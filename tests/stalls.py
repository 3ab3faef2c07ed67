"""Stalls: when this process did not run, whatever its threads had to do.

The machine gave its cores to others, or one thread held the interpreter: Python's collector does,
for as long as it walks over all objects. A thread that only sleeps notices it by waking late, and
what it noticed can be taken off what a call took. Waiting for a server is no stall: others run.
"""

import threading
import time

from nodes import wait_until

TICK_SECONDS = 0.005
NOTICED_SECONDS = 0.02
"""What several threads cost one another when they take turns is less."""


class Stalls(threading.Thread):
    """Use it in `with`, around what is measured."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._spans: list[tuple[float, float]] = []
        self._awake_at = time.monotonic()
        self._ended = threading.Event()

    def __enter__(self) -> "Stalls":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.is_set():
            due = time.monotonic() + TICK_SECONDS
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - due > NOTICED_SECONDS:
                self._spans.append((due, now))
            self._awake_at = now

    def seconds_between(self, start: float, end: float) -> float:
        """How much of that time was lost, in seconds. Both are a time.monotonic() of the past."""
        wait_until(lambda: self._awake_at >= end, 5.0, "the last stall is noticed")
        lost = (min(end, until) - max(start, since) for since, until in self._spans)
        return sum(seconds for seconds in lost if seconds > 0)
