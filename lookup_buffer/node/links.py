"""Connections between nodes, dialled or accepted on the loop.

`dial` connects to another node, `greet` is the accepting side. Both return a socket with the MACs
of its later frames. Called by `transfer` and `peers` (tensors), by `takes` (hand-offs), and by
`reachability`.
A `Holder` has the connections for tensors to one node, and how fast it answered. `ThreadPool` has
the threads that move bytes over them.
"""

import asyncio
import ipaddress
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lookup_buffer.config import parse_tcp
from lookup_buffer.errors import (
    NodeRefused,
    PipeBroken,
    PipeClosed,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.node.storage import Breaker
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
from lookup_buffer.protocol.framing import FrameDecoder, Macs, encode_frame
from lookup_buffer.protocol.sockets import enable_keepalive, end_when_unanswered, reset, tune
from lookup_buffer.protocol.stream import FramedSocket
from lookup_buffer.times import PEER_CONNECT_SECONDS, PEER_PROGRESS_SECONDS, Clock
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
_READ_BYTES: Final = 4096
LINKS_MAX: Final = 4
"""Connections for tensors to one node: over a long way each has the bytes of one window under way,
of 4 MiB at most on most systems."""
AHEAD: Final = 2
"""Batches requested at a time on a connection, so that the holder always has one to send."""
TIMEOUTS_MAX: Final = LINKS_MAX
"""After so many in a row a node is asked for nothing for a while. One that refuses, or ends
connections, costs no time."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 2.0
"""Bounds on that time."""
MEASURED_BYTES_MIN: Final = 1 << 20
"""Fewer bytes do not tell a rate."""
AGAIN_SECONDS: Final = 0.05
AGAIN_SECONDS_MAX: Final = 0.4
AGAIN_PART_MIN: Final = 0.25
"""Jitter: a pause is at least this fraction of its maximum."""


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
        """Raises RuntimeError after `close`."""
        self._used_at = time.monotonic()
        job = self._executor.submit(move, *arguments)
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


class Link(NamedTuple):
    """A socket after its handshake, which its owner closes."""

    stream: socket.socket
    purpose: Purpose
    macs: Macs | None
    version: int
    """Of the protocol: the newest one that both nodes speak."""

    def framed(self) -> FramedSocket:
        """For the threads that move bytes."""
        framed = FramedSocket(self.stream)
        framed.macs = self.macs
        return framed


@dataclass(slots=True, eq=False)
class Channel:
    """A connection for tensors, or the place of one. Requests on it are answered in their order;
    whoever has sent one waits for its turn to receive."""

    link: FramedSocket | None = None
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    receiving: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    nbytes: int = 0
    """Of what its users receive."""
    used_at: float = 0.0

    def usable(self) -> FramedSocket | None:
        """Its connection, unless that has ended. On one without other users unrequested input means
        that the peer closed it, or that another boot listens there."""
        link = self.link
        if link is None or not (link.closed or (self.users == 1 and link.wait_readable(0.0))):
            return link
        link.abort()
        return None


class Holder:
    """Another node, the connections for tensors to it, and its speed."""

    def __init__(self, clock: Clock) -> None:
        self.breaker = Breaker(
            clock, TIMEOUTS_MAX, PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX, jitter=0.5
        )
        """Of its timeouts."""
        self.places = asyncio.Semaphore(LINKS_MAX * AHEAD)
        """A wait for one ends: each transfer ahead ends when it makes no progress."""
        self.users = 0
        """Batches that it is asked for, or that wait for a place."""
        self.nbytes = 0
        """Of what it is asked for, or will be."""
        self.used_at = clock()
        self._channels = [Channel() for _ in range(LINKS_MAX)]
        self._answer_seconds = self._seconds_a_byte = 0.0
        """Until they are measured it seems the fastest, so each is tried."""

    @contextmanager
    def channel(self, nbytes: int) -> Iterator[Channel]:
        """The connection with the least to receive, for so many bytes more."""
        channel = min(self._channels, key=lambda one: (one.nbytes, one.users, one.link is None))
        channel.users += 1
        channel.nbytes += nbytes
        try:
            yield channel
        finally:
            channel.users -= 1
            channel.nbytes -= nbytes

    def close_idle(self, unused_since: float) -> None:
        for channel in self._channels:
            if channel.link and not channel.users and channel.used_at < unused_since:
                channel.link.close()
                channel.link = None

    def seconds(self, nbytes: int) -> float:
        """How long it takes to deliver so many bytes after what it is asked for."""
        return self._answer_seconds + (self.nbytes + nbytes) * self._seconds_a_byte

    def measured(self, answer_seconds: float, nbytes: float, seconds: float) -> None:
        """It answered after `answer_seconds`, and sent these bytes in `seconds`."""
        self._answer_seconds = _mean(self._answer_seconds, answer_seconds)
        if nbytes >= MEASURED_BYTES_MIN:
            self._seconds_a_byte = _mean(self._seconds_a_byte, seconds / nbytes)


def _mean(before: float, now: float) -> float:
    return (before + now) / 2 if before else now


async def dial(
    loop: asyncio.AbstractEventLoop,
    location: Location,
    endpoint: str,
    role: str,
    token: str | None,
) -> Link:
    """A connection to the node of `location` at `endpoint`. It must still be the same boot, except
    for tensors: a request for one names its boot.

    Raises:
        NodeRefused: another node is there, or one with another token or version.
        PipeError, ProtocolError: it is not reached in time, or does not speak this protocol.
        ValueError: the endpoint is no address.
    """
    host, port = parse_tcp(endpoint)
    boot = "" if role == TENSORS else location.boot
    purpose = Purpose(role, endpoint, location.node, boot)
    async with _translated(f"no connection to {endpoint} in time", PEER_CONNECT_SECONDS):
        stream = await _connected(loop, host, port)
        agreement = await _agree(loop, stream, client_dialogue(token, purpose))
    return Link(stream, purpose, agreement.macs, agreement.version)


async def greet(
    loop: asyncio.AbstractEventLoop, stream: socket.socket, token: str | None, accepts: Accepts
) -> Link:
    """The accepting side, for a newly accepted socket, which is closed on any error.

    Raises:
        NodeRefused: another token or version, or it is for another node.
        PipeError, ProtocolError: it is too slow, has gone, or does not speak this protocol.
    """
    async with _translated("no handshake in time", HANDSHAKE_SECONDS):
        agreement = await _agree(loop, stream, server_dialogue(token, accepts))
    return Link(stream, agreement.purpose, agreement.macs, agreement.version)


@asynccontextmanager
async def _translated(too_late: str, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise PipeTimeout(too_late) from error
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
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
        end_when_unanswered(stream, PEER_PROGRESS_SECONDS)
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
            await loop.sock_sendall(stream, encode_frame(message, max_header_bytes=HELLO_BYTES))

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
    """The next message: the ends take turns, so nothing may follow it."""
    while True:
        data = await loop.sock_recv(stream, _READ_BYTES)
        if not data:
            raise PipeClosed("the remote end closed the connection")
        frames = decoder.feed(data)
        if len(frames) > 1 or (frames and decoder.buffered_bytes):
            raise ProtocolError("more than one message of a handshake at once")
        if frames:
            return frames[0].header
