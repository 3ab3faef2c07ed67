"""Reading: who reads what a peer says. The right to read is one, and goes from hand to hand.

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
from collections.abc import Callable
from typing import Any, Final

from lookup_buffer.errors import LookupBufferError, PipeBroken, PipeTimeout
from lookup_buffer.frames import Frames
from lookup_buffer.protocol.sockets import ignore_errors
from lookup_buffer.protocol.stream import Link

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
