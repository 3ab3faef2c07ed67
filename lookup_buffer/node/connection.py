"""Connections on the node's loop, and the sessions of clients.

A `Connection` is one socket: a client's unix socket, or another node's TCP socket. It decodes
frames, encodes replies and passes descriptors both ways (on a unix socket only). It never blocks,
and reads nothing more until what it has read was handled in its turns, see `turns`.
Input is bounded by the decoder, output by `OUTPUT_MAX_BYTES`, and both of all clients together by
`PENDING_TOTAL_BYTES`, of all other nodes by `PEERS_TOTAL_BYTES`: a remote end that does not read
its replies, or leaves requests half sent, is disconnected, and so is another node that acknowledges
nothing for PEER_PROGRESS_SECONDS. Created by `server` (clients), `takes`, `handoffs`, `peers` and
`reachability` (nodes).

A `Session` has a client's connections, engine rank, and the requests that wait. It begins with
`Hello` on its main connection, the first one. It ends with `Goodbye`, or with that connection.
`Session.run` returns when the last of its requests has ended: only then the server gives back what
the session holds. Created by `server`. Both are used on the loop's thread only.
"""

import array
import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from termios import TIOCOUTQ
from typing import Any, Protocol, TypeVar

from lookup_buffer.errors import BufferFull, LookupBufferError, ProtocolError
from lookup_buffer.node.closer import Closer, urgent_in_line
from lookup_buffer.node.shares import Shares, size_of
from lookup_buffer.node.turns import Turns
from lookup_buffer.protocol.framing import MAX_HEADER_BYTES, FrameDecoder, Macs, encode_frame
from lookup_buffer.protocol.messages import Request
from lookup_buffer.protocol.sockets import (
    bytes_in_kernel,
    descriptors_in,
    end_when_unanswered,
    peer_of,
)
from lookup_buffer.times import PEER_PROGRESS_SECONDS, TRANSFER_TOLD_SECONDS

READ_BYTES = 64 << 10
OUTPUT_MAX_BYTES = 16 << 20
"""Of replies that one remote end has not read."""
PENDING_TOTAL_BYTES = 128 << 20
"""Of replies that clients have not read, and of requests that they have not sent in full."""
PENDING_OWN_BYTES = 64 << 10
PEERS_TOTAL_BYTES = 64 << 20
"""Of what other nodes have sent and this one has not answered, and of replies that they have not
read; beside tensors."""
WAITS_MAX = 8_192
"""Bound on the requests of all clients that wait, see `shares`: of one at most half as many. Each
is resumed every second (`locate.LOOK_AGAIN_SECONDS`): so many take 0.4 s of a processor for it."""
WAITS_OWN = 8
HELLO_BYTES_MAX = 16 << 10
"""Of a header from a client that has no session yet: to decode one takes 3 ms at most."""
DESCRIPTORS_MAX = 4
RECEIVED_MAX = 253
"""Descriptors of one message, by Linux. With room for fewer the kernel would close the others, on
the thread that receives."""
ANCILLARY_BYTES = socket.CMSG_SPACE(RECEIVED_MAX * array.array("i").itemsize)
SHARE_OF_SESSIONS, SHARE_OF_STRANGERS = 1 / 4, 1 / 8
"""While more than this share of the descriptors that the node may open are to be closed, nothing is
read from clients, or from those without a session: a crowd of these keeps no session waiting."""
PAUSE_SECONDS = 0.05
"""Until it is tried again."""
_READ_FLAGS = int(socket.MSG_CMSG_CLOEXEC) | int(socket.MSG_DONTWAIT)
"""MSG_DONTWAIT: a thread that sends on the same socket may have made it blocking."""
_CUT_OFF = int(socket.MSG_CTRUNC)
_SO_PEERPIDFD = 77
"""Linux' number; Python's `socket` has no name for it yet."""

T = TypeVar("T")
Fields = dict[str, Any]
"""What a reply says, without the request's id."""
Answer = Fields | Coroutine[Any, Any, Fields] | None
"""How a request is answered: at once, by a coroutine as its task, or, if it is one-way, not."""
Fetching = Callable[[int], None]
"""Called with the bytes of a transfer that begins."""
Owner = str | int
"""An engine's id, or the session's number if the client belongs to no engine."""


class Tasks(set["asyncio.Task[Any]"]):
    """The tasks of one owner that have not ended."""

    def own(self, task: "asyncio.Task[Any]") -> "asyncio.Task[Any]":
        self.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """A cancelled task keeps its error, and so the frames, of which some have the task: such a
        cycle would stay until a full garbage collection. To ask for the error drops it."""
        self.discard(task)
        if task.cancelled():
            with suppress(asyncio.CancelledError):
                task.exception()

    def cancel(self) -> None:
        for task in self:
            task.cancel()


class MessageProtocol(Protocol):
    """Who owns connections, as `asyncio.Protocol` does."""

    def message_received(self, connection: "Connection", message: Any) -> None:
        """Called for each frame. A ProtocolError that it raises ends the connection."""
        ...

    def connection_lost(self, connection: "Connection", error: LookupBufferError | None) -> None:
        """Called once. `error` is None if the remote end closed the connection, or this node did
        without an error."""
        ...


class Connection:
    """Frames from and to a client or another node; what comes is handled by `protocol`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: MessageProtocol,
        macs: Macs | None = None,
        closer: Closer | None = None,
        pending: Shares | None = None,
        turns: Turns | None = None,
        header_bytes_max: int = MAX_HEADER_BYTES,
    ) -> None:
        """`closer` is for a client's socket, which passes descriptors. `pending`: see
        `new_pending`. `turns`: shared with others; its own by default. A larger header ends the
        connection, unless `begin_session` came first."""
        self._loop = loop
        self._socket = sock
        self._protocol = protocol
        self._sends = macs.sends if macs else None
        self._closer = closer
        self._decoder = FrameDecoder(header_bytes_max, mac=macs.receives if macs else None)
        self._output = bytearray()
        self._pending, self._pending_bytes = pending, 0
        self._turns = Turns(loop) if turns is None else turns
        self._descriptors: list[int] = []
        self._open = True
        self._has_session = False
        self._is_heard = True
        self._gathering = False
        self._is_in_use = False
        self._is_watched = False
        self._requests = Tasks()
        self.pid, self.uid = peer_of(sock) if sock.family == socket.AF_UNIX else (0, -1)
        sock.setblocking(False)
        if closer is not None:
            urgent_in_line(sock)
        self._watch(True)

    @property
    def open(self) -> bool:
        """Whether messages can still reach the remote end."""
        return self._open and self._is_heard

    def send(self, message: Any) -> None:
        """Queue a frame and send as much as the socket accepts. Does nothing once the connection
        ended."""
        if not self.open:
            return
        self._output += encode_frame(message, mac=self._sends)
        if self._sends is not None:
            self._sends.next()
        if not self._gathering:
            self._flush()

    def start(self, request: Coroutine[Any, Any, None]) -> "asyncio.Task[None] | None":
        """Run a request that waits; the end of this connection cancels it. It answers its own
        errors: one that it raises is a bug, which asyncio reports. Returns None if the connection
        has ended."""
        if not self._open:
            request.close()
            return None
        return self._requests.own(self._loop.create_task(request))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all messages of the `with` block in one write, which wakes the remote end once."""
        outer, self._gathering = self._gathering, True
        try:
            yield
        finally:
            self._gathering = outer
            if self._open and not outer:
                self._flush()

    @contextmanager
    def fetching(self, request_id: int) -> Iterator[Fetching]:
        """A function that announces, at its call and again until the end of the `with` block, that
        bytes for a request are on their way: its client waits for as long as their transfer makes
        progress."""
        timer: asyncio.TimerHandle | None = None

        def tell(nbytes: int) -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()  # of an earlier holder
            self.send({"id": request_id, "fetching": nbytes})
            timer = self._loop.call_later(TRANSFER_TOLD_SECONDS, tell, nbytes)

        try:
            yield tell
        finally:
            if timer is not None:
                timer.cancel()

    def send_with_descriptors(self, message: Any, descriptors: list[int]) -> None:
        """Send the first frame of a session together with descriptors."""
        if self._output:  # descriptors go with the first frame
            self.end(ProtocolError("hello before earlier answers were read"))
            return
        frame = encode_frame(message)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            sent = self._socket.sendmsg([frame], ancillary)
        except OSError:
            self.end(None)
            return
        self._output += frame[sent:]
        self._flush()

    def begin_session(self) -> None:
        """The remote end has a session: its headers may be large."""
        self._has_session = True
        self._decoder.max_header_bytes = MAX_HEADER_BYTES

    def take_descriptor(self) -> int:
        """The next descriptor that the client sent. The caller keeps it, or discards it.

        Raises:
            ProtocolError: the client sent none.
        """
        if not self._descriptors:
            raise ProtocolError("the request needs a descriptor, and none was sent")
        return self._descriptors.pop(0)

    def discard(self, descriptors: list[int]) -> None:
        """Close descriptors that the client sent; that may wait, so it is done on a thread."""
        if descriptors:
            assert self._closer is not None, "only clients pass descriptors"
            self._closer.close(descriptors)

    def process(self) -> int | None:
        """A pidfd of the remote end's process, readable once that has ended; the caller closes
        it. Works across pid namespaces. None if the kernel has no SO_PEERPIDFD."""
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:  # before Linux 6.5
            return None

    def end(self, error: LookupBufferError | None) -> None:
        """Close now. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        if self._closer is None:
            self._socket.close()
        else:
            self._closer.close_connection(self._socket)
        self.discard(self._descriptors)
        self._descriptors = []
        self._output.clear()  # timers keep this object for a while
        self._decoder.discard()
        self._count_pending()
        self._requests.cancel()
        self._protocol.connection_lost(self, error)

    def step(self) -> bool:
        """Handle one message: of what was read last, or else of what can be read now. Returns
        whether more was read."""
        if self._open:
            self._handle_next()
        if self._decoder.unread_bytes:
            return True
        if self._open and not self._is_watched:
            self._watch(True)
        return False

    def _handle_next(self) -> None:
        try:
            if self._decoder.unread_bytes or self._read():
                frame = self._decoder.next()
                if frame is not None:
                    self._protocol.message_received(self, frame.header)
        except ProtocolError as error:
            self.end(error)
        except Exception as error:  # noqa: BLE001 -- what was sent after it is to be handled
            what = "a message was not handled; this is a bug, please report it"
            self._loop.call_exception_handler({"message": what, "exception": error})
        if self._open and not self._count_pending():
            self.end(ProtocolError(f"{self._decoder.buffered_bytes} bytes of requests wait"))

    def _readable(self) -> None:
        if self._closer is not None and self._is_paused():
            self._watch(False)
            self._closer.close(())
            self._loop.call_later(PAUSE_SECONDS, self._resume)
        elif self._turns.work(self):
            self._watch(False)

    def _is_paused(self) -> bool:
        share = SHARE_OF_SESSIONS if self._has_session else SHARE_OF_STRANGERS
        return self._closer is not None and self._closer.exceeds(share)

    def _resume(self) -> None:
        if self._open and not self._is_watched:
            self._watch(True)

    def _watch(self, is_watched: bool) -> None:
        """Whether to be called when there is something to read."""
        self._is_watched = is_watched
        if is_watched:
            self._loop.add_reader(self._socket.fileno(), self._readable)
        else:
            self._loop.remove_reader(self._socket.fileno())

    def _read(self) -> bool:
        """Whether there was something to read, and is room for descriptors that came with it."""
        if self._is_paused():
            return False
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                READ_BYTES, ANCILLARY_BYTES, _READ_FLAGS
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.end(None)
            return False
        if ancillary:
            self._descriptors.extend(descriptors_in(ancillary))
        if not data:
            self.end(None)
            return False
        if flags & _CUT_OFF or len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors are pending")
        self._decoder.put(data)
        return True

    def _flush(self) -> None:
        if self._closer is None and not self._is_in_use:
            self._is_in_use = True
            end_when_unanswered(self._socket, PEER_PROGRESS_SECONDS)
            self._loop.call_later(PEER_PROGRESS_SECONDS, self._check_use)
        try:
            while self._output:
                sent = self._socket.send(self._output)
                del self._output[:sent]
            self._count_pending()
        except (BlockingIOError, InterruptedError):
            if len(self._output) <= OUTPUT_MAX_BYTES and self._count_pending():
                self._loop.add_writer(self._socket.fileno(), self._writable)
            else:
                self.end(ProtocolError(f"{len(self._output)} bytes of replies are not read"))
        except ConnectionError:  # it closed; what it sent before (a Goodbye) is still read
            self._is_heard = False
            self._output.clear()
        except OSError:
            self.end(None)

    def _check_use(self) -> None:
        """Once another node has acknowledged everything, its silence is bounded by keepalive."""
        if not self._open:
            return
        if bytes_in_kernel(self._socket, TIOCOUTQ):
            self._loop.call_later(PEER_PROGRESS_SECONDS, self._check_use)
        else:
            self._is_in_use = False
            end_when_unanswered(self._socket)

    def _count_pending(self) -> bool:
        """Count what is pending now. False if all clients together may not have so much."""
        if self._pending is None:
            return True
        nbytes = len(self._output) + self._decoder.buffered_bytes
        more = nbytes - self._pending_bytes
        if more > 0 and not self._pending.fits(self, more):
            return False
        if more:
            self._pending.add(self, more)
            self._pending_bytes = nbytes
        return True

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket.fileno())
        self._flush()


def new_waits() -> Shares:
    """Counts the requests that wait of all sessions of one node."""
    return Shares("requests that wait", WAITS_MAX, WAITS_OWN)


def new_pending() -> Shares:
    """Counts the bytes that all clients of one node have not read or not sent in full."""
    return Shares("pending bytes", PENDING_TOTAL_BYTES, PENDING_OWN_BYTES)


def new_peers_pending() -> Shares:
    """The same of all other nodes, with the requests that wait."""
    return Shares("pending bytes", PEERS_TOTAL_BYTES, PENDING_OWN_BYTES)


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which engine a client is. `rank` None: the scheduler."""

    engine_id: str
    rank: int | None
    world_size: int
    encodes: bool
    """Whether a hit saves this client an encode."""
    device: str
    """The device on which it computes; empty if unknown."""


@dataclass(slots=True, eq=False)
class Session:
    id: int
    anchor: Connection
    seat: Seat | None
    waits: Shares = field(
        default_factory=lambda: Shares("requests that wait", WAITS_MAX, WAITS_OWN)
    )
    """Of all sessions; this one's are counted under its id."""
    connections: set[Connection] = field(default_factory=set)
    _requests: Tasks = field(default_factory=Tasks)
    _says_goodbye: bool = False
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.connections.add(self.anchor)

    @property
    def has_ended(self) -> bool:
        """Whether its requests are being cancelled: they pin nothing any more."""
        return self._ended.is_set()

    @property
    def owner(self) -> Owner:
        """The owner of its claims: all clients of an engine share them."""
        return self.id if self.seat is None else self.seat.engine_id

    @property
    def encodes(self) -> bool:
        return self.seat is not None and self.seat.encodes

    @property
    def device(self) -> str:
        return "" if self.seat is None else self.seat.device

    def ranks(self) -> range | None:
        """The ranks that must report done before a ticket of this session ends. None: the
        session releases its tickets itself."""
        return None if self.seat is None else range(self.seat.world_size)

    def tell(self, request: Request, event: Fields) -> None:
        """Send an event of `request` on the main connection."""
        self.anchor.send({"id": request.id, **event})

    def start(
        self,
        request: Coroutine[Any, Any, None],
        connection: Connection | None = None,
        *,
        keys: Sequence[str] = (),
    ) -> "asyncio.Task[None] | None":
        """Run a request that waits, see `Connection.start`: that of the main connection, if it did
        not come on `connection`. `keys`: what it is for, if they may be many.

        Raises:
            BufferFull: too many of its requests wait.
        """
        size = size_of(keys)
        try:
            self.waits.check(self.id, size)
        except BufferFull:
            request.close()
            raise
        task = (connection or self.anchor).start(request)
        if task is not None:
            self.count(self._requests.own(task), size)
        return task

    def count(self, task: "asyncio.Task[Any]", size: int = 1) -> None:
        """Count this task, one of a request that waits, until it ends."""
        self.waits.add(self.id, size)
        task.add_done_callback(lambda _: self.waits.add(self.id, -size))

    async def run(self) -> bool:
        """Returns after `end`, once the last request has ended: whether the client said Goodbye."""
        try:
            await self._ended.wait()
        finally:  # also if the node ends
            self.end(says_goodbye=False)
            if self._requests:
                await asyncio.wait(self._requests)
        return self._says_goodbye

    def end(self, *, says_goodbye: bool) -> None:
        """Close the connections, which cancels the requests that wait. Idempotent."""
        if not self.has_ended:
            self._says_goodbye = says_goodbye
            self._ended.set()
        for connection in list(self.connections):
            connection.end(None)
