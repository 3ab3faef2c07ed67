"""Additions to a plain socket: safe closing between threads, deadlines, this package's errors.

`SocketGuard` decides when a descriptor is closed, and translates socket errors. Runs on the threads
of its callers. Frames are in `stream`.
"""

import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from fcntl import ioctl
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from lookup_buffer.errors import PipeBroken, PipeClosed, PipeTimeout

IDLE_SECONDS: Final = 30
PROBE_SECONDS: Final = 10
PROBES: Final = 3
"""Keepalive: after so long without a packet probes are sent, so far apart; when so many in a row
got no answer, the connection ends."""

_SCM_PIDFD: Final = 4
"""Linux 6.5: a pidfd of each message's sender, where the socket has SO_PASSPIDFD."""
_CREDENTIALS: Final = struct.Struct("@iII")
"""Of a process: its id, user and group."""
_TIMEVAL: Final = struct.Struct("@ll")
_LONGEST_SECONDS: Final = 1e6
_RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)

# On one host the two ends share caches. With small socket buffers the bytes are still cached when
# they are read: 1.1 times the speed of the default at 8 and 64 MiB; half or twice the size is
# slower. Between hosts the kernel sizes the buffers by bandwidth and delay; do not change that.
_ONE_HOST_BUFFER_BYTES: Final = 256 << 10


class SocketGuard:
    """Counts the operations on a socket, so that its descriptor is closed after the last one.

    If a descriptor were closed while a thread is about to enter a system call, that thread could
    read from the next connection that gets the same number. The guard also translates socket
    errors into this package's errors, and ends the connection after a failed operation.

    `with guard:` is one operation. Any thread.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._lock = threading.Lock()
        self._operations = 0
        self.closed = False
        self.failure: BaseException | None = None
        """The error of the operation that ended the connection, if one did; other operations only
        raise PipeClosed."""

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closed_by_another = self.closed
        self._leave()
        if error is None:
            return
        if closed_by_another and isinstance(error, OSError | PipeClosed | PipeBroken):
            raise PipeClosed("this connection was closed by another thread") from error
        ours = _translated(error)
        if not closed_by_another:
            self.failure = ours
        self.shut(reset=True)
        if ours is not error:
            raise ours from error

    def wait(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """An operation that moves no bytes. Its failure, such as an interrupt, does not end the
        connection."""
        self._enter()
        try:
            return wait(seconds)
        finally:
            self._leave()

    def detach(self) -> socket.socket:
        """The socket, for a new owner; this guard then counts as closed.

        Raises:
            PipeClosed: it is closed, or another thread uses it.
        """
        with self._lock:
            if self.closed or self._operations:
                raise PipeClosed("this connection is closed, or another thread uses it")
            self.closed = True
            return socket.socket(fileno=self._socket.detach())

    def shut(self, *, reset: bool = False) -> None:
        """End the connection and the waits of its threads; with `reset`, drop unsent bytes.
        Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            others = self._operations > 0
            self._operations += 1
        if reset:
            linger = (socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            ignore_errors(lambda: self._socket.setsockopt(*linger))
        if others or not reset:
            # Ends the waits of other threads. It also sends an orderly end, which must not precede
            # a reset.
            ignore_errors(lambda: self._socket.shutdown(socket.SHUT_RDWR))
        self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self.closed:
                raise PipeClosed("this connection is closed")
            self._operations += 1

    def _leave(self) -> None:
        with self._lock:
            self._operations -= 1
            last = self.closed and self._operations == 0
        if last:
            self._socket.close()


def _translated(error: BaseException) -> BaseException:
    if isinstance(error, TimeoutError | BlockingIOError) and not isinstance(error, PipeTimeout):
        return PipeTimeout("the remote end was too slow: the deadline passed")
    if isinstance(error, OSError) and not isinstance(error, PipeTimeout):
        return PipeBroken(f"the connection failed: {error.strerror or error}")
    return error


class KernelTimeout:
    """The timeout of one direction of a blocking socket, set to meet deadlines.

    Uses SO_RCVTIMEO or SO_SNDTIMEO, not `settimeout`, for two reasons. They belong to a direction,
    so a sending and a receiving thread do not change each other's timeout. And a read costs one
    system call, not two. One thread at a time.
    """

    def __init__(self, stream: socket.socket, option: int) -> None:
        self._socket = stream
        self._option = option
        self._set_seconds = 0.0

    def allow_until(self, deadline: float) -> None:
        """Let the next system call wait until a monotonic time, or up to a tenth longer.

        The tenth saves most of the calls that set the timeout again.

        Raises:
            TimeoutError: the deadline has passed.
        """
        remaining = deadline - time.monotonic()
        if remaining <= self._set_seconds <= remaining * 1.1:
            return
        if remaining <= 0:
            raise TimeoutError("the deadline passed")
        self._set_seconds = min(remaining * 1.05, _LONGEST_SECONDS)
        seconds = int(self._set_seconds)
        # Never 0.0, which would mean "no timeout".
        microseconds = max(1, int((self._set_seconds - seconds) * 1e6))
        value = _TIMEVAL.pack(seconds, microseconds)
        self._socket.setsockopt(socket.SOL_SOCKET, self._option, value)


def unmapped_user(uid: int) -> str:
    """What to add to a message that names the user of a process; empty unless it is the one that
    stands for all users whom this process's user namespace does not map."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        overflow = 65534
    if uid != overflow:
        return ""
    return (
        f" ({uid} also stands for every user whom a container's user namespace does not map: then "
        "run node and clients in one namespace, or map that user, and never set it as 'node_uid')"
    )


def connected_socket(host: str, port: int, deadline: float) -> socket.socket:
    """A TCP socket connected to the first address of `host` that accepts.

    Raises:
        PipeBroken: no address, or none that accepts the connection.
        PipeTimeout: the deadline, a monotonic time, passed.
    """
    failure: OSError | None = None
    # Python would encode a `str` by a codec that it imports at first use. That costs 3 ms of a
    # node's first transfer, 10 ms if it is read from disk; only non-ASCII names need it.
    name = host.encode() if host.isascii() else host
    try:
        targets = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PipeBroken(f"cannot resolve {host}: {error.strerror}") from error
    for family, kind, protocol, _, address in targets:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(remaining)
            stream.connect(address)
        except OSError as error:
            stream.close()
            failure = error
        else:
            return stream
    if failure is None or isinstance(failure, TimeoutError):
        raise PipeTimeout(f"no connection to {host}:{port} in time") from failure
    raise PipeBroken(f"no connection to {host}:{port}: {failure.strerror}") from failure


def tune(stream: socket.socket) -> None:
    """Disable the delay of small frames; use small buffers if both ends are on one host."""
    if stream.family not in (socket.AF_INET, socket.AF_INET6):
        return
    ignore_errors(lambda: _tune(stream))


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if stream.getsockname()[0] == stream.getpeername()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, _ONE_HOST_BUFFER_BYTES)


def reset(stream: socket.socket) -> None:
    """Close a socket that no other thread uses; the remote end sees a reset."""
    ignore_errors(lambda: stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE))
    stream.close()


def enable_keepalive(stream: socket.socket) -> None:
    """Let the kernel end an idle connection whose remote host has not answered PROBES probes."""
    options = ((socket.TCP_KEEPIDLE, IDLE_SECONDS), (socket.TCP_KEEPINTVL, PROBE_SECONDS))
    for option, value in options:
        ignore_errors(partial(stream.setsockopt, socket.IPPROTO_TCP, option, value))
    ignore_errors(partial(stream.setsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
    end_when_unanswered(stream)


def end_when_unanswered(stream: socket.socket, seconds: float | None = None) -> None:
    """Let the kernel end a connection if bytes that were sent are not acknowledged, or not taken,
    for so long: also if no caller waits for that. With None as long as PROBES probes take, since
    Linux ends an idle connection at this time, too: whatever TCP_KEEPCNT is, after one probe that
    is lost if the time is shorter."""
    if seconds is None:
        seconds = IDLE_SECONDS + PROBES * PROBE_SECONDS
    value = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    ignore_errors(partial(stream.setsockopt, *value))


def bytes_in_kernel(stream: socket.socket, request: int) -> int:
    """Bytes to be received (FIONREAD), or that are not acknowledged (TIOCOUTQ)."""
    count = bytearray(4)
    ioctl(stream, request, count)
    return int.from_bytes(count, sys.byteorder)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket when it connected or began to
    listen; the pid is 0 if it is in another pid namespace."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message: those that were sent, and those of its sender, for
    which the other end had the socket ask. The caller owns them."""
    found = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind in (socket.SCM_RIGHTS, _SCM_PIDFD):
            found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
    return list(found)


def ignore_errors(action: Callable[[], object]) -> None:
    """Run a socket operation that may fail without consequence, because the socket may be dead."""
    try:
        action()
    except OSError:
        return  # the remote end closed first
