"""A pace: so many things a second at most, and no more than a few at once (a token bucket).

Pure; the clock is an argument. One thread uses it.
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
        """How many of `most` may be done now. They count as done."""
        self._earn()
        taken = min(most, int(self._credit))
        self._credit -= taken
        return taken

    def wait_seconds(self, wanted: int) -> float:
        """Until `wanted` may be done at once, or as many as ever may."""
        self._earn()
        lacking = min(wanted, self._at_once) - self._credit
        return max(0.0, lacking / self.per_second)

    def _earn(self) -> None:
        now = self._clock()
        self._credit += (now - self._credited_at) * self.per_second
        self._credit = min(self._credit, float(self._at_once))
        self._credited_at = now
