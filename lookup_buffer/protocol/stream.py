"""`FramedSocket`: frames over a connected stream socket, each operation with a deadline.

`auth` makes one by a handshake, `acceptor` serves those of a listening socket. `FrameStream` is its
interface for callers that do not depend on a socket: `pipes.redis_link.RedisLink` has it too, over
a database. A `FramedSocket` runs on the threads of its callers and starts none. It carries bytes
and headers, whatever they mean.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from select import POLLIN, poll
from termios import FIONREAD, TIOCOUTQ
from typing import Any, Final, Protocol

from lookup_buffer.errors import PipeBroken, PipeClosed, ProtocolError
from lookup_buffer.key import MAX_KEY_CHARACTERS
from lookup_buffer.protocol.framing import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Frame,
    Header,
    Macs,
    decode_header,
    decode_prologue,
    encode_frame,
)
from lookup_buffer.protocol.sockets import KernelTimeout, SocketGuard, bytes_in_kernel, tune

HASH_STEP_BYTES: Final = 4 << 20
"""The hash runs this many bytes behind the receive: few enough to be still in a cache."""

PROGRESS_BYTES: Final = 64 << 10
"""So much of a payload must pass within a timeout: 13 kB/s, if that is 5 s."""
_SCRATCH_BYTES: Final = 8192  # takes prologue and header of nearly every frame in one read
assert _SCRATCH_BYTES >= 2 * MAX_KEY_CHARACTERS, "`peek` finds the header of any tensor in it"


class Hasher(Protocol):
    """A running hash of received bytes; `xxhash.xxh3_64()` is one."""

    def update(self, data: memoryview, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class FramedSocketLimits:
    """Bounds on what the remote end may send."""

    max_header_bytes: int = MAX_HEADER_BYTES
    max_payload_bytes: int = 1 << 40


class _Progress:
    """`deadline` is when a transfer is given up, by time.monotonic()."""

    __slots__ = ("_due", "_timeout", "deadline")

    def __init__(self, timeout: float, moved: int = 0) -> None:
        self._timeout = timeout
        self._due = moved + PROGRESS_BYTES
        self.deadline = time.monotonic() + timeout

    def note(self, moved: int) -> None:
        """`moved` bytes have passed."""
        if moved >= self._due:
            self._due = moved + PROGRESS_BYTES
            self.deadline = time.monotonic() + self._timeout


class FramedSocket:
    """Frames in both directions over a socket, which this object owns.

    Threads: one may send while another receives; two threads must not do the same. Any thread may
    call `close` and `abort` at any time; both end the waits of other threads.

    Deadlines: `timeout` bounds the wait for a header, and for each PROGRESS_BYTES of a payload (or
    for the rest of it), except by a tenth. So a payload arrives over a network of any speed, and a
    stopped remote end, or one that trickles, is given up.

    Errors:
        PipeClosed: an end was closed between two frames, or this one by another thread.
        PipeBroken: the connection was reset, or ended within a frame (a killed remote end).
        PipeTimeout: the deadline passed.
        ProtocolError: the remote end sent bytes that are not a frame, or that exceed the limits.
    After one of these errors from an operation on the stream the connection is aborted, so that no
    stream is read from the middle of a frame. A frame that cannot be encoded is refused before
    anything is sent, and the connection stays usable.
    """

    def __init__(self, stream: socket.socket, limits: FramedSocketLimits | None = None) -> None:
        self._socket = stream
        self._limits = limits or FramedSocketLimits()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0  # the bytes in the scratch that are not consumed yet
        self._peeked: Frame | None = None
        self._payload_left = 0
        self._has_ended = False
        self.macs: Macs | None = None
        """Of the headers from now on; set after the handshake."""
        self._guard = SocketGuard(stream)
        stream.setblocking(True)
        self._send_timeout = KernelTimeout(stream, socket.SO_SNDTIMEO)
        self._receive_timeout = KernelTimeout(stream, socket.SO_RCVTIMEO)
        tune(stream)

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        already_sent: int = 0,
    ) -> None:
        """Send one frame. `payload` is a contiguous view of bytes; it may be reused on return.

        On return the kernel has the bytes; the remote end may not have them. `before` is the header
        of a frame without payload that is sent first, at less cost than a separate call.
        `already_sent` is the result of `send_nowait` for the same arguments.
        """
        nbytes = 0 if payload is None else payload.nbytes
        frame = self._encoded(header, nbytes, before)
        sent = already_sent
        with self._guard:
            progress = _Progress(timeout, sent - bytes_in_kernel(self._socket, TIOCOUTQ))
            while sent < len(frame) + nbytes:
                self._send_timeout.allow_until(progress.deadline)
                # A large buffer takes nothing more until much of it has passed.
                with suppress(BlockingIOError):
                    if sent == 0:  # One call for both: no second packet, no wait for an ACK.
                        sent = self._socket.sendmsg((frame, payload or b""))
                    elif sent < len(frame):
                        sent += self._socket.send(frame[sent:])
                    elif payload is not None:
                        sent += self._socket.send(payload[sent - len(frame) :])
                progress.note(sent - bytes_in_kernel(self._socket, TIOCOUTQ))
        self._is_sent()

    def send_nowait(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        """As `send`, but only the bytes that the kernel takes without waiting. Returns their
        number; None if the frame is sent in full.

        The caller sends the rest before anything else, by `send` with the same arguments.
        """
        nbytes = 0 if payload is None else payload.nbytes
        frame = self._encoded(header, nbytes, before)
        with self._guard:
            try:
                sent = self._socket.sendmsg((frame, payload or b""), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
        if sent < len(frame) + nbytes:
            return sent
        self._is_sent()
        return None

    def _is_sent(self) -> None:
        if self.macs is not None:
            self.macs.sends.next()

    def _encoded(self, header: Header, payload_nbytes: int, before: Header | None) -> bytes:
        most, mac = self._limits.max_header_bytes, self.macs.sends if self.macs else None
        assert mac is None or before is None, "a MAC is of one frame"
        frame = encode_frame(header, payload_nbytes, max_header_bytes=most, mac=mac)
        return frame if before is None else encode_frame(before, max_header_bytes=most) + frame

    def recv_header(self, timeout: float) -> Frame:
        """The next frame's header; the caller receives its payload, if any, next."""
        if self._payload_left and not self.closed:
            raise RuntimeError("the payload of the previous frame was not received")
        frame, self._peeked = self._peeked, None
        if frame is None:
            progress = _Progress(timeout)
            deadline = progress.deadline
            with self._guard:
                self._fill(PROLOGUE_BYTES, deadline)
                header_nbytes, payload_nbytes = self._prologue()
                self._start += PROLOGUE_BYTES
                if header_nbytes <= _SCRATCH_BYTES - PROLOGUE_BYTES:
                    self._fill(header_nbytes, deadline, within_frame=True)
                    packed = self._scratch[self._start : self._start + header_nbytes]
                    self._start += header_nbytes
                else:
                    packed = memoryview(bytearray(header_nbytes))
                    self._receive(packed, progress, None)
                frame = self._decoded(packed, payload_nbytes)
        self._payload_left = frame.payload_nbytes
        return frame

    def peek(self) -> Frame | None:
        """What `recv_header` returns next, if it has arrived. Never waits.

        None also if the stream has ended, and for a header too large for the scratch buffer.
        """
        if self._peeked is None and not self._payload_left:
            with self._guard:
                self._peeked = self._next_frame()
                if self._peeked is None and self._read_available():
                    self._peeked = self._next_frame()
        return self._peeked

    def check_peeked(self) -> None:
        """After `peek` returned None though there was something to read.

        Raises:
            PipeClosed, PipeBroken: the remote end has ended the stream.
            ProtocolError: the frame's header is too large for `peek`.
        """
        with self._guard:
            if self._has_ended:
                raise _ended(within_frame=self._start < self._end)
            if self._end - self._start == _SCRATCH_BYTES:
                raise ProtocolError(f"a header of over {_SCRATCH_BYTES} bytes")

    def has_arrived(self, nbytes: int) -> bool:
        """Whether `nbytes` bytes after the frame header of `peek` can be received at once."""
        missing = nbytes - (self._end - self._start)
        if missing <= 0:
            return True
        with self._guard:
            return bytes_in_kernel(self._socket, FIONREAD) >= missing

    @property
    def has_buffered(self) -> bool:
        """Whether bytes or a header were read from the socket that no caller has received."""
        return self._peeked is not None or self._start < self._end

    def recv_into(
        self, buffer: memoryview, *, timeout: float, hasher: Hasher | None = None
    ) -> None:
        """Fill `buffer` with the next bytes of the current frame's payload.

        `buffer` is a writable contiguous view of bytes; memory that was used before is fastest.
        A payload may be received in several parts. `hasher` is updated with the bytes as they
        arrive.
        On an error the content of the buffer is unspecified.
        """
        if buffer.nbytes > self._payload_left:
            raise ValueError(
                f"a buffer of {buffer.nbytes} bytes; {self._payload_left} of the payload are left"
            )
        with self._guard:
            self._receive(buffer, _Progress(timeout), hasher)
            self._payload_left -= buffer.nbytes

    def recv_available(self, buffer: memoryview, hasher: Hasher | None = None) -> int:
        """As `recv_into`, but only what has arrived; returns its number of bytes. Never waits."""
        with self._guard:
            got = self._unread(buffer)
            with suppress(BlockingIOError):
                while got < buffer.nbytes:
                    read = self._socket.recv_into(buffer[got:], 0, socket.MSG_DONTWAIT)
                    if read == 0:
                        raise _ended(within_frame=True)
                    got += read
            if hasher is not None:
                hasher.update(buffer[:got])
            self._payload_left -= got
        return got

    def wait_readable(self, timeout: float, wait: Callable[[float], bool] | None = None) -> bool:
        """Whether there is something to receive (a frame, or the end) within `timeout` seconds.

        Only this wait leaves the connection usable after its time has passed or after an interrupt.
        `wait`, if given, replaces the poll: it takes seconds and returns whether `descriptor` was
        readable.
        """
        if self.has_buffered:
            return True
        return self._guard.wait(wait or self._poll, timeout)

    @property
    def descriptor(self) -> int:
        """The socket's descriptor, for polling; open during any operation."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end was closed or aborted. The state of the remote end does not matter."""
        return self._guard.closed

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the connection; None while it is open, or after `close` or
        `abort`."""
        return self._guard.failure

    @property
    def local_host(self) -> str:
        """The address of this end, under which the remote end's host can reach it."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Orderly end: bytes already sent still arrive. Idempotent; never waits."""
        self._guard.shut()

    def abort(self) -> None:
        """End now: the remote end sees a reset, unsent bytes are dropped. Idempotent, never
        raises."""
        self._guard.shut(reset=True)

    def detach(self) -> socket.socket:
        """Return the socket to a new owner, between two frames and before the remote end sends the
        next one.

        Raises:
            PipeClosed: this end is closed, or another thread uses it.
            ProtocolError: the remote end has already sent something.
        """
        if self._payload_left or self.has_buffered:
            raise ProtocolError("the remote end sent more than one request")
        return self._guard.detach()

    def set_limits(self, limits: FramedSocketLimits) -> None:
        """Replace the limits, from the next frame on."""
        self._limits = limits

    def __enter__(self) -> "FramedSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<FramedSocket {'closed' if self.closed else 'open'}>"

    def _prologue(self) -> tuple[int, int]:
        """(header bytes, payload bytes) in the complete prologue at the start of the scratch."""
        return decode_prologue(
            self._scratch[self._start : self._start + PROLOGUE_BYTES],
            max_header_bytes=self._limits.max_header_bytes,
            max_payload_bytes=self._limits.max_payload_bytes,
        )

    def _next_frame(self) -> Frame | None:
        """The next frame, if the scratch holds its whole header."""
        if self._end - self._start < PROLOGUE_BYTES:
            return None
        header_nbytes, payload_nbytes = self._prologue()
        start = self._start + PROLOGUE_BYTES
        if self._end < start + header_nbytes:
            return None
        self._start = start + header_nbytes
        return self._decoded(self._scratch[start : self._start], payload_nbytes)

    def _decoded(self, packed: memoryview, payload_nbytes: int) -> Frame:
        mac = self.macs.receives if self.macs is not None else None
        return Frame(decode_header(packed, payload_nbytes, mac), payload_nbytes)

    def _read_available(self) -> bool:
        """Read into the scratch without waiting. Returns whether bytes were added."""
        self._make_room()
        room = self._scratch[self._end :]
        try:
            more = self._socket.recv_into(room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self._has_ended = more == 0 and len(room) > 0
        self._end += more
        return more > 0

    def _make_room(self) -> None:
        held = self._end - self._start
        self._scratch[:held] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, held

    def _poll(self, seconds: float) -> bool:
        poller = poll()
        poller.register(self._socket, POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    def _fill(self, nbytes: int, deadline: float, *, within_frame: bool = False) -> None:
        """Read until the scratch holds at least `nbytes` unconsumed bytes."""
        if self._end - self._start >= nbytes:
            return
        self._make_room()
        while self._end < nbytes:
            read = self._read(self._scratch[self._end :], deadline)
            if read == 0:
                raise _ended(within_frame=within_frame or self._end > 0)
            self._end += read

    def _receive(self, buffer: memoryview, progress: _Progress, hasher: Hasher | None) -> None:
        got, hashed = self._unread(buffer), 0
        while got < buffer.nbytes:
            # Always request the full remainder: the kernel returns all it has in one call.
            read = self._read(buffer[got:], progress.deadline)
            if read == 0:
                raise _ended(within_frame=True)
            got += read
            progress.note(got)
            if hasher is not None and got - hashed >= HASH_STEP_BYTES:
                hasher.update(buffer[hashed:got])
                hashed = got
        if hasher is not None and hashed < got:
            hasher.update(buffer[hashed:got])

    def _unread(self, buffer: memoryview) -> int:
        """Move what the scratch holds to the start of `buffer`; returns the number of bytes."""
        got = min(self._end - self._start, buffer.nbytes)
        buffer[:got] = self._scratch[self._start : self._start + got]
        self._start += got
        return got

    def _read(self, target: memoryview, deadline: float) -> int:
        self._receive_timeout.allow_until(deadline)
        return self._socket.recv_into(target)


def _ended(*, within_frame: bool) -> PipeClosed | PipeBroken:
    if within_frame:
        return PipeBroken("the connection ended in the middle of a frame")
    return PipeClosed("the remote end closed the connection")


class FrameStream(Protocol):
    """The interface of `FramedSocket`, with the same threads, deadlines and errors: one thread may
    send while another receives; any thread may call `close` and `abort` at any time."""

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        already_sent: int = 0,
    ) -> None:
        """`before` is the header of a frame without payload that is sent first; `already_sent` is
        the result of `send_nowait` for the same arguments."""
        ...

    def recv_header(self, timeout: float) -> Frame: ...

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None: ...

    def wait_readable(self, timeout: float) -> bool: ...

    def send_nowait(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        """Send the bytes that can be sent without waiting. Returns their number; None if the frame
        is sent in full.

        The caller sends the rest before anything else, by `send` with the same arguments.
        """
        ...

    @property
    def failure(self) -> BaseException | None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...
