"""PairLink: a link whose large payload goes through a communicator of its two ends.

Keys, offers, inline payload, beats and goodbyes stay on the control link. Two frames are its own:

    ["pair", name, value]      while a communicator is made: a value for the other end
    ["data", n, nbytes]        so many bytes now come through the communicator

Order, and why two directions at once cannot wait for each other: the writing thread of an end
announces, then sends, before it says anything else; the reading thread of the other end hears the
announcement, then receives, before it hears anything else. So in each direction the two ends use
the communicator in the order of the announcements. The writing thread of one end waits only for
the reading thread of the other, which never waits for its own writing thread: there is no circle,
as long as the communicator keeps its two directions apart, which is what it has to promise.

The communicator is made when the first large message is asked for (who asks and who is asked both
begin), on a thread of its own, so that the control link goes on; it then lives as long as the link.

Communicators: what moves the large payload of a pair of ends, and how the two find each other.

A communicator joins two ranks: rank 0 is the end that listens. It knows nothing of keys and has no
tags: what is sent in one direction is received there in the same order, which the two ends agree
on over their control link (see `pair`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from lookup_buffer.errors import (
    LookupBufferError,
    NodeRefused,
    PipeBroken,
    PipeClosed,
    PipeError,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.io import BEAT_SECONDS
from lookup_buffer.pipes.peer import MINIMUM_BYTES_PER_SECOND
from lookup_buffer.protocol.framing import Frame, Header
from lookup_buffer.protocol.stream import Link

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


ABORT_SECONDS: Final = 5.0
"""How long an orderly end waits for a communicator to be given back; then it is left to itself."""

MakeCommunicator = Callable[[Exchange, float], Communicator]
"""Of the two ends' exchange, until a deadline, a monotonic time."""


def agree(link: Link, kind: str, version: str, deadline: float) -> None:
    """The first words of both ends: what moves the payload, which must be the same.

    Raises:
        NodeRefused: the other end has another one; both are named.
    """
    link.send(["pair", kind, version], timeout=deadline - time.monotonic())
    match link.recv_header(deadline - time.monotonic()).header:
        case ["pair", str(their_kind), str(their_version)]:
            if (their_kind, their_version) != (kind, version):
                theirs = f"{their_kind} {their_version}"[:100]
                raise NodeRefused(f"the other end has {theirs}, this one {kind} {version}")
        case _:
            raise ProtocolError(f"the other end is not one of a {kind} pipe")


class PairLink:
    """See `Link`, whose place it takes in a peer; bytes come through the communicator, whose turns
    the reading thread is to take.

    Args:
        make_seconds: bounds how long a communicator may take to be made.
    """

    def __init__(self, link: Link, make: MakeCommunicator, make_seconds: float) -> None:
        self._link = link
        self._make = make
        self._make_seconds = make_seconds
        self._sending = threading.Lock()
        self._exchange = Exchange(lambda name, value: self._say(["pair", name, value]))
        self._changed = threading.Condition()
        self._communicator: Communicator | None = None
        self._making = False
        self._error: LookupBufferError | None = None
        """Why there is none, and never will be."""
        self._ended = False
        self._announced = 0
        """Bytes that come through the communicator next."""

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        begun: int = 0,
    ) -> None:
        match header:
            case ["pull", _]:
                self._begin()
            case ["data", number] if payload is not None:
                self._send_through(number, payload, timeout, before)
                return
        with self._sending, self._telling_why():
            self._link.send(header, payload, timeout=timeout, before=before, begun=begun)

    def begin(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        match header:
            case ["pull", _]:
                self._begin()
            case ["data", _] if payload is not None:
                return 0
        with self._telling_why():
            if not self._sending.acquire(blocking=False):
                return 0
            try:
                return self._link.begin(header, payload, before)
            finally:
                self._sending.release()

    def _send_through(
        self, number: Any, payload: memoryview, timeout: float, before: Header | None
    ) -> None:
        communicator = self._made(beat=True)
        self._say(["data", number, payload.nbytes], before)
        if payload.nbytes:
            communicator.send(payload, timeout + payload.nbytes / MINIMUM_BYTES_PER_SECOND)

    def wait_readable(self, timeout: float) -> bool:
        with self._telling_why():
            return self._link.wait_readable(timeout)

    def recv_header(self, timeout: float) -> Frame:
        with self._telling_why():
            frame = self._link.recv_header(timeout)
        match frame.header:
            case ["pair", str(name), bytes(value)] if not frame.payload_nbytes:
                self._exchange.heard(name, value)
                return Frame(["beat"], 0)  # nothing for others
            case ["pull", _]:
                self._begin()
            case ["data", int(number), int(nbytes)] if not frame.payload_nbytes:
                if nbytes < 0 or not self._making:
                    raise ProtocolError("bytes that were not asked for")
                self._announced = nbytes
                return Frame(["data", number], nbytes)
            case ["data", *_]:
                raise ProtocolError("bytes that do not come through the communicator")
        return frame

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None:
        if not self._announced:
            with self._telling_why():
                self._link.recv_into(buffer, timeout=timeout)
            return
        communicator = self._made(beat=False)
        communicator.recv(buffer, timeout + buffer.nbytes / MINIMUM_BYTES_PER_SECOND)
        self._announced = 0

    @property
    def failure(self) -> BaseException | None:
        return self._error or self._link.failure

    def close(self) -> None:
        self._link.close()
        self._end(ABORT_SECONDS)

    def abort(self) -> None:
        self._link.abort()
        self._end(0.0)

    # -- the communicator

    def _begin(self) -> None:
        with self._changed:
            if self._making or self._ended:
                return
            self._making = True
        threading.Thread(target=self._run, name="lb-pipe-pair", daemon=True).start()

    def _run(self) -> None:
        try:
            communicator = self._make(self._exchange, time.monotonic() + self._make_seconds)
        except Exception as error:  # noqa: BLE001 -- a device's as well: others wait for this
            kind = type(error) if isinstance(error, LookupBufferError) else PipeBroken
            with self._changed:
                self._error = kind(str(error))  # without frames, which keep descriptors
                self._changed.notify_all()
            self._link.abort()  # who reads or writes hears of it at once, here and there
            return
        with self._changed:
            if not self._ended:
                self._communicator = communicator
                self._changed.notify_all()
                return
        communicator.abort()

    def _made(self, *, beat: bool) -> Communicator:
        """It, once it is there: making it is bounded. The other end hears of us meanwhile."""
        while True:
            with self._changed:
                if self._communicator is None:
                    self._changed.wait(BEAT_SECONDS)
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise PipeClosed("this end of the pipe was closed")
                if self._communicator is not None:
                    return self._communicator
            if beat:
                self._say(["beat"])

    def _end(self, seconds: float) -> None:
        """Abort it on a side thread: that wakes who uses it, and has been seen to hang."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            communicator, self._communicator = self._communicator, None
            self._changed.notify_all()
        self._exchange.end()
        if communicator is not None:
            aborting = threading.Thread(
                target=communicator.abort, name="lb-pipe-abort", daemon=True
            )
            aborting.start()
            aborting.join(seconds)

    def _say(self, header: list[Any], before: Header | None = None) -> None:
        with self._sending, self._telling_why():
            self._link.send(header, timeout=self._make_seconds, before=before)

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        """The link was aborted because there is no communicator: that is the reason to tell."""
        try:
            yield
        except PipeError:
            if self._error is not None:
                raise self._error from None
            raise
