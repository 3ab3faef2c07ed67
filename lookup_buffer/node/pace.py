"""A rate limiter: a token bucket.

Pure bookkeeping; the clock is an argument. Used by `backlog` under its lock.
"""

from collections.abc import Callable


class Pace:
    def __init__(self, per_second: float, at_once: int, clock: Callable[[], float]) -> None:
        self.per_second = per_second
        self._at_once = at_once
        self._clock = clock
        self._credit = float(at_once)
        self._credited_at = clock()

    def take(self, most: int) -> int:
        """How many of `most` are allowed now; they are counted as done."""
        self._earn()
        taken = min(most, int(self._credit))
        self._credit -= taken
        return taken

    def wait_seconds(self, wanted: int) -> float:
        """Seconds until `wanted` are allowed at once, or the largest possible burst."""
        self._earn()
        lacking = min(wanted, self._at_once) - self._credit
        return max(0.0, lacking / self.per_second)

    def _earn(self) -> None:
        now = self._clock()
        self._credit += (now - self._credited_at) * self.per_second
        self._credit = min(self._credit, float(self._at_once))
        self._credited_at = now
