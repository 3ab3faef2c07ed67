"""A TCP relay that can be held in the middle of a transfer, which real networks do and tests need.

Threads of its own, two for each connection; all end by `close`.
"""

import socket
import threading
from contextlib import suppress

PIECE_BYTES = 16 << 10
CONNECT_SECONDS = 2.0
ANYWHERE = ("127.0.0.1", 0)


class Relay:
    """Passes on whatever comes to `port`, to a port of this machine that `connect_to` names.

    `hold_after(n)` lets n more bytes through on the way back to whoever connected, then nothing
    until `let_go`.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(ANYWHERE)
        self.port: int = self._listener.getsockname()[1]
        self._target_port = 0
        self._changed = threading.Condition()
        self._allowance_bytes: int | None = None
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def connect_to(self, port: int) -> None:
        self._target_port = port

    def hold_after(self, nbytes: int) -> None:
        with self._changed:
            self._allowance_bytes = nbytes

    def let_go(self) -> None:
        with self._changed:
            self._allowance_bytes = None
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
            try:
                theirs = socket.create_connection(("127.0.0.1", self._target_port), CONNECT_SECONDS)
            except OSError:
                ours.close()  # nobody there, and that is what whoever connected shall see
                continue
            theirs.settimeout(None)
            self._sockets.append(theirs)
            self._pass_on(ours, theirs, held=False)
            self._pass_on(theirs, ours, held=True)

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
                        return
                    target.sendall(piece[:count])
                    piece = piece[count:]
        # The end of one side is the end of both: the peers speak in turns.
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _allowed(self, nbytes: int) -> int:
        """How many of `nbytes` may pass now, waiting until it is at least one; 0 at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._allowance_bytes != 0)
            if self._closed:
                return 0
            if self._allowance_bytes is not None:
                nbytes = min(nbytes, self._allowance_bytes)
                self._allowance_bytes -= nbytes
            return nbytes
