"""Closes on threads what may block its closer: descriptors that clients passed.

A client may pass anything that it can open. The close of a socket that lingers, or of a file of a
file system whose server is stopped, takes as long as its owner likes. A descriptor that was sent
and not received is closed with the connection, so a connection with unread bytes is closed here,
too. The threads are daemons: a close that lasts does not delay the end of the node.
"""

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

CLOSERS_MAX: Final = 16
"""Closes that last, at the same time; the others wait."""
RECEIVED_MAX: Final = 253
"""Descriptors of one message, by Linux. With room for fewer the kernel would close the others, on
the thread that receives."""
READ_BYTES: Final = 64 << 10
EMPTY_MAX: Final = 1000
"""More than one socket holds."""
_NO_LINGER: Final = struct.pack("@ii", 0, 0)


class Closer:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[int | socket.socket] = deque()
        self._threads = 0

    def close_connection(self, connection: socket.socket) -> None:
        """End a unix socket at once, and close it soon if there are bytes that nobody received.
        Never waits."""
        with suppress(OSError):  # the remote end was first
            connection.shutdown(socket.SHUT_RDWR)
        if _unread_bytes(connection):
            self.close([connection])
        else:
            connection.close()

    def close(self, files: Sequence[int | socket.socket]) -> None:
        """Close descriptors, and unix sockets with what is unread in them, soon. Never waits."""
        with self._lock:
            self._waiting.extend(files)
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
                file = self._waiting.popleft()
            if isinstance(file, int):
                _close(file)
            else:
                _drain(file)


def _unread_bytes(connection: socket.socket) -> int:
    found = ioctl(connection, FIONREAD, b"\0" * 4)
    return int(struct.unpack("@i", found)[0])


def _close(descriptor: int) -> None:
    """Raises nothing: the file is closed also where that reports an error of its file system."""
    try:
        file = socket.socket(fileno=descriptor)
    except OSError:  # it is no socket
        with suppress(OSError):
            os.close(descriptor)
        return
    if file.family == socket.AF_UNIX:
        _drain(file)
        return
    with suppress(OSError), file:
        file.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _drain(connection: socket.socket) -> None:
    """Receive what is left and close it: descriptors that nobody received might linger, also those
    in a socket that is among them. Linux allows four levels of that. Raises nothing."""
    with suppress(OSError), connection:
        connection.setblocking(False)
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            while True:
                _drain(connection.accept()[0])
        empty = 0  # messages; at the end of a stream there seems to be one after the other
        while empty < EMPTY_MAX:
            data, descriptors, _, _ = socket.recv_fds(connection, READ_BYTES, RECEIVED_MAX)
            for descriptor in descriptors:
                _close(descriptor)
            empty += not data and not descriptors
