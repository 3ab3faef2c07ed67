"""Lines: work on the store, one piece after another for each of its servers.

A server that is frozen or slow holds up its own line and no other, and a breaker for each line
keeps a dead one from costing every piece its timeout. Any thread may submit; the work is done on
threads of this module's.
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
"""Lines that move at once. More servers than these do not freeze together, or all of them do."""

_log = logging.getLogger(__name__)

Work = Callable[[Breaker], object]
"""To ask the breaker first, and to tell it how it went."""


@dataclass(slots=True)
class _Line:
    breaker: Breaker = field(default_factory=lambda: Breaker(time.monotonic))
    """Used by one piece of work at a time."""
    pieces: deque[Work] = field(default_factory=deque)
    """The first one is being done."""


class Lines:
    def __init__(self, thread_name_prefix: str) -> None:
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix)

    def submit(self, place: str, work: Work) -> None:
        """Do `work` behind what was submitted for the same place; nothing after `close`."""
        with self._changed:
            if self._closed:
                return
            line = self._lines.setdefault(place, _Line())
            line.pieces.append(work)
            if len(line.pieces) == 1:
                self._threads.submit(self._do_first, line)

    def close(self, seconds: float) -> None:
        """Do what was submitted, within `seconds`; what is left then is dropped."""
        with self._changed:
            self._changed.wait_for(self._all_done, seconds)
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _all_done(self) -> bool:
        return not any(line.pieces for line in self._lines.values())

    def _do_first(self, line: _Line) -> None:
        try:
            line.pieces[0](line.breaker)
        except Exception:  # noqa: BLE001 -- a bug; who waits for the answer has a bound of his own
            _log.exception("work on the store failed")
        finally:
            with self._changed:
                line.pieces.popleft()
                if line.pieces and not self._closed:
                    self._threads.submit(self._do_first, line)
                self._changed.notify_all()
