"""Crew: threads of a lane, and the bounded queue of what they have to do."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from lookup_buffer.device.stats import Notes
from lookup_buffer.lane import Fallback

QUEUE_MAX: Final = 256


class Crew:
    """Thread-safe. The threads are daemons: one that hangs in a device's driver ends with the
    process, and holds nobody up before."""

    def __init__(self, notes: Notes, name: str, threads: int) -> None:
        self._notes = notes
        self._closed = False
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_MAX)
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def soon(self, job: Callable[[], None]) -> bool:
        """Have it done; False where too much is waiting already. Never waits."""
        if self._closed:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """What was begun is finished, within that time; what was not is left. Idempotent."""
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
                self._notes.warn(Fallback.DEVICE, error)
            del job
