"""A link: frames over a connected stream socket, with a deadline on everything.

Owns the socket, the deadlines, and the handshake by which a link comes to be. Runs on the threads
of its callers and starts none. Knows bytes only: no tensors, no keys, no Redis.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from select import POLLIN, POLLOUT, poll
from typing import Any, Final, Protocol

from lookup_buffer.errors import NodeRefused, PipeBroken, PipeClosed
from lookup_buffer.handshake import HELLO_BYTES, admit, introduce
from lookup_buffer.sockets import KernelTimeout, SocketGuard, connected_socket, tune
from lookup_buffer.wire import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Frame,
    Header,
    decode_header,
    decode_prologue,
    encode_frame,
)

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
        self._payload_left = 0
        self._guard = SocketGuard(stream)
        stream.setblocking(True)
        self._send_timeout = KernelTimeout(stream, socket.SO_SNDTIMEO)
        self._receive_timeout = KernelTimeout(stream, socket.SO_RCVTIMEO)
        tune(stream)

    def send(self, header: Header, payload: memoryview | None = None, *, timeout: float) -> None:
        """Send one frame. `payload` is a contiguous view of bytes; it may be reused on return.

        Returning says that the kernel has the bytes, not that the peer does.
        """
        nbytes = 0 if payload is None else payload.nbytes
        frame = encode_frame(header, nbytes, max_header_bytes=self._limits.max_header_bytes)
        deadline = self._deadline(timeout, nbytes)
        with self._guard:
            self._send_timeout.allow_until(deadline)
            # One call for both: no second packet for a small payload, no wait for an ACK.
            sent = self._socket.sendmsg([frame, payload] if payload is not None else [frame])
            while sent < len(frame) + nbytes:
                self._send_timeout.allow_until(deadline)
                if sent < len(frame):
                    sent += self._socket.send(frame[sent:])
                elif payload is not None:
                    sent += self._socket.send(payload[sent - len(frame) :])

    def recv_header(self, timeout: float) -> Frame:
        """The next frame's header; its payload, if any, is to be received next."""
        if self._payload_left and not self.closed:
            raise RuntimeError("the payload of the previous frame was not received")
        deadline = self._deadline(timeout, 0)
        with self._guard:
            self._fill(PROLOGUE_BYTES, deadline)
            header_nbytes, payload_nbytes = decode_prologue(
                self._scratch[self._start : self._start + PROLOGUE_BYTES],
                max_header_bytes=self._limits.max_header_bytes,
                max_payload_bytes=self._limits.max_payload_bytes,
            )
            self._start += PROLOGUE_BYTES
            if header_nbytes <= _SCRATCH_BYTES - PROLOGUE_BYTES:
                self._fill(header_nbytes, deadline, within_frame=True)
                packed = self._scratch[self._start : self._start + header_nbytes]
                self._start += header_nbytes
            else:
                packed = memoryview(bytearray(header_nbytes))
                self._receive(packed, deadline, None)
            header = decode_header(packed)
            self._payload_left = payload_nbytes
        return Frame(header, payload_nbytes)

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

    def wait_readable(self, timeout: float) -> bool:
        """Whether there is something to receive (a frame, or the end) within this time.

        The one wait that leaves the link usable when its time passes.
        """
        if self._start < self._end:
            return True
        with self._guard:
            poller = poll()
            poller.register(self._socket, POLLIN)
            return bool(poller.poll(max(0.0, timeout) * 1000))

    def writable(self) -> bool:
        """Whether the kernel takes a small frame at once. It says so only where a good part of the
        socket's buffer is free: 64 KiB and more."""
        with self._guard:
            poller = poll()
            poller.register(self._socket, POLLOUT)
            return bool(poller.poll(0))

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

    def _fill(self, nbytes: int, deadline: float, *, within_frame: bool = False) -> None:
        """Read until the scratch holds this many unconsumed bytes; more may come with them."""
        if self._end - self._start >= nbytes:
            return
        held = self._end - self._start
        self._scratch[:held] = bytes(self._scratch[self._start : self._end])
        self._start, self._end = 0, held
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


_HANDSHAKE_LIMITS: Final = LinkLimits(max_header_bytes=HELLO_BYTES, max_payload_bytes=0)


def connect(
    host: str, port: int, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """A link to a listening peer, after the handshake; both within `timeout` (but for the time
    that the system takes to resolve a host name).

    With a token each end proves that it knows it, by HMAC-SHA256 over both ends' nonces and its
    own role; the token never travels. This authenticates the ends as they meet. It does not
    encrypt, nor protect the bytes that follow from somebody on the path.

    Raises:
        NodeRefused: the peer is of another version, or one end has no token or another one.
        PipeError: not reachable, too slow, or gone meanwhile.
        ProtocolError: the peer does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    stream = connected_socket(host, port, deadline)
    left = deadline - time.monotonic()
    return request_handshake(stream, token=token, timeout=left, limits=limits)


def request_handshake(
    stream: socket.socket, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """See `connect`; for a socket just connected, which it owns from the call on."""
    deadline = time.monotonic() + timeout
    link = Link(stream, _HANDSHAKE_LIMITS)
    with _aborting(link):
        introduce(link, token, deadline)
    link.set_limits(limits or LinkLimits())
    return link


def accept_handshake(
    stream: socket.socket, *, token: str | None, timeout: float, limits: LinkLimits | None = None
) -> Link:
    """The other side of `connect`, for a socket just accepted. Owns the socket from the call on.

    The client proves itself first, so a stranger learns nothing but that a token is wanted.

    Raises:
        NodeRefused: the client is of another version, or has no token or another one.
        PipeError: the client said too little in time, or left.
        ProtocolError: the client does not speak this protocol.
    """
    deadline = time.monotonic() + timeout
    link = Link(stream, _HANDSHAKE_LIMITS)
    with _aborting(link):
        admit(link, token, deadline)
    link.set_limits(limits or LinkLimits())
    return link


@contextmanager
def _aborting(link: Link) -> Iterator[None]:
    """Leave no half-open link behind. A refusal already sent still arrives."""
    try:
        yield
    except NodeRefused:
        link.close()
        raise
    except BaseException:
        link.abort()
        raise
