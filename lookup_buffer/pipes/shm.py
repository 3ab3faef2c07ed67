"""`shm:///PATH`: a pipe between processes of a host, with the payload in shared memory.

A unix socket at PATH carries what a `tcp` connection carries, except large payload. Each end copies
that into a memfd of its own, and the other end copies it out. The two descriptors are passed right
after the handshake. So containers need to share only the socket's directory.

`SocketFile` is the listening socket and its file, for its own user only. The file of a dead
listener is replaced; that of a live one is not. A file that is no socket is never touched. Checking
and replacing happen under a lock on the directory, so two processes that start at once cannot
replace each other's socket.

A listening end accepts on a thread of its own. `stream` owns frames and messages.
"""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lookup_buffer.errors import (
    ConfigError,
    LookupBufferError,
    NodeRefused,
    PipeBroken,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.shared_region import SharedMemory
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS, Acceptor
from lookup_buffer.protocol.auth import accept_handshake, request_handshake
from lookup_buffer.protocol.sockets import peer_of, unmapped_user
from lookup_buffer.protocol.stream import FramedSocket

SCHEME: Final = "shm://"

PATH_BYTES_MAX: Final = 107
"""The kernel's bound, without the terminating byte."""
LOCK_SECONDS: Final = 5.0
TRY_AGAIN_SECONDS: Final = 0.02
BACKLOG: Final = 128
_MEMORY: Final = b"M"
"""Sent with the descriptor, because at least one byte is required."""


class _ListeningPipe(StreamPipe):
    def __init__(self, path: Path, token: str | None, limits: PipeLimits) -> None:
        super().__init__(f"{SCHEME}{path}", limits)
        self._memory_bytes = limits.buffer_bytes
        self._token = token
        self._file = SocketFile(path)
        try:
            Acceptor().start(self._file.listener, self._handshake, "lb-pipe-accept")
        except PipeBroken:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()
        super().close()

    def abort(self) -> None:
        self._file.close()
        super().abort()

    def _handshake(self, stream: socket.socket) -> None:
        with suppress(LookupBufferError):
            _check_user(stream)
            link = accept_handshake(stream, token=self._token, timeout=HANDSHAKE_SECONDS)
            self.add_remote_end(
                link, _exchange_memory(stream, link, self._memory_bytes, accepted=True)
            )


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    path = checked_path(uri.removeprefix(SCHEME))
    if listen:
        return _ListeningPipe(path, token, limits)
    deadline = time.monotonic() + timeout
    stream = connect_to(path, deadline)
    left = max(deadline - time.monotonic(), 0.0)
    link = request_handshake(stream, token=token, timeout=left)
    pipe = StreamPipe(uri, limits)
    pipe.add_remote_end(link, _exchange_memory(stream, link, limits.buffer_bytes, accepted=False))
    return pipe


def _exchange_memory(
    stream: socket.socket, link: FramedSocket, nbytes: int, *, accepted: bool
) -> SharedMemory:
    """Exchange the descriptors of both ends' memory, right after the handshake over `stream`.

    The connecting end sends first, and the other end only after that. So no frame is in flight: the
    link would read past it and lose the descriptor.

    Raises:
        PipeError, ProtocolError: the other end left, or sent no memory that is safe to map.
        ConfigError: the system does not have so much memory. The link is then closed.
    """
    try:
        memory = SharedMemory(nbytes)
    except OSError as error:
        link.abort()
        raise ConfigError(
            f"cannot allocate {nbytes} bytes of shared memory: {error.strerror}; lower buffer_bytes"
        ) from error
    try:
        stream.settimeout(HANDSHAKE_SECONDS)
        if not accepted:
            socket.send_fds(stream, [_MEMORY], [memory.descriptor])
        _receive_memory(stream, memory)
        if accepted:
            socket.send_fds(stream, [_MEMORY], [memory.descriptor])
        stream.settimeout(None)
    except TimeoutError as error:
        _close(link, memory)
        raise PipeTimeout("the other end did not send its memory in time") from error
    except OSError as error:
        _close(link, memory)
        raise PipeBroken(f"the other end left before it was connected: {error}") from error
    except BaseException:
        _close(link, memory)
        raise
    return memory


def _receive_memory(stream: socket.socket, memory: SharedMemory) -> None:
    flags = socket.MSG_CMSG_CLOEXEC
    content, descriptors, _, _ = socket.recv_fds(stream, len(_MEMORY), 1, flags)
    try:
        if content != _MEMORY or len(descriptors) != 1:
            raise ProtocolError("the other end sent no memory")
        memory.adopt(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _close(link: FramedSocket, memory: SharedMemory) -> None:
    link.abort()
    memory.close()


class SocketFile:
    """A listening socket, `listener`, and its file.

    Raises:
        ConfigError: another process listens there, or the path is something else than a socket.
        PipeBroken: the system does not allow it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _directory_locked(path.parent):
                _remove_stale(path)
                # Before `bind`, so that the file has this mode from the start.
                os.fchmod(self.listener.fileno(), 0o600)
                self.listener.bind(str(path))
                self._file = _identity(path)
                self.listener.listen(BACKLOG)
        except OSError as error:
            self.listener.close()
            raise PipeBroken(f"cannot listen at {path}: {error.strerror}") from error
        except BaseException:
            self.listener.close()
            raise

    def close(self) -> None:
        """Remove the file, if it is still this socket's, and wake the accepting thread. Idempotent.

        In this order: between the two steps no process can find the file stale and replace it.
        """
        with suppress(OSError):
            if _identity(self._path) == self._file:
                self._path.unlink()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)


def checked_path(text: str) -> Path:
    """The path of a socket, checked.

    Raises:
        ConfigError: a socket cannot have this path.
    """
    if not text.startswith("/") or "\0" in text or len(os.fsencode(text)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"{text!r} is no path of a socket: allowed is an absolute path of at most"
            f" {PATH_BYTES_MAX} bytes"
        )
    return Path(text)


def connect_to(path: Path, deadline: float) -> socket.socket:
    """Connect to the listener at `path`; waits for it to start listening.

    Raises:
        NodeRefused: this user has no permission, or another one listens there.
        PipeTimeout: no process listened there by the deadline, a monotonic time.
        PipeBroken: the system does not allow it.
    """
    while True:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(max(deadline - time.monotonic(), TRY_AGAIN_SECONDS))
            stream.connect(str(path))
        except PermissionError as error:
            stream.close()
            raise NodeRefused(f"this user may not connect to {path}") from error
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError, BlockingIOError) as error:
            stream.close()
            if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
                raise PipeTimeout(f"no end listens at {path}") from error
            time.sleep(TRY_AGAIN_SECONDS)
        except OSError as error:
            stream.close()
            raise PipeBroken(f"cannot connect to {path}: {error.strerror}") from error
        else:
            _check_user(stream)
            return stream


def _check_user(stream: socket.socket) -> None:
    """Raises NodeRefused, with the socket closed, if the other end is neither of this user nor of
    root: where others may write the folder, one of them may have listened first."""
    _, uid = peer_of(stream)
    if uid not in (os.getuid(), 0):
        stream.close()
        raise NodeRefused(
            f"the other end is a process of user {uid}, this one of user {os.getuid()}: use a path "
            f"in a folder of your own{unmapped_user(uid)}"
        )


@contextmanager
def _directory_locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PipeBroken(f"another process keeps {directory} locked") from None
                time.sleep(TRY_AGAIN_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} is no socket; remove the file, or use another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # a full backlog: the listener is alive
    raise ConfigError(f"another end already listens at {path}")


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
