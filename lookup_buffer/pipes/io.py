"""The speaker: what one end says to a peer goes out in order, by whichever thread may write it.

Who says something writes it, as far as the link takes it at once: that saves waking a thread, which
costs more than writing what is small. A thread writes the rest.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError
from lookup_buffer.frames import Frames
from lookup_buffer.pipes.outgoing import Outgoing

BEAT_SECONDS: Final = 0.5
"""A quarter of the shortest silence that an end may be told to bear."""
PUT_OFF_MAX: Final = 256


class Speaker:
    """Of one link. `say` and `put` are called with the peer's lock, all else without it.

    Args:
        check: raises, under the lock, where the peer is of no use any more.
        sent: is told of a frame that has gone out.
        failed: is told, on any thread and without the lock, why nothing goes out any more.
        seconds: bounds how long the link may take for one, beside its bytes.
        rest: is called, without the lock, when there was nothing to say for a while.
    """

    def __init__(
        self,
        link: Frames,
        lock: threading.RLock,
        check: Callable[[], None],
        sent: Callable[[list[Any], Outgoing | None], None],
        failed: Callable[[LookupBufferError], None],
        seconds: float,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._lock = lock
        self._check = check
        self._sent = sent
        self._failed = failed
        self._rest = rest
        self._seconds = seconds
        self._frames: deque[tuple[list[Any], Outgoing | None]] = deque()
        self._begun: _Frame | None = None
        """A frame that has not gone out in full; the thread finishes it."""
        self._received: list[int] = []
        """Put off, see `put_off`; all go out with the next frame."""
        self._more = threading.Condition(lock)
        self._writing = threading.Lock()
        """Held from taking a frame out of the queue until it is written, or `_begun`."""

    def say(self, header: list[Any], out: Outgoing | None = None) -> None:
        """The thread will write it. For those who must not wait for the link."""
        self._frames.append((header, out))
        self._more.notify()

    def put(self, header: list[Any], out: Outgoing | None = None) -> None:
        """For those who call `write` as soon as they have given back the lock."""
        self._frames.append((header, out))

    def put_off(self, number: int) -> None:
        """That this message was received is said with the next frame: who has received is about to
        answer, or to receive more, and the other end seldom waits for this."""
        self._received.append(number)
        if len(self._received) >= PUT_OFF_MAX:
            self.put_put_off()

    def put_put_off(self) -> None:
        """As `put`, what was put off: there may not be a next frame."""
        if self._received:
            self._frames.append((["received", *self._received], None))
            self._received.clear()

    def write(self) -> None:
        """Write what can be written without waiting, and leave the rest to the thread."""
        try:
            while self._writing.acquire(blocking=False):  # else who writes looks again afterwards
                try:
                    while self._begin_next():
                        pass
                finally:
                    self._writing.release()
                with self._lock:
                    if not self._frames and self._begun is None:
                        return
                    if self._begun is not None or self._next_is_last():
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
                    while not self._frames and self._begun is None:
                        self._check()
                        if not self._more.wait(BEAT_SECONDS):
                            self._frames.append((["beat"], None))
                with self._writing:
                    frame = self._finish_next()
                over = frame is not None and frame.header == ["bye"]
                if self._rest is not None and frame is not None and frame.header == ["beat"]:
                    self._rest()
                del frame
        except LookupBufferError as error:
            self._failed(error)

    def stop(self) -> None:
        """Under the lock: nothing is to be said any more."""
        self._frames.clear()
        self._received.clear()
        self._more.notify_all()

    def _begin_next(self) -> bool:
        """Whether a frame has gone out, without waiting for anything."""
        with self._lock:
            if self._begun is not None or not self._frames or self._next_is_last():
                return False
            frame = self._next()
        frame.begun = self._link.begin(frame.header, frame.payload, frame.before)
        if frame.begun is not None:
            self._begun = frame
            return False
        self._sent(frame.header, frame.out)
        return True

    def _finish_next(self) -> "_Frame | None":
        """Write the frame that was begun, or else the next one; return what it was."""
        with self._lock:
            frame = self._begun
            if frame is None:
                if not self._frames:
                    return None
                frame = self._next()
            self._begun = None
        self._link.send(
            frame.header,
            frame.payload,
            timeout=self._seconds,
            before=frame.before,
            begun=frame.begun or 0,
        )
        self._sent(frame.header, frame.out)
        return frame

    def _next(self) -> "_Frame":
        header, out = self._frames.popleft()
        before = ["received", *self._received] if self._received else None
        self._received.clear()
        return _Frame(header, out, before)

    def _next_is_last(self) -> bool:
        """The last word is the thread's: it ends with it."""
        return bool(self._frames) and self._frames[0][0] == ["bye"]


@dataclass(slots=True, eq=False)
class _Frame:
    header: list[Any]
    out: Outgoing | None
    before: list[Any] | None
    begun: int | None = None
    """How many bytes have gone out, unless those are all."""

    @property
    def payload(self) -> memoryview | None:
        return self.out.memory if self.out else None
