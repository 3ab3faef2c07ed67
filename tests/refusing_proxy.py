"""A TCP proxy in front of a node that refuses connections for a while, at a chosen protocol step.

It reads the frames that pass. When the armed step comes by, it closes its listening socket, so that
the kernel refuses whoever connects; and, where it `resets`, it also resets the connections that
exist, and the frame of that step is lost. After `seconds` it listens again. The node behind it is
told to advertise the proxy's address.
"""

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from lookup_buffer.protocol.framing import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    decode_header,
    decode_prologue,
)
from nodes import NodeProcess, StartNode, wait_until
from ports import free_port

PAYLOAD_BYTES_MAX: Final = 1 << 30
PIECE_BYTES: Final = 64 << 10
CONNECT_SECONDS: Final = 5.0
_RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)


def _says(name: str, value: str) -> Callable[[Any], bool]:
    return lambda header: isinstance(header, dict) and header.get(name) == value


TO_THE_OWNER: Final[dict[str, Callable[[Any], bool]]] = {
    "hello": lambda header: isinstance(header, list) and header[:1] == ["hello"],
    "handoffs": _says("op", "handoffs"),
    "take": _says("op", "take"),
    "get": _says("op", "get"),
    "acknowledge": _says("op", "acknowledge"),
    "holds": _says("op", "holds"),
}
FROM_THE_OWNER: Final[dict[str, Callable[[Any], bool]]] = {
    "leased": _says("state", "leased"),
    "payload": lambda header: isinstance(header, dict) and "payload" in header,
    "won": _says("state", "won"),
    "present": _says("state", "present"),
}
OF_A_NEW_CONNECTION: Final = ("hello", "handoffs")
STEPS: Final = (*TO_THE_OWNER, *FROM_THE_OWNER)
"""What passes between two nodes for a hand-off."""


@dataclass(eq=False)
class _Pair:
    """The two sockets of one connection; closed by the second of the threads that read them."""

    reader: socket.socket
    node: socket.socket
    resets: bool = False
    _threads: int = 2
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self, how: int) -> None:
        """Wake the threads that read."""
        for one in (self.reader, self.node):
            with suppress(OSError):
                one.shutdown(how)

    def left(self) -> bool:
        """One thread reads no more. Whether that was the last one."""
        self.end(socket.SHUT_RD if self.resets else socket.SHUT_RDWR)
        with self._lock:
            self._threads -= 1
            if self._threads:
                return False
        for one in (self.reader, self.node):
            if self.resets:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            one.close()
        return True


class RefusingProxy:
    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.target = free_port()
        self._port = free_port()
        self.address = f"tcp://127.0.0.1:{self._port}"
        self.struck: Counter[str] = Counter()
        """How often it refused, by step."""
        self._lock = threading.Lock()
        self._armed: tuple[str, bool] | None = None
        self._refuses = False
        self._closed = False
        self._relents = threading.Event()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._listen()

    def arm(self, step: str, resets: bool = True) -> None:
        """Refuse when `step` comes by next; nothing while it refuses already. Connections that
        exist are ended where only a new one takes that step."""
        with self._lock:
            if self._refuses:
                return
            self._armed = (step, resets)
        if step in OF_A_NEW_CONNECTION:
            for pair in list(self._pairs):
                pair.end(socket.SHUT_RDWR)

    @property
    def is_ready(self) -> bool:
        """Whether it passes everything on, and waits for no step."""
        with self._lock:
            return not self._refuses and self._armed is None

    def refuse(self, step: str = "", resets: bool = True) -> None:
        """Refuse from now on, for a while; nothing while it refuses already."""
        with self._lock:
            if self._refuses or self._closed:
                return
            self._relents.clear()
            self._refuses, self._armed = True, None
            self.struck[step] += 1
            listener, pairs = self._listener, list(self._pairs)
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closes it
        self._accepting.join()
        if resets:
            for pair in pairs:
                pair.resets = True
                pair.end(socket.SHUT_RD)
        self._start(self._listen_again)

    def relent(self) -> None:
        """Refuse no longer."""
        self._relents.set()
        wait_until(lambda: not self._refuses, 30.0)

    def __enter__(self) -> "RefusingProxy":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self.relent()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for pair in list(self._pairs):
            pair.end(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._accepting = self._start(self._accept, self._listener)

    def _listen_again(self) -> None:
        self._relents.wait(self.seconds)
        with self._lock:
            self._listen()
            self._refuses = False

    def _start(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name="refusing-proxy")
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    reader, _ = listener.accept()
                except OSError:
                    return
                try:
                    node = socket.create_connection(("127.0.0.1", self.target), CONNECT_SECONDS)
                except OSError:
                    reader.close()
                    continue
                node.settimeout(None)
                pair = _Pair(reader, node)
                self._pairs.add(pair)
                self._start(self._pump, pair, reader, node, TO_THE_OWNER)
                self._start(self._pump, pair, node, reader, FROM_THE_OWNER)

    def _pump(
        self,
        pair: _Pair,
        source: socket.socket,
        sink: socket.socket,
        steps: dict[str, Callable[[Any], bool]],
    ) -> None:
        try:
            while not pair.resets:
                self._pass_on_frame(pair, source, sink, steps)
        except OSError:
            pass  # either end has left, or was killed
        finally:
            if pair.left():
                self._pairs.discard(pair)

    def _pass_on_frame(
        self,
        pair: _Pair,
        source: socket.socket,
        sink: socket.socket,
        steps: dict[str, Callable[[Any], bool]],
    ) -> None:
        prologue = _exactly(source, PROLOGUE_BYTES)
        header_nbytes, payload_nbytes = decode_prologue(
            prologue, max_header_bytes=MAX_HEADER_BYTES, max_payload_bytes=PAYLOAD_BYTES_MAX
        )
        packed = _exactly(source, header_nbytes)
        struck = self._disarm(decode_header(packed), steps)
        if struck is None:
            sink.sendall(prologue + packed)
        elif payload_nbytes:  # in the middle of the payload
            half = _exactly(source, payload_nbytes // 2)
            sink.sendall(prologue + packed + half)
            payload_nbytes -= len(half)
            self.refuse(*struck)
        else:
            self.refuse(*struck)
            if not pair.resets:
                sink.sendall(prologue + packed)
        while payload_nbytes and not pair.resets:
            piece = source.recv(min(payload_nbytes, PIECE_BYTES))
            if not piece:
                raise ConnectionResetError
            sink.sendall(piece)
            payload_nbytes -= len(piece)

    def _disarm(
        self, header: Any, steps: dict[str, Callable[[Any], bool]]
    ) -> tuple[str, bool] | None:
        """The armed step and whether it resets, where it comes by just now."""
        with self._lock:
            if self._armed is None or self._armed[0] not in steps:
                return None
            if not steps[self._armed[0]](header):
                return None
            struck, self._armed = self._armed, None
            return struck


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = source.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return bytes(data)


def behind_refusals(proxy: RefusingProxy, start_node: StartNode, **settings: Any) -> NodeProcess:
    """A node that others reach only through `proxy`."""
    listen = f"tcp://127.0.0.1:{proxy.target}"
    return start_node(listen=listen, advertise=proxy.address, **settings)
