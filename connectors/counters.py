"""What the connector counts, and how often it may speak about it.

`Counters` and `RateLimitedLog` may be used from any thread of one process.
"""

import logging
import threading
import time
from collections.abc import Callable

# A child of vLLM's own logger: the host configures handlers for `vllm` and for nothing else, so
# under our own name warnings would come out bare and everything below them not at all.
logger = logging.getLogger("vllm.lookup_buffer")

LOG_INTERVAL_SECONDS = 30.0


class Counters:
    """Named counts since the start. A name is an event and, behind a colon, its reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, int]:
        """What was added since the last `take`."""
        with self._lock:
            fresh = {
                name: count - self._taken.get(name, 0)
                for name, count in self._counts.items()
                if count != self._taken.get(name, 0)
            }
            self._taken.update(self._counts)
            return fresh


class RateLimitedLog:
    """Reports at most once per reason and interval; the next line says how many it stands for.

    Reasons are few and fixed, so the memory is bounded.
    """

    def __init__(
        self,
        interval_seconds: float = LOG_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._spoken: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def report(self, reason: str, message: str, *args: object) -> None:
        now = self._clock()
        with self._lock:
            last = self._spoken.get(reason)
            if last is not None and now - last < self._interval_seconds:
                self._silent[reason] = self._silent.get(reason, 0) + 1
                return
            self._spoken[reason] = now
            silent = self._silent.pop(reason, 0)
        more = f" ({silent} more since the last such line)" if silent else ""
        logger.warning("lookup buffer: " + message + "%s", *args, more)  # noqa: G003
