"""A link: frames over a connected stream socket, with a deadline on everything.

Owns the socket and the deadlines; how a link comes to be: `handshake`. Runs on the threads of its
callers and starts none. Knows bytes only: no tensors, no keys, no Redis.

Frames: what a `Link` does, for those who do not mind whether a socket or something else does it.

`link.Link` is the one over a stream socket; `pipes.redis_link.RedisLink` goes by way of a database.
Threads, deadlines and errors are as `Link` says.

Greetings: those who have connected to a listening socket, each on a thread of its own.

So who says nothing keeps nobody out; and so many are served at once, and no more, that a crowd of
those cannot take all threads. Of nodes and of pipes.
"""

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fcntl import ioctl
from functools import partial
from select import POLLIN, poll
from termios import FIONREAD
from typing import Any, Final, Protocol

from lookup_buffer.errors import PipeBroken, PipeClosed, ProtocolError
from lookup_buffer.protocol.framing import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Frame,
    Header,
    decode_header,
    decode_prologue,
    encode_frame,
)
from lookup_buffer.protocol.sockets import KernelTimeout, SocketGuard, tune

HASH_STEP_BYTES: Final = 4 << 20
"""The hash follows the bytes at this distance: small enough to find them still in a cache."""

_SCRATCH_BYTES: Final = 4096  # takes prologue and header of nearly every frame in one read


class Hasher(Protocol):
    """What follows received bytes; `xxhash.xxh3_64()` is one."""

    def update(self, data: memoryview, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """What a link accepts from its peer, and how slow the peer may be."""

    max_header_bytes: int = MAX_HEADER_BYTES
    max_payload_bytes: int = 1 << 40
    minimum_bytes_per_second: float = 16e6


class Link:
    """Frames in both directions over a socket that it owns from now on.

    Threads: one may send while another receives; two of the same kind may not. `close` and
    `abort` may be called by any thread at any time and wake the others.

    Deadlines: each operation has one, its `timeout` plus its bytes over the minimum rate. A
    stopped or slow peer cannot hold a caller longer (but for a tenth), however it spreads its
    bytes.

    Errors:
        PipeClosed: an end was closed between two frames, or this one by another thread.
        PipeBroken: the connection was reset, or ended within a frame (a killed peer).
        PipeTimeout: the deadline passed.
        ProtocolError: the peer sent what is no frame, or exceeds the limits.
    After any of these out of an operation on the stream the link is aborted, so that a stream is
    never read from its middle. A frame that cannot be encoded is refused before, and changes
    nothing.
    """

    def __init__(self, stream: socket.socket, limits: LinkLimits | None = None) -> None:
        self._socket = stream
        self._limits = limits or LinkLimits()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0  # the part of the scratch that is read and not yet consumed
        self._peeked: Frame | None = None
        self._payload_left = 0
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
        begun: int = 0,
    ) -> None:
        """Send one frame. `payload` is a contiguous view of bytes; it may be reused on return.

        Returning says that the kernel has the bytes, not that the peer does. `before` is the header
        of a frame without payload that goes out first, for less than a call of its own; `begun` is
        what `begin` has returned for the same.
        """
        nbytes = 0 if payload is None else payload.nbytes
        frame = self._encoded(header, nbytes, before)
        deadline = self._deadline(timeout, nbytes)
        with self._guard:
            self._send_timeout.allow_until(deadline)
            # One call for both: no second packet for a small payload, no wait for an ACK.
            sent = begun or self._socket.sendmsg((frame, payload or b""))
            while sent < len(frame) + nbytes:
                self._send_timeout.allow_until(deadline)
                if sent < len(frame):
                    sent += self._socket.send(frame[sent:])
                elif payload is not None:
                    sent += self._socket.send(payload[sent - len(frame) :])

    def begin(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        """As `send`, what the kernel takes at once: so many bytes, None where that is all.

        The rest is to go out before anything else, by `send` of the same.
        """
        nbytes = 0 if payload is None else payload.nbytes
        frame = self._encoded(header, nbytes, before)
        with self._guard:
            try:
                sent = self._socket.sendmsg((frame, payload or b""), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0
        return None if sent == len(frame) + nbytes else sent

    def _encoded(self, header: Header, payload_nbytes: int, before: Header | None) -> bytes:
        most = self._limits.max_header_bytes
        frame = encode_frame(header, payload_nbytes, max_header_bytes=most)
        return frame if before is None else encode_frame(before, max_header_bytes=most) + frame

    def recv_header(self, timeout: float) -> Frame:
        """The next frame's header; its payload, if any, is to be received next."""
        if self._payload_left and not self.closed:
            raise RuntimeError("the payload of the previous frame was not received")
        frame, self._peeked = self._peeked, None
        if frame is None:
            deadline = self._deadline(timeout, 0)
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
                    self._receive(packed, deadline, None)
                frame = Frame(decode_header(packed), payload_nbytes)
        self._payload_left = frame.payload_nbytes
        return frame

    def peek(self) -> Frame | None:
        """What `recv_header` returns next, if that has come; waits for nothing.

        None also where the stream has ended, and for a header that is larger than usual.
        """
        if self._peeked is None and not self._payload_left:
            with self._guard:
                self._peeked = self._next_frame()
                if self._peeked is None and self._take_more():
                    self._peeked = self._next_frame()
        return self._peeked

    def has_come(self, nbytes: int) -> bool:
        """Whether so many bytes that follow what `peek` returned can be received at once."""
        missing = nbytes - (self._end - self._start)
        if missing <= 0:
            return True
        with self._guard:
            waiting = bytearray(4)
            ioctl(self._socket, FIONREAD, waiting)
            return int.from_bytes(waiting, sys.byteorder) >= missing

    @property
    def holds_more(self) -> bool:
        """Whether it holds something that it has read and nobody has received."""
        return self._peeked is not None or self._start < self._end

    def recv_into(
        self, buffer: memoryview, *, timeout: float, hasher: Hasher | None = None
    ) -> None:
        """Fill `buffer` with the next bytes of the current frame's payload.

        `buffer` is a writable contiguous view of bytes, best of memory that was touched before.
        A payload may be received in several parts. `hasher` is given the bytes as they arrive.
        On an error the content of the buffer is unspecified.
        """
        if buffer.nbytes > self._payload_left:
            raise ValueError(f"{buffer.nbytes} bytes wanted, {self._payload_left} are to come")
        deadline = self._deadline(timeout, buffer.nbytes)
        with self._guard:
            self._receive(buffer, deadline, hasher)
            self._payload_left -= buffer.nbytes

    def wait_readable(self, timeout: float, wait: Callable[[float], bool] | None = None) -> bool:
        """Whether there is something to receive (a frame, or the end) within this time.

        The one wait that leaves the link usable when its time passes, or it is interrupted. With
        `wait` the caller does that himself, and says whether `descriptor` was readable.
        """
        if self.holds_more:
            return True
        return self._guard.watch(wait or self._poll, timeout)

    @property
    def descriptor(self) -> int:
        """What can be polled; open while an operation on the link is under way."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end was closed or aborted; says nothing of the peer."""
        return self._guard.closed

    @property
    def failure(self) -> BaseException | None:
        """What ended this link, where that was neither `close` nor `abort`."""
        return self._guard.failure

    @property
    def local_host(self) -> str:
        """The address of this end, which is one that the peer reaches."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Orderly end: what was sent still arrives. Idempotent; waits for nothing."""
        self._guard.shut()

    def abort(self) -> None:
        """End now: the peer sees a reset, unsent bytes are dropped. Idempotent, never raises."""
        self._guard.shut(reset=True)

    def detach(self) -> socket.socket:
        """Give the socket away, between two frames and before the peer sends the next one.

        Raises:
            PipeClosed: this link is closed, or another thread uses it.
            ProtocolError: the peer has sent something already.
        """
        if self._payload_left or self.holds_more:
            raise ProtocolError("the peer sent more than it was asked for")
        return self._guard.detach()

    def set_limits(self, limits: LinkLimits) -> None:
        """Replace the limits, for the frames from the next on."""
        self._limits = limits

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link {'closed' if self.closed else 'open'}>"

    def _deadline(self, timeout: float, nbytes: int) -> float:
        return time.monotonic() + timeout + nbytes / self._limits.minimum_bytes_per_second

    def _prologue(self) -> tuple[int, int]:
        """Of the frame at the start of the scratch, which has it: bytes of header and payload."""
        return decode_prologue(
            self._scratch[self._start : self._start + PROLOGUE_BYTES],
            max_header_bytes=self._limits.max_header_bytes,
            max_payload_bytes=self._limits.max_payload_bytes,
        )

    def _next_frame(self) -> Frame | None:
        """The frame whose header the scratch has in full."""
        if self._end - self._start < PROLOGUE_BYTES:
            return None
        header_nbytes, payload_nbytes = self._prologue()
        start = self._start + PROLOGUE_BYTES
        if self._end < start + header_nbytes:
            return None
        self._start = start + header_nbytes
        return Frame(decode_header(self._scratch[start : self._start]), payload_nbytes)

    def _take_more(self) -> bool:
        """Whether the scratch has more now than it had."""
        self._make_room()
        try:
            more = self._socket.recv_into(self._scratch[self._end :], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
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
        """Read until the scratch holds this many unconsumed bytes; more may come with them."""
        if self._end - self._start >= nbytes:
            return
        self._make_room()
        while self._end < nbytes:
            read = self._read(self._scratch[self._end :], deadline)
            if read == 0:
                raise _ended(within_frame=within_frame or self._end > 0)
            self._end += read

    def _receive(self, buffer: memoryview, deadline: float, hasher: Hasher | None) -> None:
        got = min(self._end - self._start, buffer.nbytes)
        buffer[:got] = self._scratch[self._start : self._start + got]
        self._start += got
        hashed = 0
        while got < buffer.nbytes:
            # Always the full remainder: the kernel hands over all it has in one call.
            read = self._read(buffer[got:], deadline)
            if read == 0:
                raise _ended(within_frame=True)
            got += read
            if hasher is not None and got - hashed >= HASH_STEP_BYTES:
                hasher.update(buffer[hashed:got])
                hashed = got
        if hasher is not None and hashed < got:
            hasher.update(buffer[hashed:got])

    def _read(self, target: memoryview, deadline: float) -> int:
        self._receive_timeout.allow_until(deadline)
        return self._socket.recv_into(target)


def _ended(*, within_frame: bool) -> PipeClosed | PipeBroken:
    if within_frame:
        return PipeBroken("the connection ended in the middle of a frame")
    return PipeClosed("the peer closed the connection")


class Frames(Protocol):
    """One may send while another receives; `close` and `abort` any thread, at any time."""

    def send(
        self,
        header: Header,
        payload: memoryview | None = None,
        *,
        timeout: float,
        before: Header | None = None,
        begun: int = 0,
    ) -> None:
        """`before` is the header of a frame without payload that goes out first, `begun` the number
        of bytes that have gone out already."""
        ...

    def recv_header(self, timeout: float) -> Frame: ...

    def recv_into(self, buffer: memoryview, *, timeout: float) -> None: ...

    def wait_readable(self, timeout: float) -> bool: ...

    def begin(
        self, header: Header, payload: memoryview | None = None, before: Header | None = None
    ) -> int | None:
        """Send what can be sent without waiting: so many bytes, None where that is all.

        The rest is to go out before anything else, by `send` of the same.
        """
        ...

    @property
    def failure(self) -> BaseException | None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


GREETINGS_MAX: Final = 256
HANDSHAKE_SECONDS: Final = 5.0
"""How long one may take."""
TRY_AGAIN_SECONDS: Final = 0.05


def listening(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens there, and HOST:PORT with the port that was really taken.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=GREETINGS_MAX)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listener, f"{shown}:{listener.getsockname()[1]}"


class Greetings:
    def __init__(self, places: int = GREETINGS_MAX, thread_name: str = "lb-pipe-greet") -> None:
        self._places = threading.BoundedSemaphore(places)
        self._thread_name = thread_name

    def serve(self, listener: socket.socket, greet: Callable[[socket.socket], object]) -> None:
        """Greet all who connect, until the listener is shut down; then close it. While there is no
        place they wait in the kernel's queue: those who say nothing will have to leave theirs."""
        with listener:
            while True:
                self._places.acquire()
                try:
                    stream, _ = listener.accept()
                except OSError as error:
                    self.leave()
                    if error.errno == errno.EINVAL:  # it was shut down
                        return
                    time.sleep(TRY_AGAIN_SECONDS)  # no descriptor is free, or who came has left
                    continue
                self._begin(partial(greet, stream))

    def begin(self, greet: Callable[[], object]) -> bool:
        """Whether there was a place; then `greet` runs, and raises nothing. Where it returns True
        its place is taken until somebody calls `leave`."""
        if not self._places.acquire(blocking=False):
            return False
        self._begin(greet)
        return True

    def _begin(self, greet: Callable[[], object]) -> None:
        def run() -> None:
            stays: object = False
            try:
                stays = greet()
            finally:
                if stays is not True:
                    self.leave()

        threading.Thread(target=run, name=self._thread_name, daemon=True).start()

    def leave(self) -> None:
        self._places.release()
