"""Greetings: those who have connected to a listening socket, each on a thread of its own.

So who says nothing keeps nobody out; and so many are served at once, and no more, that a crowd of
those cannot take all threads. Of nodes and of pipes.
"""

import errno
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

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
        """Greet all who connect, until the listener is shut down; then close it."""
        with listener:
            while True:
                try:
                    stream, _ = listener.accept()
                except OSError as error:
                    if error.errno == errno.EINVAL:  # it was shut down
                        return
                    time.sleep(TRY_AGAIN_SECONDS)  # no descriptor is free, or who came has left
                    continue
                if not self.begin(partial(greet, stream)):
                    stream.close()

    def begin(self, greet: Callable[[], object]) -> bool:
        """Whether there was a place; then `greet` runs, and raises nothing. Where it returns True
        its place is taken until somebody calls `leave`."""
        if not self._places.acquire(blocking=False):
            return False

        def run() -> None:
            stays: object = False
            try:
                stays = greet()
            finally:
                if stays is not True:
                    self.leave()

        threading.Thread(target=run, name=self._thread_name, daemon=True).start()
        return True

    def leave(self) -> None:
        self._places.release()
