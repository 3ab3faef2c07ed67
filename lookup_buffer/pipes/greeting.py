"""Greetings: those who have connected and are not peers yet, each on a thread of its own.

So who says nothing keeps nobody out; and so many are greeted at once, and no more, that a crowd of
those cannot take all threads.
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


class Greetings:
    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(GREETINGS_MAX)

    def serve(self, listener: socket.socket, greet: Callable[[socket.socket], None]) -> None:
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

    def begin(self, greet: Callable[[], None]) -> bool:
        """Whether there was a place; then `greet` runs, and raises nothing."""
        if not self._places.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                greet()
            finally:
                self._places.release()

        threading.Thread(target=run, name="lb-pipe-greet", daemon=True).start()
        return True
