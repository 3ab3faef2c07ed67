"""Stats and threads of a device lane. Thread-safe.

`LaneStats` counts what a lane did and which operations failed, by reason. It logs each reason once.

`DaemonThreads` is a thread pool with a bounded queue of jobs.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from lookup_buffer.protocol.fields import Fallback

QUEUE_MAX: Final = 256

logger = logging.getLogger(__name__)


class LaneStats:
    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> int:
        """Increment this counter, and return its new value."""
        with self._lock:
            self._counts[name] += 1
            return self._counts[name]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def warn(self, reason: str, why: object) -> None:
        if self.count(f"warned:{reason}") == 1:
            logger.warning(
                "lookup buffer: the %s lane was not used, and the bytes came over the hosts: %s "
                "(%s; logged once, counted by the node as lane_fallbacks_%s)",
                self._lane, why, reason, reason,
            )  # fmt: skip

    def warn_of_serving(self, why: object) -> None:
        """Log once that a request of another process failed."""
        if self.count("warned:serving") == 1:
            logger.warning(
                "lookup buffer: a reader's %s lane was closed, and its bytes go over the hosts: "
                "%s (logged once, counted by the reader's node as lane_fallbacks_peer_failed)",
                self._lane, why,
            )  # fmt: skip


class DaemonThreads:
    """Thread-safe. The threads are daemons: one that hangs in a device's driver ends with the
    process and does not delay its exit."""

    def __init__(self, stats: LaneStats, name: str, threads: int) -> None:
        self._stats = stats
        self._closed = False
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_MAX)
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue the job. Returns False if the queue is full, or the pool is closed. Never waits."""
        if self._closed:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """Finish the running jobs, waiting at most `timeout` seconds; drop the queued ones.
        Idempotent."""
        self._closed = True
        deadline = time.monotonic() + timeout
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 -- top of a thread; the node has a deadline
                self._stats.warn(Fallback.DEVICE, error)
            del job
