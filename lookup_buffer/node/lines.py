"""Work queues for the store, one for each of its servers.

A frozen or slow server delays only its own queue, and a circuit breaker for each queue keeps a dead
server from costing every call its timeout. `LineArbiter` submits from the loop's thread; the work
runs on up to 16 threads (`lb-claim`).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lookup_buffer.node.breaker import Breaker

THREADS_MAX = 16
"""Queues that run at once. If more servers freeze together, all are assumed to be frozen."""

_log = logging.getLogger(__name__)

Work = Callable[[Breaker], object]
"""Checks the breaker first, and reports success or failure to it."""


@dataclass(slots=True)
class _Line:
    breaker: Breaker = field(default_factory=lambda: Breaker(time.monotonic))
    """Used by one call at a time."""
    pieces: deque[Work] = field(default_factory=deque)
    """The first one is running."""


class Lines:
    def __init__(self, thread_name_prefix: str) -> None:
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix)

    def submit(self, place: str, work: Work) -> None:
        """Queue `work` behind earlier work of the same server. Does nothing after `close`."""
        with self._changed:
            if self._closed:
                return
            line = self._lines.setdefault(place, _Line())
            line.pieces.append(work)
            if len(line.pieces) == 1:
                self._threads.submit(self._do_first, line)

    def close(self, seconds: float) -> None:
        """Finish the queued work within `seconds`; the rest is dropped."""
        with self._changed:
            self._changed.wait_for(self._all_done, seconds)
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _all_done(self) -> bool:
        return not any(line.pieces for line in self._lines.values())

    def _do_first(self, line: _Line) -> None:
        try:
            line.pieces[0](line.breaker)
        except Exception:  # noqa: BLE001 -- a bug; the caller has a deadline of its own
            _log.exception("a claim's call of the store failed (others continue): this is a bug")
        finally:
            with self._changed:
                line.pieces.popleft()
                if line.pieces and not self._closed:
                    self._threads.submit(self._do_first, line)
                self._changed.notify_all()
