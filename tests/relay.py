"""A TCP relay that does what networks do: holds and cuts in the middle, delays, and swallows.

Threads of its own, two for each connection; all end by `close`.
"""

import socket
import threading
import time
from contextlib import suppress

from patience import scaled

PIECE_BYTES = 16 << 10
CONNECT_SECONDS = scaled(2.0)
ANYWHERE = ("127.0.0.1", 0)


class Blackhole:
    """A port at which nobody can connect, and nobody is refused: a host that is gone."""

    def __init__(self) -> None:
        self._listener = socket.create_server(ANYWHERE, backlog=1)
        self.port: int = self._listener.getsockname()[1]
        self._waiting: list[socket.socket] = []

    def __enter__(self) -> "Blackhole":
        for _ in range(8):  # fill the queue of those that nobody takes in
            waiting = socket.socket()
            waiting.settimeout(0.05)
            self._waiting.append(waiting)
            with suppress(TimeoutError):
                waiting.connect(("127.0.0.1", self.port))
        return self

    def __exit__(self, *_: object) -> None:
        for end in [self._listener, *self._waiting]:
            end.close()

    def take_in(self, seconds: float) -> None:
        """For so long let everybody connect, whose next try is a second after the first."""
        ends_at = time.monotonic() + seconds
        self._listener.settimeout(0.05)
        while time.monotonic() < ends_at:
            with suppress(TimeoutError):
                self._waiting.append(self._listener.accept()[0])


class Relay:
    """Passes on whatever comes to `port`, to what `connect_to` names on this machine.

    All faults are on the way back to whoever connected. `hold_after(n)` lets n more bytes through,
    then nothing until `let_go` (so `hold_after(0)` swallows); `cut_after(n)` breaks the connection
    there, once; `delay` keeps each piece for so long.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(ANYWHERE)
        self.port: int = self._listener.getsockname()[1]
        self._target: int | str = 0
        self._changed = threading.Condition()
        self._allowance_bytes: int | None = None
        self._cuts = False
        self._delay_seconds = 0.0
        self._closed = False
        self._sockets: list[socket.socket] = []
        self.connections = 0
        """How many were ever made to it."""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def connect_to(self, target: int | str) -> None:
        """A port, or the path of a unix socket."""
        self._target = target

    def hold_after(self, nbytes: int) -> None:
        self._limit(nbytes, cuts=False)

    def cut_after(self, nbytes: int) -> None:
        self._limit(nbytes, cuts=True)

    def let_go(self) -> None:
        self._limit(None, cuts=False)

    def delay(self, seconds: float) -> None:
        self._delay_seconds = seconds

    def _limit(self, nbytes: int | None, *, cuts: bool) -> None:
        with self._changed:
            self._allowance_bytes, self._cuts = nbytes, cuts
            self._changed.notify_all()

    def cut(self) -> None:
        """Break what is connected now, and with it what is still on the way."""
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for connection in [self._listener, *self._sockets]:
            connection.close()
        for thread in self._threads:
            thread.join(CONNECT_SECONDS)

    def _accept(self) -> None:
        while not self._closed:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(ours)
            self.connections += 1
            try:
                theirs = self._dial()
            except OSError:
                ours.close()  # nobody there, and that is what whoever connected shall see
                continue
            theirs.settimeout(None)
            self._sockets.append(theirs)
            self._pass_on(ours, theirs, held=False)
            self._pass_on(theirs, ours, held=True)

    def _dial(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target), CONNECT_SECONDS)
        theirs = socket.socket(socket.AF_UNIX)
        try:
            theirs.connect(self._target)
        except OSError:
            theirs.close()
            raise
        return theirs

    def _pass_on(self, source: socket.socket, target: socket.socket, *, held: bool) -> None:
        thread = threading.Thread(target=self._pump, args=(source, target, held), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pump(self, source: socket.socket, target: socket.socket, held: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                while piece:
                    count = self._allowed(len(piece)) if held else len(piece)
                    if count == 0:
                        raise ConnectionAbortedError
                    target.sendall(piece[:count])
                    piece = piece[count:]
        # The end of one side is the end of both: the peers speak in turns.
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _allowed(self, nbytes: int) -> int:
        """How many of `nbytes` may pass now, waiting until it is at least one; 0 for a cut."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=self._delay_seconds)
            self._changed.wait_for(lambda: self._closed or self._cuts or self._allowance_bytes != 0)
            if self._closed:
                return 0
            if self._allowance_bytes is None:
                return nbytes
            nbytes = min(nbytes, self._allowance_bytes)
            self._allowance_bytes -= nbytes
            if nbytes == 0:  # once: whoever connects again gets through
                self._allowance_bytes, self._cuts = None, False
            return nbytes
