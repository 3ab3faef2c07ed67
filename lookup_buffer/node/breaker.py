"""A circuit breaker: after some failures in a row, no calls for a while.

Pure bookkeeping; the clock is an argument. `registrar` has one, `locate` and `arbiter` have one for
each server.
"""

from collections.abc import Callable
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
OPEN_SECONDS_MIN = 0.1
OPEN_SECONDS_MAX = 1.0


@dataclass(slots=True)
class Breaker:
    """Closed: calls pass. Open: calls are refused until a pause is over; then one call probes."""

    clock: Callable[[], float]
    failures_to_open: int = FAILURES_TO_OPEN
    open_seconds_min: float = OPEN_SECONDS_MIN
    open_seconds_max: float = OPEN_SECONDS_MAX
    _failures: int = 0
    _pause_seconds: float = 0.0
    _closed_at: float = 0.0

    @property
    def open(self) -> bool:
        return self._failures >= self.failures_to_open

    def allows(self) -> bool:
        return not self.open or self.clock() >= self._closed_at

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_seconds = 0.0

    def failed(self) -> None:
        self._failures += 1
        if self.open:
            self._pause_seconds = min(
                max(2 * self._pause_seconds, self.open_seconds_min), self.open_seconds_max
            )
            self._closed_at = self.clock() + self._pause_seconds
