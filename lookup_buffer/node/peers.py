"""The peer server: sends tensors to other nodes over TCP.

One thread accepts (`lb-peer-accept`), and one serves each connection (`lb-peer`, a bounded number).
The payload is sent directly from the arena, pinned meanwhile. A request for another boot or
generation is answered `stale`, and the record in the store is corrected. A connection for hand-offs
is passed on to `handoffs` on the loop. `node.py` starts it; the callers are the fetchers and owners
of other nodes.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.protocol.acceptor import Acceptor, listening_socket
from lookup_buffer.protocol.auth import accept_handshake
from lookup_buffer.protocol.fields import is_fingerprint
from lookup_buffer.protocol.framing import Frame
from lookup_buffer.protocol.header import PayloadHeader
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import PEER_IDLE_SECONDS, PEER_SEND_SECONDS

CONNECTIONS_MAX = 128
HANDSHAKE_SECONDS = 2.0
ITEMS_MAX = 256
"""Bound on the items of one request."""
PEER_OWNER = -2
"""Owner of the pins on items that are being sent."""


@dataclass(slots=True)
class PeerServer:
    shelf: Shelf
    counters: Counters
    token: str | None
    missed: Callable[[QualifiedKey], None]
    """Called on `lb-peer` with an address whose requested generation this node does not have."""
    admit: Callable[[socket.socket, Callable[[], None]], None]
    """Called on `lb-peer` with the socket of a connection for hand-offs, and a callback for its
    end."""
    boot: str = ""
    _listener: socket.socket | None = None
    _greetings: Acceptor = field(default_factory=lambda: Acceptor(CONNECTIONS_MAX, "lb-peer"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _links: set[FramedSocket] = field(default_factory=set)
    _closing: threading.Event = field(default_factory=threading.Event)

    def listen(self, address: str) -> str:
        """Bind; returns the address with the actual port.

        Raises:
            OSError: the address is in use or not of this host.
        """
        self._listener, shown = listening_socket(*parse_tcp(address))
        return f"tcp://{shown}"

    def start(self, boot: str) -> None:
        assert self._listener is not None
        self.boot = boot
        serving = (self._listener, self._serve)
        threading.Thread(
            target=self._greetings.serve, args=serving, name="lb-peer-accept", daemon=True
        ).start()

    def close(self) -> None:
        self._closing.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # resumes lb-peer-accept
            if not self.boot:
                self._listener.close()  # else lb-peer-accept closes it
        with self._lock:
            for link in self._links:
                link.abort()

    def _serve(self, connection: socket.socket) -> bool:
        """Serve one connection. Returns whether it was passed on, together with its slot of the
        limit."""
        link: FramedSocket | None = None
        passed_on = False
        try:
            link = accept_handshake(connection, token=self.token, timeout=HANDSHAKE_SECONDS)
            with self._lock:
                self._links.add(link)
            while not self._closing.is_set():
                request = link.recv_header(timeout=PEER_IDLE_SECONDS)
                if isinstance(request.header, dict) and request.header.get("op") == "handoffs":
                    passed_on = self._pass_on(link, request)
                    break
                self._answer(link, request)
        except ProtocolError:
            self.counters.add("protocol_errors")
        except LookupBufferError:
            pass  # the peer left, was too slow, or was refused: only its connection ends
        finally:
            if link is None:
                connection.close()
            else:
                with self._lock:
                    self._links.discard(link)
                link.abort()
        return passed_on

    def _pass_on(self, link: FramedSocket, request: Frame) -> bool:
        """Returns whether the connection, and its slot of the limit, now belong to `handoffs`."""
        if request.payload_nbytes:
            raise ProtocolError("a request for hand-offs has no payload")
        if request.header.get("boot") != self.boot:
            link.send({"status": "stale"}, timeout=PEER_SEND_SECONDS)
            link.close()
            return False
        link.send({"status": "ok"}, timeout=PEER_SEND_SECONDS)
        self.admit(link.detach(), self._greetings.release)
        return True

    def _answer(self, link: FramedSocket, request: Frame) -> None:
        """Send the requested items one after another, each as it is now."""
        for address, boot, generation in _asked_for(request):
            held = self._hold(address, boot, generation)
            if held is None:
                link.send({"status": "stale"}, timeout=PEER_SEND_SECONDS)
                continue
            try:
                self._send(link, held)
            finally:
                self.shelf.release([held.ticket], PEER_OWNER)

    def _send(self, link: FramedSocket, held: Held) -> None:
        item = held.item
        remaining = self.shelf.remaining_seconds(item)
        namespace, key = item.address
        header = PayloadHeader(
            namespace=namespace,
            key=key,
            generation=item.generation,
            checksum=item.checksum,
            ttl_ms=None if remaining is None else int(remaining * 1000),
            tensor=item.header,
        )
        answer = {"status": "ok", "payload": header.to_fields()}
        link.send(answer, self.shelf.bytes_of(item), timeout=PEER_SEND_SECONDS)
        self.counters.add("bytes_served", item.nbytes)

    def _hold(self, address: QualifiedKey, boot: object, generation: object) -> Held | None:
        """The requested item, pinned; None if this boot does not have that generation."""
        if boot != self.boot:
            self.missed(address)
            return None
        try:
            held = self.shelf.hold(address, PEER_OWNER)
        except BufferFull:
            return None  # the reader tries another holder, or encodes
        if held is not None and held.item.generation == generation:
            return held
        if held is not None:
            self.shelf.release([held.ticket], PEER_OWNER)
        self.missed(address)
        return None


def _asked_for(frame: Frame) -> Iterator[tuple[QualifiedKey, object, object]]:
    """Address, boot and generation of each requested item.

    Raises:
        ProtocolError: it is not a valid request.
    """
    request = frame.header
    if frame.payload_nbytes or not isinstance(request, dict) or request.get("op") != "get":
        raise ProtocolError("the only requests of a peer are 'get' and 'handoffs'")
    items = request.get("items")
    if not isinstance(items, list) or not 0 < len(items) <= ITEMS_MAX:
        raise ProtocolError(f"a request is for 1 to {ITEMS_MAX} items")
    for item in items:
        if not isinstance(item, list) or len(item) != 4:
            raise ProtocolError("an item is [namespace, key, boot, generation]")
        namespace, key, boot, generation = item
        if not isinstance(key, str) or not is_fingerprint(namespace):
            raise ProtocolError("an item needs the fingerprint of a namespace, and a key")
        yield (namespace, key), boot, generation
