"""The peer server: answers other nodes' requests for tensors over TCP.

Who asks for hand-offs instead gets a connection of the loop: see `askers`.

One thread a connection, a bounded number of them; the payload goes out straight from the arena,
pinned meanwhile. Truth is answered, not what Redis says: another boot or generation than ours is
`stale`, and the store, which said so, is put right.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

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
PEER_OWNER = -2
"""Owner of the pins that hold what is being sent."""


@dataclass(slots=True)
class PeerServer:
    shelf: Shelf
    counters: Counters
    token: str | None
    missed: Callable[[QualifiedKey], None]
    """Told, on a peer's thread, of what was asked for and is not here, or not so."""
    admit: Callable[[socket.socket, Callable[[], None]], None]
    """Given, on a peer's thread, the socket of who asks for hand-offs, and what to call at its
    end."""
    boot: str = ""
    _listener: socket.socket | None = None
    _greetings: Acceptor = field(default_factory=lambda: Acceptor(CONNECTIONS_MAX, "lb-peer"))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _links: set[FramedSocket] = field(default_factory=set)
    _closing: threading.Event = field(default_factory=threading.Event)

    def listen(self, address: str) -> str:
        """Bind; the answer is the address with the port that was really taken.

        Raises:
            OSError: the address is taken or not ours.
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
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            if not self.boot:
                self._listener.close()  # else that thread does
        with self._lock:
            for link in self._links:
                link.abort()

    def _serve(self, connection: socket.socket) -> bool:
        """Whether somebody else has the connection now, and its place."""
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
            pass  # the peer left, was too slow, or was refused: its connection ends, nothing else
        finally:
            if link is None:
                connection.close()
            else:
                with self._lock:
                    self._links.discard(link)
                link.abort()
        return passed_on

    def _pass_on(self, link: FramedSocket, request: Frame) -> bool:
        """Whether its connection, and its place, are the askers' from now on."""
        if request.payload_nbytes:
            raise ProtocolError("a peer may only ask for hand-offs")
        if request.header.get("boot") != self.boot:
            link.send({"status": "stale"}, timeout=PEER_SEND_SECONDS)
            link.close()
            return False
        link.send({"status": "ok"}, timeout=PEER_SEND_SECONDS)
        self.admit(link.detach(), self._greetings.release)
        return True

    def _answer(self, link: FramedSocket, request: Frame) -> None:
        address = self._asked_for(request)
        held = self._hold(address, request.header)
        if held is None:
            link.send({"status": "stale"}, timeout=PEER_SEND_SECONDS)
            return
        try:
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
        finally:
            self.shelf.release([held.ticket], PEER_OWNER)

    def _asked_for(self, frame: Frame) -> QualifiedKey:
        request = frame.header
        if frame.payload_nbytes or not isinstance(request, dict) or request.get("op") != "get":
            raise ProtocolError("a peer may only ask to get")
        namespace, key = request.get("namespace"), request.get("key")
        if not isinstance(namespace, str) or not isinstance(key, str):
            raise ProtocolError("a request names a namespace and a key")
        if not is_fingerprint(namespace):
            raise ProtocolError("that is no namespace")
        return namespace, key

    def _hold(self, address: QualifiedKey, request: Any) -> Held | None:
        """The item asked for, held; None where this boot has no such generation of it."""
        if request.get("boot") != self.boot:
            self.missed(address)
            return None
        try:
            held = self.shelf.hold(address, PEER_OWNER)
        except BufferFull:
            return None  # the reader tries another holder, or encodes
        if held is not None and held.item.generation == request.get("generation"):
            return held
        if held is not None:
            self.shelf.release([held.ticket], PEER_OWNER)
        self.missed(address)
        return None
