"""Writes and reads the frames of one link. It does not know what the frames mean.

`FrameWriter` writes frames in order. The thread that queues a frame also writes it, as far as the
link accepts it without waiting. That avoids waking a thread, which costs more than writing a small
frame. The writer thread writes the rest. `Outgoing` is the state of a sent message, shared with the
outbox.

`FrameReader` reads frames. One thread at a time reads, under a lock. The reader thread reads while
no caller waits for a message. A waiting caller acquires the lock if it is free, and reads itself: a
message then wakes its receiver directly, without a second thread. The change of reader never wakes
the reader thread, because its epoll ignores the link meanwhile.

A waiting caller has a deadline. So it reads only frames that have already arrived, and the bytes
that it waits for. It leaves all else, such as the bytes of another message, to the reader thread.
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

BEAT_SECONDS: Final = 0.5
"""A quarter of the least `silence_seconds` that an end can be configured with."""
DEFERRED_MAX: Final = 256


FLUSH_SECONDS: Final = 0.001
MINIMUM_BYTES_PER_SECOND: Final = 16e6
"""The slowest accepted transfer. Each deadline of a transfer grows by its size at this rate."""
READ_LOCK_SECONDS: Final = 0.1
"""How long the reader thread waits for the lock before it checks again whether the remote end is
silent."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that was offered and is not received yet."""

    key: bytes | None
    memory: memoryview
    """The caller's memory, until there is room for a copy."""
    cost: int
    offset: int | None = None
    """Offset of the copy, if it is in the shared memory."""
    charged: bool = False
    number: int = 0
    inline: bool = False
    copying: bool = False
    """The copy into `memory` is not complete yet."""
    pulled: bool = False
    finished: bool = False
    """Received, or all of its bytes are in the kernel's buffers."""


class FrameWriter:
    """Writes the frames of one link.

    Call `write` and `run` without the remote end's lock, all other methods with it.

    Args:
        check: raises, under the lock, if the link cannot be used any more.
        on_sent: called with each frame that was written in full.
        on_failure: called, on any thread and without the lock, with the error that ended writing.
        seconds: bounds how long the link may take for one frame, in addition to its bytes.
        on_idle: called, without the lock, when there was nothing to write for a while.
    """

    def __init__(
        self,
        link: FrameStream,
        lock: threading.RLock,
        check: Callable[[], None],
        on_sent: Callable[[list[Any], Outgoing | None], None],
        on_failure: Callable[[LookupBufferError], None],
        seconds: float,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._lock = lock
        self._check = check
        self._on_sent = on_sent
        self._on_failure = on_failure
        self._on_idle = on_idle
        self._seconds = seconds
        self._frames: deque[tuple[list[Any], Outgoing | None]] = deque()
        self._begun: _Frame | None = None
        """A frame that is written in part; the writer thread writes its rest."""
        self._deferred: list[int] = []
        """Numbers from `defer_received`; all are written with the next frame."""
        self._more = threading.Condition(lock)
        self._writing = threading.Lock()
        """Held from taking a frame out of the queue until it is written or is `_begun`."""

    def enqueue_for_thread(self, header: list[Any], out: Outgoing | None = None) -> None:
        """Queue a frame for the writer thread. For callers that must not wait for the link."""
        self._frames.append((header, out))
        self._more.notify()

    def enqueue(self, header: list[Any], out: Outgoing | None = None) -> None:
        """Queue a frame. The caller calls `write` as soon as it has released the lock."""
        self._frames.append((header, out))

    def defer_received(self, number: int) -> None:
        """Acknowledge this message ("received") with the next frame. A receiver usually replies or
        receives more at once, and the other end seldom waits for the acknowledgement."""
        self._deferred.append(number)
        if len(self._deferred) >= DEFERRED_MAX:
            self.enqueue_deferred()

    def enqueue_deferred(self) -> None:
        """Queue the deferred acknowledgements as a frame of their own, as `enqueue` does, because
        there may be no next frame."""
        if self._deferred:
            self._frames.append((["received", *self._deferred], None))
            self._deferred.clear()

    def write(self) -> None:
        """Write what the link accepts without waiting; the writer thread writes the rest."""
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
            self._on_failure(error)

    def run(self) -> None:
        """The writer thread's loop. It ends after "bye" or with an error, which ends the link."""
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
                if self._on_idle is not None and frame is not None and frame.header == ["beat"]:
                    self._on_idle()
                del frame
        except LookupBufferError as error:
            self._on_failure(error)

    def stop(self) -> None:
        """Drop all queued frames and wake the writer thread, so that it ends."""
        self._frames.clear()
        self._deferred.clear()
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
        self._on_sent(frame.header, frame.out)
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
        self._on_sent(frame.header, frame.out)
        return frame

    def _next(self) -> "_Frame":
        header, out = self._frames.popleft()
        before = ["received", *self._deferred] if self._deferred else None
        self._deferred.clear()
        return _Frame(header, out, before)

    def _next_is_last(self) -> bool:
        """Whether the next frame is "bye". Only the writer thread writes it, and then ends."""
        return bool(self._frames) and self._frames[0][0] == ["bye"]


class FrameReader:
    """Reads the frames of one link.

    Args:
        on_frame: called with the header and payload bytes of each frame; it reads the payload.
        on_failure: called, on any thread, with the error that ended reading.
        on_flush: called on the reader thread, `FLUSH_SECONDS` after `schedule_flush`.
        silence_seconds: bounds how long the remote end may send nothing, and how long a frame may
            take in addition to its bytes.
    """

    def __init__(
        self,
        link: FrameStream,
        on_frame: Callable[[Any, int], None],
        on_failure: Callable[[LookupBufferError], None],
        on_flush: Callable[[], None],
        silence_seconds: float,
    ) -> None:
        self._link = link
        self._on_frame = on_frame
        self._on_failure = on_failure
        self._on_flush = on_flush
        self._silence_seconds = silence_seconds
        self._silent_since = time.monotonic()
        self._read_lock = threading.Lock()
        self._ended = False
        self._flush_due: float | None = None
        """When the reader thread calls `on_flush` next; None if it is not scheduled."""
        self._caller_has_read = False
        """A waiting caller has read since the last `on_flush`."""
        self._pollers: _Pollers | None = None

    def open(self) -> None:
        """Call it before anything else. If `run` is not called after it, call `close`.

        Raises:
            OSError: the system grants no descriptor.
        """
        if isinstance(self._link, FramedSocket):
            self._pollers = _Pollers(self._link)

    def run(self) -> None:
        """The reader thread's loop. It ends after the remote end's "bye", or if the link fails."""
        try:
            while not self._ended:
                now = time.monotonic()
                left = min(self._silent_since - now, 0.0) + self._silence_seconds
                if left <= 0 and self._link.wait_readable(0.0):  # it was this process that slept
                    self.resume_thread()
                    self._read_if_ready()
                elif left <= 0:
                    raise PipeTimeout(f"the other end sent nothing for {self._silence_seconds:g} s")
                elif self._flush_due is not None and self._flush_due <= now:
                    self._flush()
                elif self._wait(min(left, (self._flush_due or math.inf) - now)):
                    self._read_if_ready()
        except LookupBufferError as error:
            self._on_failure(error)
        finally:
            self.close()

    def _wait(self, seconds: float) -> bool:
        if self._pollers is None:
            return self._link.wait_readable(seconds)
        return self._pollers.link.wait_readable(seconds, self._pollers.thread.wait)

    def _read_if_ready(self) -> None:
        if self._read_lock.acquire(timeout=READ_LOCK_SECONDS):
            try:
                if not self._ended and self._link.wait_readable(0.0):
                    self._read()
            finally:
                self._read_lock.release()

    def read_until(
        self, done: Callable[[], bool], deadline: float, number: int | None = None
    ) -> None:
        """Read on the caller's thread until `done`, or a deadline (a monotonic time).

        Returns earlier if another thread reads, or if the reader thread has to read the next frame.
        The caller then waits for that thread's result.

        Args:
            number: the message whose bytes the caller waits for, if any.
        """
        pollers = self._pollers
        if pollers is None or not self._read_lock.acquire(blocking=False):
            return
        try:
            if not self._ended:
                self._read_until(done, deadline, number, pollers)
        except LookupBufferError as error:
            self._on_failure(error)
        finally:
            self._caller_has_read = True
            self._read_lock.release()
            self.schedule_flush()  # not before: the thread resumes only if it gets the lock

    def _read_until(
        self, done: Callable[[], bool], deadline: float, number: int | None, pollers: "_Pollers"
    ) -> None:
        link, wait = pollers.link, pollers.caller.wait
        pollers.thread.watch_link(False)
        self._caller_has_read = True
        left_over = False
        try:
            while not (left_over or done()) and (left := deadline - time.monotonic()) > 0:
                if link.wait_readable(min(left, self._silence_seconds), wait):
                    left_over = not self._read_at_once(link, number) or self._ended
        finally:
            if left_over or link.has_buffered:
                pollers.thread.watch_link(True)
                pollers.thread.wake()

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
            self._on_frame(frame.header, frame.payload_nbytes)
        except LookupBufferError:
            raise
        except BaseException:  # an interrupted caller: the position in the stream is unknown
            self._on_failure(PipeBroken("a caller was interrupted while it read a frame"))
            raise
        self._silent_since = time.monotonic()

    def end(self) -> None:
        """Called by `on_frame` after the last frame."""
        self._ended = True

    def wake(self) -> None:
        """Wake a caller that reads, so that it checks `done` again."""
        if self._pollers is not None:
            self._pollers.caller.wake()

    def resume_thread(self) -> None:
        """The reader thread reads from now on, unless a waiting caller reads."""
        if self._pollers is not None and self._read_lock.acquire(blocking=False):
            self._pollers.thread.watch_link(True)
            self._read_lock.release()

    def schedule_flush(self) -> bool:
        """Schedule `on_flush` on the reader thread. If no caller reads by then, that thread also
        resumes reading.

        Returns False if this link does not support it.
        """
        if self._flush_due is None and self._pollers is not None:
            self._flush_due = time.monotonic() + FLUSH_SECONDS
            self._pollers.thread.wake()
        return self._pollers is not None

    def _flush(self) -> None:
        self._flush_due = None
        self._on_flush()
        if self._caller_has_read:
            self._caller_has_read = False
            self._flush_due = time.monotonic() + FLUSH_SECONDS
        else:
            self.resume_thread()

    def close(self) -> None:
        """End reading; `run` calls it at its end. The end of the link wakes a caller that still
        reads."""
        with self._read_lock:
            self._ended = True
        if self._pollers is not None:
            self._pollers.thread.close()
            self._pollers.caller.close()


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


class _Pollers:
    """The pollers of a link over a socket: the reader thread's and the callers'.

    With any other link, such as a database's or a communicator's, only the reader thread reads.
    """

    def __init__(self, link: FramedSocket) -> None:
        self.link = link
        self.thread = _LinkPoller(link.descriptor)
        try:
            self.caller = _LinkPoller(link.descriptor)
        except OSError:
            self.thread.close()
            raise


class _LinkPoller:
    """Waits until the link is readable, or `wake` is called."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._watches_link = True
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._ready = -1
        """Always readable; `wake` enables it for one wait."""
        try:
            self._ready = os.eventfd(1)
            self._epoll.register(descriptor, select.EPOLLIN)
            self._epoll.register(self._ready, 0)
        except OSError:
            self.close()
            raise

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`. Returns whether the link is readable or has ended."""
        return self._descriptor in dict(self._epoll.poll(seconds))

    def wake(self) -> None:
        with self._lock:
            if not self._epoll.closed:
                self._epoll.modify(self._ready, select.EPOLLIN | select.EPOLLONESHOT)

    def watch_link(self, enabled: bool) -> None:
        """Set whether `wait` includes the link. Has no effect on a link that has ended."""
        if enabled == self._watches_link:
            return
        with self._lock:
            self._watches_link = enabled
            events = select.EPOLLIN if enabled else 0
            if not self._epoll.closed:
                ignore_errors(lambda: self._epoll.modify(self._descriptor, events))

    def close(self) -> None:
        with self._lock:
            self._epoll.close()
            if self._ready >= 0:
                os.close(self._ready)
