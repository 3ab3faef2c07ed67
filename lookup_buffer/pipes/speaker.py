"""The speaker: what one end says to a peer goes out in order, by whichever thread may write it.

Bulk is written by a thread of its own. What is small is written by who says it, if the link takes
it at once: that saves waking the thread, which costs more than the writing.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError
from lookup_buffer.frames import Frames
from lookup_buffer.pipes.outgoing import Outgoing

BEAT_SECONDS: Final = 0.5
"""A quarter of the shortest silence that an end may be told to bear."""

_Frame = tuple[list[Any], Outgoing | None]


class Speaker:
    """Of one link. `say` and `put` are called with the peer's lock, all else without it.

    Args:
        check: raises, under the lock, where the peer is of no use any more.
        sent: is told of a frame that has gone out.
        failed: is told, on any thread and without the lock, why nothing goes out any more.
        seconds: bounds how long the link may take for one, beside its bytes.
    """

    def __init__(
        self,
        link: Frames,
        lock: threading.RLock,
        check: Callable[[], None],
        sent: Callable[[list[Any], Outgoing | None], None],
        failed: Callable[[LookupBufferError], None],
        seconds: float,
    ) -> None:
        self._link = link
        self._lock = lock
        self._check = check
        self._sent = sent
        self._failed = failed
        self._seconds = seconds
        self._frames: deque[_Frame] = deque()
        self._more = threading.Condition(lock)
        self._writing = threading.Lock()
        """Held from taking a frame out of the queue until it is written."""

    def say(self, header: list[Any], out: Outgoing | None = None) -> None:
        """The thread will write it. For those who must not wait for the link."""
        self._frames.append((header, out))
        self._more.notify()

    def put(self, header: list[Any], out: Outgoing | None = None) -> None:
        """For those who call `write` as soon as they have given back the lock."""
        self._frames.append((header, out))

    def write(self) -> None:
        """Write what is small and can be written at once, and leave the rest to the thread."""
        try:
            while self._writing.acquire(blocking=False):  # else who writes looks again afterwards
                writable = True
                try:
                    while self._next_is_small() and (writable := self._link.writable()):
                        self._write_next()
                finally:
                    self._writing.release()
                with self._lock:
                    if not self._frames:
                        return
                    if not self._next_is_small() or not writable:
                        self._more.notify()
                        return
        except LookupBufferError as error:
            self._failed(error)

    def run(self) -> None:
        """The thread's: until it has said goodbye, or, by an error, until the end of the peer."""
        try:
            over = False
            while not over:
                with self._lock:
                    while not self._frames:
                        self._check()
                        if not self._more.wait(BEAT_SECONDS):
                            self._frames.append((["beat"], None))
                with self._writing:
                    over = self._write_next() == "bye"
        except LookupBufferError as error:
            self._failed(error)

    def stop(self) -> None:
        """Under the lock: nothing is to be said any more."""
        self._frames.clear()
        self._more.notify_all()

    def _next_is_small(self) -> bool:
        with self._lock:
            return bool(self._frames) and self._frames[0][0][0] not in ("data", "bye")

    def _write_next(self) -> str | None:
        with self._lock:
            if not self._frames:
                return None
            header, out = self._frames.popleft()
        self._link.send(header, out.memory if out else None, timeout=self._seconds)
        self._sent(header, out)
        return str(header[0])
