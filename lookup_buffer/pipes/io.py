"""The speaker: what one end says to a peer goes out in order, by whichever thread may write it.

Who says something writes it, as far as the link takes it at once: that saves waking a thread, which
costs more than writing what is small. A thread writes the rest.

A message on its way out: what the outbox keeps of it, and the speaker sends.

Reading: who reads what a peer says. The right to read is one, and goes from hand to hand.

A thread has it while nobody waits. Who waits for what is to come takes it, where he can, and reads
himself: what he waits for then wakes him at once, and not another thread first, which would have to
wake him. The thread is woken neither when the right is taken from it nor when it has it again, for
it waits by an epoll that does not look at the link meanwhile.

Who waits has a deadline, so he reads only what is there already, and what he waits for. All else,
such as the bytes of somebody else, he leaves to the thread, and waits for what it finds.
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
from lookup_buffer.protocol.stream import Frames, Link


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message that was offered and not received."""

    key: bytes | None
    memory: memoryview
    """The caller's, until there is room for a copy."""
    cost: int
    at: int | None = None
    """Where the copy lies, if the other end sees it there."""
    charged: bool = False
    number: int = 0
    inline: bool = False
    copying: bool = False
    """Its bytes are not all in `memory` yet."""
    pulled: bool = False
    over: bool = False
    """Received, or as good as: its bytes are the kernel's."""


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


SOON_SECONDS: Final = 0.001
TURN_SECONDS: Final = 0.1
"""The thread, awake, waits so long for who reads, before it looks whether the peer is silent."""


class Reading:
    """Of one link.

    Args:
        heard: is told each frame, and receives its bytes; under the right to read.
        failed: is told, on any thread, why nothing is read any more.
        come_by: what the thread does soon after `soon`.
        silence_seconds: how long the peer may say nothing, or take for a frame, beside its bytes.
    """

    def __init__(
        self,
        link: Frames,
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
        """When the thread comes by next, if it does."""
        self._was_read = False
        """Somebody who waits has read since it came by."""
        self._watches = _Watches(link) if isinstance(link, Link) else None

    def run(self) -> None:
        """The thread's, until the other end has said goodbye, or the link fails."""
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
        """Read on the caller's thread until `done`, or a deadline, a monotonic time.

        Sooner where somebody else reads, or has to: then he is to wait for what that one finds.

        Args:
            number: of the message whose bytes he waits for, if it is that.
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
            if left_over or link.holds_more:
                watches.threads.look(True)
                watches.threads.call()
            else:
                self.soon()

    def _read_at_once(self, link: Link, number: int | None) -> bool:
        """Whether that was possible."""
        frame = link.peek()
        if frame is None:
            return False
        nbytes = frame.payload_nbytes
        if nbytes and frame.header != ["data", number] and not link.has_come(nbytes):
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
        except BaseException:  # an interrupted caller: nobody knows where the stream is
            self._failed(PipeBroken("who read from the pipe was interrupted in a frame"))
            raise
        self._silent_since = time.monotonic()

    def end(self) -> None:
        """Told by `heard`: this was the last frame."""
        self._over = True

    def call(self) -> None:
        """Who reads while he waits is to look whether he is done."""
        if self._watches is not None:
            self._watches.waiters.call()

    def attend(self) -> None:
        """The thread is to read what comes from now on, unless somebody does who waits."""
        if self._watches is not None and self._right.acquire(blocking=False):
            self._watches.threads.look(True)
            self._right.release()

    def soon(self) -> bool:
        """Whether the thread comes by soon; if nobody reads any more, it then does again."""
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
        """Nobody reads any more; who still does is woken by the end of the link."""
        with self._right:
            self._over = True
        if self._watches is not None:
            self._watches.threads.close()
            self._watches.waiters.close()


class _Watches:
    """Of a link over a socket. Over anything else, and where bytes come on another way, the thread
    reads alone."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.threads, self.waiters = _Watch(link.descriptor), _Watch(link.descriptor)


class _Watch:
    """Waits for something to read, or to be called."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._epoll = select.epoll()
        self._epoll.register(descriptor, select.EPOLLIN)
        self._looks = True
        self._ready = os.eventfd(1)
        """Always readable; looked at once, when there is a call."""
        self._epoll.register(self._ready, 0)
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> bool:
        """Whether there is something to read, or the link has ended."""
        return self._descriptor in dict(self._epoll.poll(seconds))

    def call(self) -> None:
        with self._lock:
            if not self._epoll.closed:
                self._epoll.modify(self._ready, select.EPOLLIN | select.EPOLLONESHOT)

    def look(self, at_link: bool) -> None:
        """Whether to wait for something to read at all; of a link that has ended there is none."""
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
