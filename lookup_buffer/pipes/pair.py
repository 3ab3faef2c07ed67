"""PairLink: a link whose large payload goes through a communicator of its two ends.

Keys, offers, inline payload, beats and "bye" stay on the control link. `PairLink` adds two frames:

    ["pair", name, value]      while a communicator is made: a value for the other end
    ["data", n, nbytes]        announces so many bytes through the communicator

The remote end's threads write and read; a thread of its own makes the communicator. `gloo` and
`nccl` implement `Communicator`; its two ends find each other by an `Exchange`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from lookup_buffer.pipes.io import BEAT_SECONDS, MINIMUM_BYTES_PER_SECOND
from lookup_buffer.protocol.framing import Frame, Header
from lookup_buffer.protocol.stream import FramedSocket

ABORT_SECONDS: Final = 5.0
"""An orderly close waits so long for `Communicator.abort`, and then leaves it to its thread."""

NAMES_MAX: Final = 16
VALUE_BYTES_MAX: Final = 4096


class Communicator(Protocol):
    """Moves bytes between two ranks; rank 0 is the listening end. One thread sends while another
    receives; a third calls `abort`.

    It has no keys and no tags: what is sent in one direction is received in the same order. Its two
    directions must be independent: neither ever waits for the other (see `PairLink`).

    Errors of `send` and `recv`, after which it cannot be used any more:
        PipeTimeout: the other end did not move the bytes within the time.
        PipeBroken: the other end has ended, or this end was aborted.
    """

    def send(self, memory: memoryview, timeout: float) -> None: ...

    def recv(self, memory: memoryview, timeout: float) -> None: ...

    def abort(self) -> None:
        """Wake the threads that send or receive, and release all resources. May take long: call it
        on a thread of its own. Call it once."""
        ...


MakeCommunicator = Callable[["Exchange", float], Communicator]
"""Makes a communicator with the two ends' exchange, until a deadline (a monotonic time)."""


class PairLink:
    """See `FramedSocket`, which it replaces. The bytes of `data` frames come through the
    communicator, so only the reader thread may read.

    The control link fixes the order of the communicator. The writer thread of an end announces a
    payload, then sends it, before it writes anything else. The reader thread of the other end reads
    the announcement, then receives the payload, before it reads anything else. So in each direction
    both ends use the communicator in the order of the announcements.

    Two directions at once cannot deadlock. The writer thread of one end waits only for the reader
    thread of the other, which never waits for its own writer thread. This requires a communicator
    with independent directions.

    The communicator is made when the first large message is requested (both ends start then), on a
    thread of its own, so that the control link is not blocked. It lives as long as the link.

    Args:
        make: makes the communicator.
        make_seconds: bound on the time to make the communicator.
    """

    def __init__(self, link: FramedSocket, make: MakeCommunicator, make_seconds: float) -> None:
        self._link = link
        self._make = make
        self._make_seconds = make_seconds
        self._sending = threading.Lock()
        self._exchange = Exchange(lambda name, value: self._send_control(["pair", name, value]))
        self._changed = threading.Condition()
        self._communicator: Communicator | None = None
        self._making = False
        self._error: LookupBufferError | None = None
        """The error with which making the communicator failed; final."""
        self._ended = False
        self._announced = 0
        """The number of bytes that come next through the communicator."""

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        already_sent: int = 0,
    ) -> None:
        match header:
            case ["pull", _]:
                self._start_making()
            case ["data", number] if payload is not None:
                self._send_through(number, payload, timeout, before)
                return
        with self._sending, self._raising_reason():
            self._link.send(
                header, payload, timeout=timeout, before=before, already_sent=already_sent
            )

    def send_nowait(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        match header:
            case ["pull", _]:
                self._start_making()
            case ["data", _] if payload is not None:
                return 0
        with self._raising_reason():
            if not self._sending.acquire(blocking=False):
                return 0
            try:
                return self._link.send_nowait(header, payload, before)
            finally:
                self._sending.release()

    def _send_through(
        self, number: Any, payload: memoryview, timeout: float, before: Header | None
    ) -> None:
        communicator = self._await_communicator(beat=True)
        self._send_control(["data", number, payload.nbytes], before)
        if payload.nbytes:
            communicator.send(payload, timeout + payload.nbytes / MINIMUM_BYTES_PER_SECOND)

    def wait_readable(self, timeout: float) -> bool:
        with self._raising_reason():
            return self._link.wait_readable(timeout)

    def recv_header(self, timeout: float) -> Frame:
        with self._raising_reason():
            frame = self._link.recv_header(timeout)
        match frame.header:
            case ["pair", str(name), bytes(value)] if not frame.payload_nbytes:
                self._exchange.received(name, value)
                return Frame(["beat"], 0)  # handled here
            case ["pull", _]:
                self._start_making()
            case ["data", int(number), int(nbytes)] if not frame.payload_nbytes:
                if nbytes < 0 or not self._making:
                    raise ProtocolError("bytes that were not requested")
                self._announced = nbytes
                return Frame(["data", number], nbytes)
            case ["data", *_]:
                raise ProtocolError("bytes over the control link instead of the communicator")
        return frame

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None:
        if not self._announced:
            with self._raising_reason():
                self._link.recv_into(buffer, timeout=timeout)
            return
        communicator = self._await_communicator(beat=False)
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

    def _start_making(self) -> None:
        with self._changed:
            if self._making or self._ended:
                return
            self._making = True
        making = threading.Thread(target=self._make_communicator, name="lb-pipe-pair", daemon=True)
        try:
            making.start()
        except RuntimeError as error:
            self._not_made(PipeBroken(f"the system does not allow a communicator: {error}"))

    def _make_communicator(self) -> None:
        try:
            communicator = self._make(self._exchange, time.monotonic() + self._make_seconds)
        except Exception as error:  # noqa: BLE001 -- a device's too: threads wait for the result
            kind = type(error) if isinstance(error, LookupBufferError) else PipeBroken
            # Without its traceback, which would keep descriptors.
            self._not_made(kind(str(error)))
            return
        with self._changed:
            if not self._ended:
                self._communicator = communicator
                self._changed.notify_all()
                return
        communicator.abort()

    def _not_made(self, error: LookupBufferError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
        self._link.abort()  # threads that read or write fail at once, at both ends

    def _await_communicator(self, *, beat: bool) -> Communicator:
        """Wait until the communicator is made, for a bounded time. With `beat`, send beats
        meanwhile."""
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
                self._send_control(["beat"])

    def _end(self, seconds: float) -> None:
        """Abort the communicator on another thread, and wait for that up to `seconds`. The abort
        wakes the threads that use the communicator; it has been seen to hang. If the system grants
        no thread, they wait until their deadlines."""
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
            with suppress(RuntimeError):
                aborting.start()
                aborting.join(seconds)

    def _send_control(self, header: list[Any], before: Header | None = None) -> None:
        with self._sending, self._raising_reason():
            self._link.send(header, timeout=self._make_seconds, before=before)

    @contextmanager
    def _raising_reason(self) -> Iterator[None]:
        """Replaces the errors of a link that was aborted because its communicator could not be made
        by the reason for that."""
        try:
            yield
        except PipeError:
            if self._error is not None:
                raise self._error from None
            raise


class Exchange:
    """Values that the two ends exchange while a communicator is made. Any thread."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._theirs: dict[str, bytes] = {}
        self._ended = False

    def put(self, name: str, value: bytes) -> None:
        """Send this value to the other end."""
        self._send(name, value)

    def get(self, name: str, deadline: float) -> bytes:
        """The value that the other end has put under this name.

        Raises:
            PipeTimeout: it did not arrive by the deadline, a monotonic time.
            PipeClosed: the exchange was ended.
        """
        with self._changed:
            while name not in self._theirs:
                if self._ended:
                    raise PipeClosed("the pipe ended while its communicator was made")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise PipeTimeout(
                        "the other end did not send its values for the communicator in time"
                    )
            return self._theirs[name]

    def received(self, name: str, value: bytes) -> None:
        """Store a value of the other end.

        Raises:
            ProtocolError: it is larger, or one more, than making a communicator needs.
        """
        with self._changed:
            known = len(self._theirs)
            if known >= NAMES_MAX or len(name) > VALUE_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
                raise ProtocolError("more or larger values than making a communicator needs")
            self._theirs[name] = value
            self._changed.notify_all()

    def end(self) -> None:
        """End the exchange, and wake the threads that wait for a value."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def agree(link: FramedSocket, kind: str, version: str, deadline: float) -> None:
    """Exchange the first frames of both ends: kind and version of the communicator, which must be
    equal.

    Raises:
        NodeRefused: the other end has another kind or version; the text names both.
        ProtocolError: the other end is not a pipe of this kind.
    """
    link.send(["pair", kind, version], timeout=deadline - time.monotonic())
    match link.recv_header(deadline - time.monotonic()).header:
        case ["pair", str(their_kind), str(their_version)]:
            if (their_kind, their_version) != (kind, version):
                theirs = f"{their_kind} {their_version}"[:100]
                raise NodeRefused(f"the other end has {theirs}, this one {kind} {version}")
        case _:
            raise ProtocolError(f"the other end is not one of a {kind} pipe")
