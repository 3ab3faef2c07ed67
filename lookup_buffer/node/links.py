"""Connections between nodes, dialled or accepted on the loop, until their handshake is done.

`dial` connects to another node, `greet` is the accepting side. Both return a socket with the MACs
of its later frames. With TLS that is a `TlsSocket`, which no caller has to know; OpenSSL shakes
hands on threads (`lb-tls`). Called by `transfer` and `peers` (tensors), by `takes` (hand-offs), and
by `reachability`. `ThreadPool` has the threads that move bytes over them.
"""

import asyncio
import ipaddress
import math
import random
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from lookup_buffer.config import is_tls, parse_address
from lookup_buffer.errors import (
    NodeRefused,
    PipeBroken,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.protocol.auth import (
    HELLO_BYTES,
    Accepts,
    Agreement,
    Dialogue,
    Purpose,
    Refusal,
    client_dialogue,
    server_dialogue,
)
from lookup_buffer.protocol.framing import MAGIC, FrameDecoder, Macs, encode_frame
from lookup_buffer.protocol.handshakes import Handshakes
from lookup_buffer.protocol.sockets import enable_keepalive, reset, tune
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.protocol.tls import (
    Tls,
    TlsRefused,
    TlsSocket,
    Trust,
    check_names,
    client_of,
    explained,
    is_reader,
    name_refusal,
    trust_of,
)
from lookup_buffer.times import PEER_CONNECT_SECONDS
from store import Location

TENSORS: Final = "tensors"
HANDOFFS: Final = "handoffs"
REACHABILITY: Final = "reachability"
ROLES: Final = (TENSORS, HANDOFFS, REACHABILITY)
"""What a connection between nodes is for; the last one since version 5."""
HANDSHAKE_SECONDS: Final = 2.0
"""Bound on an accepted handshake."""
THREADS_IDLE_SECONDS: Final = 60.0
"""Threads without work for so long end: a burst or a fault may have needed many."""
_READ_BYTES: Final = 64 << 10
"""More than a TLS record: nothing stays in OpenSSL, where no selector sees it."""
_PLAIN_REFUSED: Final = "it takes connections by TLS only: give both nodes tls:// addresses"
_OF_READER: Final = "the certificate is of a node that only reads, and this connection is for {}"
AGAIN_SECONDS: Final = 0.05
AGAIN_SECONDS_MAX: Final = 0.4
AGAIN_PART_MIN: Final = 0.25
"""Jitter: a pause is at least this fraction of its maximum."""

T = TypeVar("T")


def again_seconds(failures: int) -> float:
    """The pause before the next attempt, in seconds, after so many failures in a row.

    With jitter. Attempts at even intervals can all meet the refusals of a node that accepts
    connections in the same rhythm. An acknowledgement then stays unanswered until it expires.
    """
    longest = min(AGAIN_SECONDS_MAX, AGAIN_SECONDS * 2.0 ** min(failures - 1, 10))
    return longest * random.uniform(AGAIN_PART_MIN, 1.0)


class ThreadPool:
    """At most `most` threads that send or receive, for a caller on the loop's thread."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._executor = self._without_threads()
        self._used_at = math.inf
        """When they were last given work; infinite while there are none."""
        self._jobs: set[Future[None]] = set()

    def submit(self, move: Callable[..., None], *arguments: object) -> "Future[None]":
        """Raises RuntimeError after `close`, and if no thread can be started."""
        self._used_at = time.monotonic()
        wanted = [True]
        try:
            job = self._executor.submit(lambda: move(*arguments) if wanted else None)
        except RuntimeError:
            wanted.clear()  # without memory for a thread it is queued nevertheless
            raise
        self._jobs.add(job)
        return job

    def tick(self) -> None:
        """End threads that are idle. To be called now and then."""
        self._jobs = {job for job in self._jobs if not job.done()}
        if not self._jobs and time.monotonic() - self._used_at > THREADS_IDLE_SECONDS:
            self._executor.shutdown(wait=False)
            self._executor, self._used_at = self._without_threads(), math.inf

    def close(self) -> None:
        self._used_at = math.inf
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _without_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._most, thread_name_prefix=self._name)


def call_from_thread(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object
) -> None:
    """Schedule `function` on the loop's thread. Does nothing if the loop is closed."""
    with suppress(RuntimeError):  # closed: the node is shutting down, and no request waits
        loop.call_soon_threadsafe(function, *arguments)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What this node proves itself with to other nodes, and what it demands of them."""

    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    """Then it speaks with nodes at tls:// addresses only, otherwise with none of those."""

    def tick(self) -> None:
        """Notice changed files of TLS: whose certificate counted before may be excluded now. To be
        called a few times a second, before those who ask the `trust` of their connections."""
        if self.tls is not None:
            self.tls.tick()


class Link(NamedTuple):
    """A socket after its handshake, which its owner closes."""

    stream: socket.socket
    purpose: Purpose
    macs: Macs | None
    version: int
    """Of the protocol: the newest one that both nodes speak."""
    trust: Trust = Trust()
    """Whose owner asks it: an excluded node would use this connection for as long as it likes."""
    client: str = ""
    """Of an accepted one, whose bounds count: the node that it certified, of one that only reads
    all names of its certificate. Empty without TLS."""
    only_reads: bool = False
    """Of an accepted one, whether its certificate is that of a node that only reads."""

    def framed(self) -> FramedSocket:
        """For the threads that move bytes."""
        framed = FramedSocket(self.stream)
        framed.macs = self.macs
        return framed


async def dial(
    loop: asyncio.AbstractEventLoop,
    location: Location,
    endpoint: str,
    role: str,
    credentials: Credentials,
) -> Link:
    """A connection to the node of `location` at `endpoint`. It must still be the same boot, except
    for tensors: a request for one names its boot.

    Raises:
        NodeRefused: another node is there, or one with another token or version, or one that only
            reads, or one without TLS if this node has it, or with TLS if this node has not.
        PipeError, ProtocolError: it is not reached in time, or does not speak this protocol.
        ValueError: the endpoint is no address.
    """
    host, port = parse_address(endpoint)
    token, tls = credentials.token, credentials.tls
    if is_tls(endpoint) != (tls is not None):
        raise TlsRefused(_other_scheme(endpoint))
    boot = "" if role == TENSORS else location.boot
    purpose = Purpose(role, endpoint, location.node, boot, tls.node if tls else "")
    trust = Trust()
    async with _translated(f"no connection to {endpoint} in time", PEER_CONNECT_SECONDS):
        stream = await _connected(loop, host, port)
        if tls is not None:
            stream = secured = await _dialled_by_tls(loop, stream, tls, location, endpoint)
            if role != REACHABILITY and is_reader(secured):
                secured.close()
                raise TlsRefused(_OF_READER.format(role))
            trust = trust_of(secured)
        agreement = await _agree(loop, stream, client_dialogue(token, purpose))
    return Link(stream, purpose, agreement.macs, agreement.version, trust)


def _other_scheme(endpoint: str) -> str:
    if is_tls(endpoint):
        return f"{endpoint} is for nodes with TLS, which this node has not: set its 'listen'"
    return f"{endpoint} is without TLS, which this node demands: set that node's 'listen'"


async def greet(
    loop: asyncio.AbstractEventLoop,
    stream: socket.socket,
    credentials: Credentials,
    accepts: Accepts,
) -> Link:
    """The accepting side, for a newly accepted socket, which is closed on any error.

    Raises:
        NodeRefused: another token or version, or it is for another node, or its certificate does
            not count here, or is not of the node that it says it is, or of one that only reads.
        PipeError, ProtocolError: it is too slow, has gone, or does not speak this protocol.
    """
    trust, reader, is_certified = Trust(), "", credentials.tls is not None
    async with _translated("no handshake in time", HANDSHAKE_SECONDS):
        if credentials.tls is not None:
            stream = secured = await _accepted_by_tls(loop, stream, credentials.tls)
            accepts, trust = _of_certified(secured, accepts), trust_of(secured)
            reader = client_of(secured) if is_reader(secured) else ""
        agreement = await _agree(loop, stream, server_dialogue(credentials.token, accepts))
    agreed = agreement.purpose, agreement.macs, agreement.version
    client = reader or (agreement.purpose.client if is_certified else "")
    return Link(stream, *agreed, trust, client, bool(reader))


@asynccontextmanager
async def _translated(too_late: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise PipeTimeout(too_late) from error
    except ssl.SSLError as error:
        raise TlsRefused(explained(error)) from error
    except OSError as error:
        raise PipeBroken(f"the connection failed: {error.strerror or error}") from error


async def _connected(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """A socket connected to the first address of `host` that accepts."""
    failure: OSError | None = None
    for family, address in await _addresses(loop, host, port):
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            await loop.sock_connect(stream, address)
        except OSError as error:
            stream.close()
            failure = error
        except RuntimeError as error:  # an IPv6 address with a zone is looked up on a thread
            stream.close()
            raise PipeBroken(f"{host} is not looked up: {error}") from error
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise failure or PipeBroken(f"{host} has no address")


async def _addresses(
    loop: asyncio.AbstractEventLoop, host: str, port: int
) -> list[tuple[int, Any]]:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except RuntimeError as error:  # no thread can be started
            raise PipeBroken(f"{host} is not looked up: {error}") from error
        return [(family, address) for family, _, _, _, address in found]
    return [(socket.AF_INET6 if version == 6 else socket.AF_INET, (host, port))]


async def _agree(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, dialogue: Dialogue
) -> Agreement:
    """Run one side of the handshake; close the socket on any error. A refusal still arrives."""
    try:
        stream.setblocking(False)
        tune(stream)
        enable_keepalive(stream)
        return await _run(loop, stream, dialogue)
    except NodeRefused:
        stream.close()
        raise
    except BaseException:
        reset(stream)
        raise


async def _run(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, dialogue: Dialogue
) -> Agreement:
    async def send(message: list[Any] | None) -> None:
        if message is not None:
            await send_all(loop, stream, encode_frame(message, max_header_bytes=HELLO_BYTES))

    decoder = FrameDecoder(max_header_bytes=HELLO_BYTES)
    try:
        await send(next(dialogue))
        while True:
            await send(dialogue.send(await _receive(loop, stream, decoder)))
    except StopIteration as end:
        agreement: Agreement = end.value
        await send(agreement.last)
        return agreement
    except Refusal as refusal:
        await send(refusal.message)
        raise


async def _receive(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, decoder: FrameDecoder
) -> Any:
    """The next message: the ends take turns, so nothing may follow it. That is not decoded, since
    a stranger can send thousands of messages at once."""
    while True:
        data = await received(loop, stream)
        if not data:
            raise PipeClosed("the remote end closed the connection")
        decoder.put(data)
        frame = decoder.next()
        if frame is not None:
            if decoder.unread_bytes:
                raise ProtocolError("more than one message of a handshake at once")
            return frame.header


def host_of(address: str) -> str:
    """What bounds for one host count: an IPv4 address, or a network of 64 bits of IPv6."""
    found = ipaddress.ip_address(address)
    if found.version == 4:
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), 64), strict=False))


# -- a socket, plain or TLS


async def received(loop: asyncio.AbstractEventLoop, stream: socket.socket) -> bytes:
    """What has come on a non-blocking socket; empty once the other end has closed it."""
    return await _ready(loop, stream, lambda: stream.recv(_READ_BYTES), for_reading=True)


async def send_all(loop: asyncio.AbstractEventLoop, stream: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[await _ready(loop, stream, partial(stream.send, left), for_reading=False) :]


async def _ready(
    loop: asyncio.AbstractEventLoop,
    stream: socket.socket,
    move: Callable[[], T],
    *,
    for_reading: bool,
) -> T:
    """The result of `move`, once the socket is ready for it."""
    while True:
        try:
            return move()
        except BlockingIOError:
            await _is_ready(loop, stream, for_reading=for_reading)


async def _is_ready(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, *, for_reading: bool
) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_reader, loop.remove_reader)
        if for_reading
        else (loop.add_writer, loop.remove_writer)
    )
    add(stream.fileno(), _set, ready)
    try:
        await ready
    finally:
        remove(stream.fileno())


def _set(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


# -- TLS


async def _dialled_by_tls(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, tls: Tls, location: Location, to: str
) -> TlsSocket:
    """Raises TlsRefused: the certificate at the endpoint `to` is not that of the node."""
    secured = tls.dialled(stream)
    try:
        await _shake_hands(loop, secured, tls.dialling, to)
        check_names(secured, location.node)
    except ConnectionError as error:
        secured.close()
        raise PipeBroken("the connection ended in the handshake of TLS") from error
    except BaseException:
        secured.close()
        raise
    return secured


async def _accepted_by_tls(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, tls: Tls
) -> TlsSocket:
    """Raises TlsRefused: the client speaks no TLS, and is told so."""
    try:
        stream.setblocking(False)
        host = host_of(stream.getpeername()[0])
        first = await _ready(
            loop, stream, lambda: stream.recv(len(MAGIC), socket.MSG_PEEK), for_reading=True
        )
        if first == MAGIC:
            await received(loop, stream)  # else it gets a reset, and not the reason
            await send_all(loop, stream, encode_frame(["refused", _PLAIN_REFUSED]))
            raise TlsRefused("a client without TLS")
    except BaseException:
        stream.close()
        raise
    secured = tls.accepted(stream)
    try:
        try:
            await _shake_hands(loop, secured, tls.accepting, host)
            return secured
        except ssl.SSLError as error:
            why = explained(error)
        with suppress(OSError):  # with bytes unread it would get a reset, and not the reason
            raw = partial(socket.socket.recv, secured, _READ_BYTES)
            await _ready(loop, secured, raw, for_reading=True)
        raise TlsRefused(why)
    except BaseException:
        secured.close()
        raise


async def _shake_hands(
    loop: asyncio.AbstractEventLoop, secured: TlsSocket, handshakes: Handshakes, host: str
) -> None:
    while event := await handshakes.go_on(secured, host):
        await _is_ready(loop, secured, for_reading=event == select.POLLIN)


def _of_certified(secured: TlsSocket, accepts: Accepts) -> Accepts:
    """`accepts`, for the node that the certificate of the client names. One that only reads gets
    tensors; it takes no hand-off."""

    def accepts_certified(purpose: Purpose) -> str:
        if refusal := name_refusal(secured, purpose.client):
            return refusal
        if purpose.role == HANDOFFS and is_reader(secured):
            return _OF_READER.format(purpose.role)
        return accepts(purpose)

    return accepts_certified
