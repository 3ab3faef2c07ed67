"""TCP proxies for tests. Each has threads of its own, all ended by `close`.

`Relay` does what networks do: holds and cuts in the middle, delays, and swallows. `PeerProxy`
stands between two nodes: it can stop a transfer in its middle, or flip a byte in it.
`RefusingProxy` stands in front of a node and refuses connections for a while, at a chosen protocol
step. The node behind either is told to advertise the proxy's address.
"""

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from lookup_buffer.errors import ProtocolError
from lookup_buffer.protocol.framing import (
    MAX_HEADER_BYTES,
    PROLOGUE_BYTES,
    Mac,
    decode_header,
    decode_prologue,
)
from nodes import NodeProcess, StartNode, wait_until
from patience import scaled
from servers import free_port

RELAY_PIECE_BYTES = 16 << 10
RELAY_CONNECT_SECONDS = scaled(2.0)
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
        self._silent: list[socket.socket] = []
        """Ends from which nothing more is passed on."""
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

    def silence(self) -> None:
        """Pass nothing more of the connections that there are, as a firewall that forgot them."""
        with self._changed:
            self._silent = list(self._sockets)

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
            thread.join(RELAY_CONNECT_SECONDS)

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
            return socket.create_connection(("127.0.0.1", self._target), RELAY_CONNECT_SECONDS)
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
            while piece := source.recv(RELAY_PIECE_BYTES):
                while piece:
                    if source in self._silent:
                        piece = b""
                        continue
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


PAYLOAD_BYTES_MAX: Final = 1 << 30
PIECE_BYTES: Final = 64 << 10
CONNECT_SECONDS: Final = 5.0
_RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)


def _says(name: str, value: str) -> Callable[[Any], bool]:
    return lambda header: isinstance(header, dict) and header.get(name) == value


def _greets(role: str) -> Callable[[Any], bool]:
    """The hello of a connection in this role."""
    return lambda header: (
        isinstance(header, list) and header[:1] == ["hello"] and header[4][0] == role
    )


TO_THE_OWNER: Final[dict[str, Callable[[Any], bool]]] = {
    "tensors": _greets("tensors"),
    "handoffs": _greets("handoffs"),
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
OF_A_NEW_CONNECTION: Final = ("tensors", "handoffs")
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
        struck = self._disarm(_without_mac(packed), steps)
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


def _without_mac(packed: bytes) -> Any:
    """The header; after the handshake it ends with a MAC, which cannot be checked here."""
    try:
        return decode_header(packed)
    except ProtocolError:
        return decode_header(packed[: -Mac.NBYTES])


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
