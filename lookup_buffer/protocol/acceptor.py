"""`Acceptor`: serves the connections of a listening socket, each on a separate thread.

Used by pipes and device pools. A silent client does not block others, because each has its
own thread. The limit on the number of connections served at a time bounds these threads. A
connection for which the system grants no thread is closed; those that come later are served.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from lookup_buffer.errors import PipeBroken

HANDSHAKES_MAX: Final = 256
"""Default limit of an acceptor, and length of the kernel's queue of connections."""
HANDSHAKE_SECONDS: Final = 5.0
"""Bound on one handshake."""
RETRY_SECONDS: Final = 0.05


class Acceptor:
    def __init__(self, limit: int = HANDSHAKES_MAX, thread_name: str = "lb-pipe-handshake") -> None:
        self._slots = threading.BoundedSemaphore(limit)
        self._thread_name = thread_name

    def start(
        self, listener: socket.socket, handle: Callable[[socket.socket], object], thread_name: str
    ) -> None:
        """As `serve`, on a thread of that name.

        Raises:
            PipeBroken: the system grants no thread. The listener is then closed.
        """
        serving = (listener, handle)
        try:
            threading.Thread(target=self.serve, args=serving, name=thread_name, daemon=True).start()
        except RuntimeError as error:
            listener.close()
            raise PipeBroken(f"the system does not allow to listen: {error}") from error

    def serve(self, listener: socket.socket, handle: Callable[[socket.socket], object]) -> None:
        """Run `handle` for each connection until the listener is shut down; then close it.

        At the limit, connections wait in the kernel's queue; the handshake timeout ends silent
        ones. `handle` as in `try_start`.
        """
        with listener:
            while True:
                self._slots.acquire()
                try:
                    stream, _ = listener.accept()
                except OSError as error:
                    self.release()
                    if error.errno == errno.EINVAL:  # the listener was shut down
                        return
                    time.sleep(RETRY_SECONDS)  # no free descriptor, or the client disconnected
                    continue
                if not self._start(partial(handle, stream)):
                    stream.close()
                    time.sleep(RETRY_SECONDS)

    def try_start(self, handle: Callable[[], object]) -> bool:
        """Run `handle` on a thread, unless the limit is reached or the system grants none; returns
        whether it runs. `handle` must not raise. If it returns True, it keeps its slot until a call
        of `release`."""
        return self._slots.acquire(blocking=False) and self._start(handle)

    def release(self) -> None:
        """Free the slot that a `handle` kept."""
        self._slots.release()

    def _start(self, handle: Callable[[], object]) -> bool:
        """Returns whether it runs; if not, its slot is free."""

        def run() -> None:
            keeps_slot: object = False
            try:
                keeps_slot = handle()
            finally:
                if keeps_slot is not True:
                    self.release()

        try:
            threading.Thread(target=run, name=self._thread_name, daemon=True).start()
        except RuntimeError:  # a limit on threads, or no memory
            self.release()
            return False
        return True


def listening_socket(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens at the address, and HOST:PORT with the actual port. At `::` it accepts
    IPv4 as well, where the system can.

    Raises:
        OSError: the address is in use, or is not an address of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port),
        family=family,
        backlog=HANDSHAKES_MAX,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return listener, f"{shown}:{listener.getsockname()[1]}"
