"""Closes on threads what may block its closer: descriptors that clients passed.

A client may pass anything that it can open. The close of a socket that lingers, or of a file of a
file system whose server is stopped, takes as long as its owner likes. A descriptor that was sent
and not received is closed with its socket, so a unix socket is read to its end before. Its other
end may still have it: it could send for ever, or let a read wait, so the socket is shut down first.
The threads are daemons: a close that lasts does not delay the end of the node.
"""

import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from fcntl import ioctl
from termios import FIONREAD
from typing import Final

from lookup_buffer.protocol.sockets import descriptors_in

CLOSERS_MAX: Final = 16
"""Closes that last, at the same time; the others wait."""
RECEIVED_MAX: Final = 253
"""Descriptors of one message, by Linux. With room for fewer the kernel would close the others, on
the thread that receives."""
READ_BYTES: Final = 64 << 10
EMPTY_MAX: Final = 1000
"""Empty messages, more than one socket holds: their end cannot be told from one after the other.
In a stream there is none."""
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * RECEIVED_MAX) + 1024
"""Also for what a socket may ask for beside: credentials, label, and a pidfd."""
_NO_LINGER: Final = struct.pack("@ii", 0, 0)

_log = logging.getLogger(__name__)


class Closer:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._threads = 0

    def close_connection(self, connection: socket.socket) -> None:
        """End a unix socket at once, and close it soon if there are bytes that nobody received.
        Never waits."""
        with suppress(OSError):  # the remote end was first
            connection.shutdown(socket.SHUT_RDWR)
        if _unread_bytes(connection):
            self.close([connection.detach()])
        else:
            connection.close()

    def close(self, descriptors: Sequence[int]) -> None:
        """Close descriptors, and those that nobody received from them, soon. Never waits."""
        with self._lock:
            self._waiting.extend(descriptors)
            if not self._waiting or self._threads == CLOSERS_MAX:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="lb-close", daemon=True).start()
        except RuntimeError:  # no memory for a thread: the next call starts one
            with self._lock:
                self._threads -= 1

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                descriptor = self._waiting.popleft()
            try:
                _close(descriptor)
            except Exception:  # noqa: BLE001 -- this thread is still to close the others
                _log.exception("a descriptor of a client was not closed; please report this bug")


def urgent_in_line(connection: socket.socket) -> None:
    """Receive urgent data (`MSG_OOB`) like all others. Else the kernel drops them in a call that
    receives, and closes the descriptors that came with them."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


def _unread_bytes(connection: socket.socket) -> int:
    found = ioctl(connection, FIONREAD, b"\0" * 4)
    return int(struct.unpack("@i", found)[0])


def _close(descriptor: int) -> None:
    """Close it; before, those that nobody received from it, in which there may be others. The
    deepest first, so that few are open."""
    left: list[int | socket.socket] = [descriptor]
    while left:
        file = left.pop()
        connection = _unix_socket(file) if isinstance(file, int) else file
        if connection is None:
            continue
        if found := _receive(connection):
            left += [connection, *found]
        else:
            with suppress(OSError):
                connection.close()


def _unix_socket(descriptor: int) -> socket.socket | None:
    """A unix socket, to which nothing can be sent any more. Other files are closed: None."""
    try:
        file = socket.socket(fileno=descriptor)
    except OSError:  # it is no socket
        with suppress(OSError):  # it is closed also where its file system reports an error
            os.close(descriptor)
        return None
    if file.family == socket.AF_UNIX:
        with suppress(OSError):
            file.shutdown(socket.SHUT_RD)
            urgent_in_line(file)
        return file
    with suppress(OSError), file:
        file.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    return None


def _receive(connection: socket.socket) -> list[int]:
    """The next descriptors that nobody received, or a connection that nobody accepted; none if that
    was all."""
    empty, most = 0, 1 if connection.type == socket.SOCK_STREAM else EMPTY_MAX
    with suppress(OSError):
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return [connection.accept()[0].detach()]  # an error, where none waits
        while empty < most:
            data, ancillary, _, _ = connection.recvmsg(
                READ_BYTES, _ANCILLARY_BYTES, socket.MSG_DONTWAIT
            )
            if descriptors := descriptors_in(ancillary):
                return descriptors
            empty += not data
    return []
