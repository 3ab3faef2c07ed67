"""Closes descriptors that clients passed, which can block who closes them.

A client may pass anything that it can open. The last close of a socket lasts as long as its owner
says (`SO_LINGER`), and who still has it can set that at any time; a socket may have others in its
queue, which are closed with it. No socket lingers when a process exits. So a process of its own
inherits such descriptors, the node closes them first, and then that process exits. Nothing is
received from them, for another thread can hold the lock which that takes.

The threads are daemons: a close that lasts, of a file of a file system whose server is stopped,
does not delay the end of the node.
"""

import fcntl
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from termios import FIONREAD
from typing import Final

CLOSERS_MAX: Final = 16
"""Closes that last, at the same time; the others wait."""
GATHERING_SECONDS: Final = 0.02
"""What comes in this time is closed together."""
_CHILD: Final = (sys.executable, "-ISs", "-c", "import os; os.read(0, 1)")
"""Exits at the end of its input. A start takes some 15 ms of a processor."""

_log = logging.getLogger(__name__)


class Closer:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._waiting: list[int] = []
        self._is_gathering = False
        """Whether a thread is about to take what waits."""
        self._threads = 0
        self._count = 0

    def exceeds(self, share: float) -> bool:
        """Whether more than this share of the descriptors that the node may open are to be closed.
        With none left to open the kernel drops what a client passes, on the thread that
        receives."""
        return self._count > 0 and self._count > share * descriptors_max()

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
        """Close descriptors, and what nobody received from them, soon. Never waits. Also starts a
        thread for those that wait, if there could be none before."""
        with self._lock:
            self._waiting.extend(descriptors)
            self._count += len(descriptors)
            if not self._waiting or self._is_gathering or self._threads == CLOSERS_MAX:
                return
            self._is_gathering = True
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="lb-close", daemon=True).start()
        except RuntimeError:  # no memory for a thread: the next call starts one
            with self._lock:
                self._is_gathering = False
                self._threads -= 1

    def _run(self) -> None:
        time.sleep(GATHERING_SECONDS)
        with self._lock:
            descriptors, self._waiting = self._waiting, []
            self._is_gathering = False
        try:
            self._close(descriptors)
        except Exception:  # noqa: BLE001 -- others are still to be closed
            _log.exception("descriptors of clients were not closed; please report this bug")
        with self._lock:
            self._threads -= 1
        self.close(())  # what came while there were as many threads as may be

    def _close(self, descriptors: Sequence[int]) -> None:
        foreign = [one for one in descriptors if not _is_memory(one)]
        with self._starting:  # one at a time: it takes a processor
            child = _start_child(foreign) if foreign else None
        for descriptor in descriptors:
            with suppress(OSError):  # it is closed also where its file system reports an error
                os.close(descriptor)
        with self._lock:
            self._count -= len(descriptors)
        if child is not None:
            child.communicate()


def urgent_in_line(connection: socket.socket) -> None:
    """Receive urgent data (`MSG_OOB`) like all others. Else the kernel drops them in a call that
    receives, and closes the descriptors that came with them."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)


def descriptors_max() -> int:
    """How many this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _unread_bytes(connection: socket.socket) -> int:
    found = fcntl.ioctl(connection, FIONREAD, b"\0" * 4)
    return int(struct.unpack("@i", found)[0])


def _is_memory(descriptor: int) -> bool:
    """Nothing delays its close, but to free 1 GiB takes 0.25 s."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _start_child(descriptors: Sequence[int]) -> "subprocess.Popen[bytes] | None":
    """A process that has these descriptors until its input ends. None if there cannot be another
    one: then they are closed here, and what lingers keeps a thread."""
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        return subprocess.Popen(_CHILD, stdin=subprocess.PIPE, close_fds=False, cwd="/")
    except (OSError, MemoryError, subprocess.SubprocessError):
        return None
