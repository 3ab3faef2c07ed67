"""Writes and reads the frames of one link. It does not know what the frames mean.

`FrameWriter` writes frames in order. The thread that queues a frame also writes it, as far as the
link accepts it without waiting. That avoids waking a thread, which costs more than writing a small
frame. The speaker's own thread writes the rest. `Outgoing` is the state of a sent message, shared
with the outbox.

`Reading` reads frames. One thread at a time has the right to read (a lock). The reading thread has
it while no caller waits for a message. A waiting caller takes the right if it is free, and reads
itself: a message then wakes its receiver directly, not by way of another thread. Passing the right
never wakes the reading thread, because its epoll ignores the link meanwhile.

A waiting caller has a deadline. So it reads only frames that have already arrived, and the bytes
that it waits for. It leaves all else, such as the bytes of another message, to the reading thread.
"""

import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError, PipeBroken, PipeTimeout
from lookup_buffer.protocol.sockets import ignore_errors
from lookup_buffer.protocol.stream import FramedSocket, FrameStream


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that was offered and is not received yet."""

    key: bytes | None
    memory: memoryview
    """The caller's memory, until there is room for a copy."""
    cost: int
    at: int | None = None
    """Offset of the copy in the shared memory, if it lies there."""
    charged: bool = False
    number: int = 0
    inline: bool = False
    copying: bool = False
    """The copy into `memory` is not complete yet."""
    pulled: bool = False
    over: bool = False
    """Received, or all of its bytes are in the kernel's buffers."""


BEAT_SECONDS: Final = 0.5
"""A quarter of the least `silence_seconds` that an end can be configured with."""
PUT_OFF_MAX: Final = 256


class FrameWriter:
    """Writes the frames of one link. Call `say`, `put`, `put_off`, `put_put_off` and `stop` with
    the peer's lock, all else without it.

    Args:
        check: raises, under the lock, if the peer cannot be used any more.
        sent: called with each frame that was written in full.
        failed: called, on any thread and without the lock, with the reason why writing has ended.
        seconds: bounds how long the link may take for one frame, beside its bytes.
        rest: called, without the lock, when there was nothing to write for a while.
    """

    def __init__(
        self,
        link: FrameStream,
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
        """A frame that was written in part; the thread finishes it."""
        self._received: list[int] = []
        """Numbers from `put_off`; all are written with the next frame."""
        self._more = threading.Condition(lock)
        self._writing = threading.Lock()
        """Held from taking a frame out of the queue until it is written or is `_begun`."""

    def say(self, header: list[Any], out: Outgoing | None = None) -> None:
        """Queue a frame for the thread to write. For callers that must not wait for the link."""
        self._frames.append((header, out))
        self._more.notify()

    def put(self, header: list[Any], out: Outgoing | None = None) -> None:
        """Queue a frame. For callers that call `write` as soon as they have released the lock."""
        self._frames.append((header, out))

    def put_off(self, number: int) -> None:
        """Send the "received" of this message with the next frame. A receiver usually replies or
        receives more at once, and the other end seldom waits for this."""
        self._received.append(number)
        if len(self._received) >= PUT_OFF_MAX:
            self.put_put_off()

    def put_put_off(self) -> None:
        """Queue the delayed "received" numbers as a frame, as `put` does, because there may be no
        next frame."""
        if self._received:
            self._frames.append((["received", *self._received], None))
            self._received.clear()

    def write(self) -> None:
        """Write what the link accepts without waiting, and leave the rest to the thread."""
        try:
            while self._writing.acquire(blocking=False):  # else the writer rechecks
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
        """The thread's loop. It ends after writing "bye", or with an error, which ends the peer."""
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
        """Call with the lock held. Drop all queued frames and wake the thread."""
        self._frames.clear()
        self._received.clear()
        self._more.notify_all()

    def _begin_next(self) -> bool:
        """Write the next frame without waiting. Returns whether it was written in full."""
        with self._lock:
            if self._begun is not None or not self._frames or self._next_is_last():
                return False
            frame = self._next()
        frame.begun = self._link.send_nowait(frame.header, frame.payload, frame.before)
        if frame.begun is not None:
            self._begun = frame
            return False
        self._sent(frame.header, frame.out)
        return True

    def _finish_next(self) -> "_Frame | None":
        """Write the frame that was begun, or else the next one; returns it."""
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
            already_sent=frame.begun or 0,
        )
        self._sent(frame.header, frame.out)
        return frame

    def _next(self) -> "_Frame":
        header, out = self._frames.popleft()
        before = ["received", *self._received] if self._received else None
        self._received.clear()
        return _Frame(header, out, before)

    def _next_is_last(self) -> bool:
        """Whether the next frame is "bye". Only the thread writes it, and then ends."""
        return bool(self._frames) and self._frames[0][0] == ["bye"]


@dataclass(slots=True, eq=False)
class _Frame:
    header: list[Any]
    out: Outgoing | None
    before: list[Any] | None
    begun: int | None = None
    """Number of bytes written; None: not begun, or written in full."""

    @property
    def payload(self) -> memoryview | None:
        return self.out.memory if self.out else None


SOON_SECONDS: Final = 0.001
TURN_SECONDS: Final = 0.1
"""How long the thread waits for the right to read before it checks again whether the peer is
silent."""


class Reading:
    """Reads the frames of one link.

    Args:
        heard: called with each frame, and reads its bytes; the caller has the right to read.
        failed: called, on any thread, with the reason why reading has ended.
        come_by: called on the thread soon after `soon`.
        silence_seconds: how long the peer may send nothing, or take for a frame, beside its bytes.
    """

    def __init__(
        self,
        link: FrameStream,
        heard: Callable[[Any, int], None],
        failed: Callable[[LookupBufferError], None],
        come_by: Callable[[], None],
        silence_seconds: float,
    ) -> None:
        self._link = link
        self._heard = heard
        self._failed = failed
        self._come_by = come_by
        self._silence_seconds = silence_seconds
        self._silent_since = time.monotonic()
        self._right = threading.Lock()
        self._over = False
        self._due: float | None = None
        """When the thread calls `come_by` next; None if it is not scheduled."""
        self._was_read = False
        """A waiting caller has read since the last `come_by`."""
        self._watches = _Watches(link) if isinstance(link, FramedSocket) else None

    def run(self) -> None:
        """The thread's loop. It ends after the other end's "bye", or when the link fails."""
        try:
            while not self._over:
                now = time.monotonic()
                left = min(self._silent_since - now, 0.0) + self._silence_seconds
                if left <= 0:
                    raise PipeTimeout("the other end of the pipe says nothing any more")
                if self._due is not None and self._due <= now:
                    self._look_again()
                elif self._wait(min(left, (self._due or math.inf) - now)):
                    self._take_turn()
        except LookupBufferError as error:
            self._failed(error)
        finally:
            self._close()

    def _wait(self, seconds: float) -> bool:
        if self._watches is None:
            return self._link.wait_readable(seconds)
        return self._watches.link.wait_readable(seconds, self._watches.threads.wait)

    def _take_turn(self) -> None:
        if self._right.acquire(timeout=TURN_SECONDS):
            try:
                if not self._over and self._link.wait_readable(0.0):
                    self._read()
            finally:
                self._right.release()

    def until(self, done: Callable[[], bool], deadline: float, number: int | None = None) -> None:
        """Read on the caller's thread until `done`, or a deadline (a monotonic time).

        Returns earlier if another thread reads, or has to read. The caller then waits for the
        result of that thread.

        Args:
            number: of the message whose bytes the caller waits for, if any.
        """
        watches = self._watches
        if watches is None or not self._right.acquire(blocking=False):
            return
        try:
            if not self._over:
                self._read_until(done, deadline, number, watches)
        except LookupBufferError as error:
            self._failed(error)
        finally:
            self._right.release()

    def _read_until(
        self, done: Callable[[], bool], deadline: float, number: int | None, watches: "_Watches"
    ) -> None:
        link, wait = watches.link, watches.waiters.wait
        watches.threads.look(False)
        self._was_read = True
        left_over = False
        try:
            while not (left_over or done()) and (left := deadline - time.monotonic()) > 0:
                if link.wait_readable(min(left, self._silence_seconds), wait):
                    left_over = not self._read_at_once(link, number) or self._over
        finally:
            self._was_read = True
            if left_over or link.has_buffered:
                watches.threads.look(True)
                watches.threads.call()
            else:
                self.soon()

    def _read_at_once(self, link: FramedSocket, number: int | None) -> bool:
        """Read one frame if that needs no wait for bytes of another message. Returns whether it
        did."""
        frame = link.peek()
        if frame is None:
            return False
        nbytes = frame.payload_nbytes
        if nbytes and frame.header != ["data", number] and not link.has_arrived(nbytes):
            return False
        self._read()
        return True

    def _read(self) -> None:
        self._silent_since = math.inf
        try:
            frame = self._link.recv_header(self._silence_seconds)
            self._heard(frame.header, frame.payload_nbytes)
        except LookupBufferError:
            raise
        except BaseException:  # an interrupted caller: the position in the stream is unknown
            self._failed(PipeBroken("who read from the pipe was interrupted in a frame"))
            raise
        self._silent_since = time.monotonic()

    def end(self) -> None:
        """Called by `heard` after the last frame."""
        self._over = True

    def call(self) -> None:
        """Wake a caller that reads, so that it checks `done` again."""
        if self._watches is not None:
            self._watches.waiters.call()

    def attend(self) -> None:
        """Let the thread read from now on, unless a waiting caller reads."""
        if self._watches is not None and self._right.acquire(blocking=False):
            self._watches.threads.look(True)
            self._right.release()

    def soon(self) -> bool:
        """Schedule `come_by` on the thread. If no caller reads by then, the thread also resumes
        reading.

        Returns whether that is supported by this link.
        """
        if self._due is None and self._watches is not None:
            self._due = time.monotonic() + SOON_SECONDS
            self._watches.threads.call()
        return self._watches is not None

    def _look_again(self) -> None:
        self._due = None
        self._come_by()
        if self._was_read:
            self._was_read = False
            self._due = time.monotonic() + SOON_SECONDS
        else:
            self.attend()

    def _close(self) -> None:
        """End reading. A caller that still reads is woken by the end of the link."""
        with self._right:
            self._over = True
        if self._watches is not None:
            self._watches.threads.close()
            self._watches.waiters.close()


class _Watches:
    """The two waits for a link over a socket: the thread's and the callers'.

    With any other link, or where bytes come another way, only the thread reads.
    """

    def __init__(self, link: FramedSocket) -> None:
        self.link = link
        self.threads, self.waiters = _Watch(link.descriptor), _Watch(link.descriptor)


class _Watch:
    """Waits until the link is readable, or `call` is called."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._epoll = select.epoll()
        self._epoll.register(descriptor, select.EPOLLIN)
        self._looks = True
        self._ready = os.eventfd(1)
        """Always readable; `call` enables it for one wait."""
        self._epoll.register(self._ready, 0)
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the link is readable or has ended."""
        return self._descriptor in dict(self._epoll.poll(seconds))

    def call(self) -> None:
        with self._lock:
            if not self._epoll.closed:
                self._epoll.modify(self._ready, select.EPOLLIN | select.EPOLLONESHOT)

    def look(self, at_link: bool) -> None:
        """Set whether to wait for the link at all. Has no effect on a link that has ended."""
        if at_link == self._looks:
            return
        with self._lock:
            self._looks = at_link
            events = select.EPOLLIN if at_link else 0
            if not self._epoll.closed:
                ignore_errors(lambda: self._epoll.modify(self._descriptor, events))

    def close(self) -> None:
        with self._lock:
            self._epoll.close()
            os.close(self._ready)
