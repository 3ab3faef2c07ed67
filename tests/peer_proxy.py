"""A TCP proxy between two nodes: it can stop a transfer in its middle, or flip a byte in it.

The node behind it is told to advertise the proxy's address. Threads of its own, ended by `close`.
"""

import socket
import threading
from dataclasses import dataclass, field

from nodes import NodeProcess, StartNode
from ports import free_port

STEP_BYTES = 64 << 10


@dataclass
class PeerProxy:
    """`target` is the port of the node behind it; set it before the first connection."""

    target: int = 0
    flip_after_bytes: int | None = None
    """Flip one byte of what the node sends, at this place of each connection."""
    hold_after_bytes: int | None = None
    """Pass on so much of what the node sends, then nothing until `release`."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set while a transfer is stopped in its middle."""
    passed_bytes: int = 0
    _released: threading.Event = field(default_factory=threading.Event)
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def release(self) -> None:
        self._released.set()

    def cut(self) -> None:
        """End all connections that there are."""
        for one in self._sockets:
            _end(one)

    def __enter__(self) -> "PeerProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            _end(one)
        for thread in self._threads:
            thread.join(5.0)

    def _start(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name="peer-proxy")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            try:
                node = socket.create_connection(("127.0.0.1", self.target), 5.0)
            except OSError:
                reader.close()
                continue
            node.settimeout(None)
            self._sockets += [reader, node]
            self._start(self._pump, reader, node, False)
            self._start(self._pump, node, reader, True)

    def _pump(self, source: socket.socket, sink: socket.socket, from_node: bool) -> None:
        moved = 0
        try:
            while data := bytearray(source.recv(STEP_BYTES)):
                if from_node:
                    self._tamper(data, moved)
                moved += len(data)
                sink.sendall(data)
        except OSError:
            pass  # either end was killed: that is what is being tested
        finally:
            _end(source)
            _end(sink)

    def _tamper(self, data: bytearray, moved: int) -> None:
        self.passed_bytes += len(data)
        flip = self.flip_after_bytes
        if flip is not None and moved <= flip < moved + len(data):
            data[flip - moved] ^= 0x10
        if self.hold_after_bytes is not None and moved + len(data) > self.hold_after_bytes:
            self.held.set()
            self._released.wait()


def _end(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()


def behind(proxy: PeerProxy, start_node: StartNode, **settings: object) -> NodeProcess:
    """A node that others reach only through `proxy`."""
    proxy.target = free_port()
    listen = f"tcp://127.0.0.1:{proxy.target}"
    return start_node(listen=listen, advertise=proxy.address, **settings)
