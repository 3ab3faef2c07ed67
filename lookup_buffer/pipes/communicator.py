"""Communicators: what moves the large payload of a pair of ends, and how the two find each other.

A communicator joins two ranks: rank 0 is the end that listens. It knows nothing of keys and has no
tags: what is sent in one direction is received there in the same order, which the two ends agree
on over their control link (see `pair`).
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from lookup_buffer.errors import PipeClosed, PipeTimeout, ProtocolError

NAMES_MAX: Final = 16
VALUE_BYTES_MAX: Final = 4096


class Communicator(Protocol):
    """One thread sends while another receives; `abort` comes from a third.

    Errors of `send` and `recv`, after which it is of no use any more:
        PipeTimeout: the other end did not move the bytes within the time.
        PipeBroken: it is gone, or this end was aborted.
    """

    def send(self, memory: memoryview, timeout: float) -> None: ...

    def recv(self, memory: memoryview, timeout: float) -> None: ...

    def abort(self) -> None:
        """Wake whoever sends or receives, and give everything back. May take long: call it on a
        thread of its own. Once."""
        ...


class Exchange:
    """Values that each end names for the other one while a communicator is made. Any thread."""

    def __init__(self, say: Callable[[str, bytes], None]) -> None:
        self._say = say
        self._changed = threading.Condition()
        self._theirs: dict[str, bytes] = {}
        self._ended = False

    def put(self, name: str, value: bytes) -> None:
        """Tell the other end."""
        self._say(name, value)

    def get(self, name: str, deadline: float) -> bytes:
        """What the other end has put under that name.

        Raises:
            PipeTimeout: nothing by the deadline, a monotonic time.
            PipeClosed: it does not matter any more.
        """
        with self._changed:
            while name not in self._theirs:
                if self._ended:
                    raise PipeClosed("the pipe ended while its communicator was made")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise PipeTimeout("the other end did not take part in making a communicator")
            return self._theirs[name]

    def heard(self, name: str, value: bytes) -> None:
        """The other end put this.

        Raises:
            ProtocolError: more than making a communicator takes.
        """
        with self._changed:
            known = len(self._theirs)
            if known >= NAMES_MAX or len(name) > VALUE_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
                raise ProtocolError("more than it takes to make a communicator")
            self._theirs[name] = value
            self._changed.notify_all()

    def end(self) -> None:
        """Wake whoever waits for the other end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
