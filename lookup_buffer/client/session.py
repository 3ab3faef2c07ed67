"""A client's session with its node: connections, shared memory, reconnects.

`ClientSession` finds or starts the node, keeps a pool of connections, and opens a new session when
the node is lost. Its listening thread receives the node's events on the session's main connection.
`NodeConnection` is one blocking connection, for one caller at a time. A connection that missed a
deadline is closed, so a late reply is never taken for the reply to another request. Any
thread may call. The module does not interpret requests and events; `buffer`, `load` and `pending`
do. What the node shows of its memory is in `memories`.
"""

import array
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookup_buffer import errors
from lookup_buffer.client.memories import NodeMemories, NodeMemory
from lookup_buffer.config import BufferConfig
from lookup_buffer.errors import (
    Closed,
    LookupBufferError,
    NodeRefused,
    NodeUnavailable,
    ProtocolError,
)
from lookup_buffer.protocol.framing import FrameDecoder, encode_frame
from lookup_buffer.protocol.messages import VERSION, Goodbye, Hello, Join, Request, Stage, Stats
from lookup_buffer.protocol.sockets import descriptors_in, peer_of, unmapped_user
from lookup_buffer.runtime import node_socket
from lookup_buffer.shm.memory import Staging
from lookup_buffer.times import CALL_SECONDS, TRANSFER_NEWS_SECONDS

READ_BYTES = 256 << 10
DESCRIPTORS_MAX = 4
ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
STAGING_BYTES_MIN = 1 << 20
CONNECT_SECONDS = 10.0
"""Bound on finding or starting the node and opening a session with it."""
CONNECTIONS_MAX = 16
"""Connections for concurrent calls, beside the main connection."""
RETRY_SECONDS_MIN = 0.1
RETRY_SECONDS_MAX = 2.0
TICK_SECONDS = 0.1
"""Longest pause between two calls of `on_tick` during a session."""
_request_ids = itertools.count(1)
_log = logging.getLogger(__name__)


def next_request_id() -> int:
    return next(_request_ids)


@dataclass(slots=True, eq=False)
class _OpenSession:
    """One session with one boot of a node."""

    id: int
    node: str
    boot: str
    main_connection: "NodeConnection"
    idle: list["NodeConnection"] = field(default_factory=list)


class ClientSession:
    """A client's session with its node. Thread-safe, but must not be used in a forked child.

    The listening thread calls `on_event(message)`, `on_lost()` and `on_tick()`; `on_connected()` is
    called on the thread that opened the session. `close` calls `on_tick()` once more, and
    `on_lost()` if a session is open. None of them may raise.
    """

    def __init__(
        self,
        config: BufferConfig,
        engine: list[Any] | None,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._on_event = on_event
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_tick = on_tick
        self.namespace = ""
        """The fingerprint of the namespace of this client's keys; empty until it is set."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._free_connections = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._open_session: _OpenSession | None = None
        self._memories = NodeMemories()
        self._closing = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="lb-client", daemon=True)

    def open(self, *, required: bool) -> None:
        """Open a session and start the listening thread.

        Raises:
            NodeRefused: the node that runs has another configuration.
            NodeUnavailable: no node runs; not raised if it is not `required`.
        """
        try:
            self._connect()
        except NodeUnavailable:
            if required:
                raise
        self._listener.start()

    @property
    def is_connected(self) -> bool:
        return self._open_session is not None

    def call(self, request: Request, timeout: float) -> dict[str, Any]:
        """One round trip; see `NodeConnection.call`. `timeout` bounds the whole call."""
        deadline = time.monotonic() + timeout
        with self.connection(timeout) as connection:
            return connection.call(request, deadline - time.monotonic())

    @contextmanager
    def connection(
        self, timeout: float = CALL_SECONDS, *, wait: bool = True
    ) -> Iterator["NodeConnection"]:
        """A connection for one caller. It returns to the pool afterwards if it is still open.
        Without `wait` it is refused if all are in use.

        Raises:
            NodeUnavailable: there is none; raised out of the `with` block, too, if it breaks.
            Closed: instead, if the caller has closed the buffer, perhaps meanwhile.
        """
        try:
            with self._own_connection(timeout, wait=wait) as connection:
                yield connection
        except NodeUnavailable as error:
            if self._closing.is_set():
                raise Closed("the buffer was closed during the call") from error
            raise

    @contextmanager
    def _own_connection(self, timeout: float, *, wait: bool) -> Iterator["NodeConnection"]:
        current = self._connected_session()
        until = time.monotonic() + timeout
        if not self._free_connections.acquire(timeout=timeout if wait else 0.0):
            raise NodeUnavailable(
                f"all {CONNECTIONS_MAX} connections to the node were in use for {timeout:g} s; use "
                "fewer threads, or a longer timeout"
            )
        try:
            connection = self._idle_or_new(current, min(until, time.monotonic() + CALL_SECONDS))
            try:
                yield connection
            except LookupBufferError:
                raise
            except BaseException:  # such as KeyboardInterrupt: a reply may still come
                connection.close()
                raise
            finally:
                self._put_idle(current, connection)
        finally:
            self._free_connections.release()

    def probe(self, timeout: float) -> None:
        """Check that the node answers, unless all connections are in use: their callers notice it.

        Raises:
            NodeUnavailable: it does not answer within `timeout` seconds.
        """
        if not self._free_connections.acquire(blocking=False):
            return
        self._free_connections.release()
        self.call(Stats(next_request_id()), timeout)

    def post(self, request: Request) -> None:
        """Send a one-way request. Waits while the socket is full and the node reads from it.

        Raises:
            NodeUnavailable: no node is connected now.
        """
        current = self._connected_session()
        with self._send_lock:
            current.main_connection.send_now(request)

    def post_if_writable(self, request: Request) -> bool:
        """As `post`, but only if the socket can take a few 10 KB now. Returns whether the request
        was sent."""
        current = self._connected_session()
        with self._send_lock:
            if not current.main_connection.is_writable():
                return False
            current.main_connection.send_now(request)
        return True

    def memory(self, boot: str | None = None) -> AbstractContextManager["NodeMemory"]:
        """The memory of `boot` (None: of the current node), kept mapped inside the `with`.

        Raises:
            NodeUnavailable: it is not mapped here.
            Closed: see `close`.
        """
        self._check_usable()
        return self._memories.use(self.boot if boot is None else boot)

    @property
    def boot(self) -> str:
        """The boot id of the connected node, "" without one."""
        current = self._open_session
        return current.boot if current else ""

    def close(self) -> None:
        """Close the session. Idempotent and bounded; the node releases its pins at once."""
        if self._closing.is_set():
            return
        if self._pid != os.getpid():
            self._closing.set()  # nothing else: the parent process owns the connections
            return
        self._on_tick()
        with self._send_lock:  # the listening thread, which then ends, closes nothing before
            self._closing.set()
            current = self._open_session
            if current is not None:
                with suppress(LookupBufferError):  # the node and the session have ended
                    current.main_connection.send_now(Goodbye(next_request_id()))
                current.main_connection.close()
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join(timeout=2.0)
        self._end(current)
        self._memories.close()

    # -- the open session and the listening thread

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this buffer was opened before a fork; open one in the child")
        if self._closing.is_set():
            raise Closed("the buffer is closed")

    def _connected_session(self) -> _OpenSession:
        self._check_usable()
        current = self._open_session
        if current is None:
            raise NodeUnavailable("not connected to a node; reconnecting in the background")
        return current

    def _connect(self) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            path = node_socket(self._config, timeout=CONNECT_SECONDS)
        except OSError as error:  # for example without a free descriptor
            raise NodeUnavailable(f"no node is found or started: {error}") from error
        connection = NodeConnection(path, CALL_SECONDS, node_uid=self._config.node_uid)
        try:
            hello = Hello(next_request_id(), VERSION, self._engine, self._config.expectations())
            connection.send(hello, deadline=deadline)
            welcome, descriptors = connection.receive_with_descriptors(deadline)
            try:
                boot = welcome["boot"]
                memory = NodeMemory.adopt(descriptors, welcome["arena_bytes"])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._memories.add(boot, memory)
        except (OSError, ValueError, TypeError, KeyError, ProtocolError) as error:
            connection.close()
            raise NodeUnavailable(f"no session with the node at {path}: {error}") from error
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._open_session = _OpenSession(welcome["session"], welcome["node"], boot, connection)
        if self._engine is None:
            memory.arena.populate_in_background()  # not in engines: docs/decisions.md
        self._on_connected()

    def _listen(self) -> None:
        retry_seconds = RETRY_SECONDS_MIN
        while not self._closing.is_set():
            current = self._open_session
            try:
                if current is None:
                    self._connect()
                    retry_seconds = RETRY_SECONDS_MIN
                else:
                    self._dispatch_events(current)
            except NodeRefused:
                self._closing.wait(RETRY_SECONDS_MAX)  # an operator may replace that node
            except Exception as error:  # noqa: BLE001 -- nothing else connects again
                if not isinstance(error, LookupBufferError):
                    _log.exception("the session with the node failed; this is a bug, report it")
                self._end(current)
                self._closing.wait(retry_seconds)
                retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)
            self._memories.retire_lost()
        with self._send_lock:  # `close` has said Goodbye
            opened_meanwhile = self._open_session
        self._end(opened_meanwhile)

    def _dispatch_events(self, current: _OpenSession) -> None:
        """Pass the node's events on until the session ends."""
        while not self._closing.is_set():
            if current.main_connection.readable_within(TICK_SECONDS):
                for message in current.main_connection.receive(None):
                    if "event" in message:
                        self._on_event(message)
            self._on_tick()
            self._memories.retire_lost()

    def _end(self, current: _OpenSession | None) -> None:
        with self._lock:
            if current is None or self._open_session is not current:
                return
            self._open_session = None
            idle, current.idle = current.idle, []
        self._memories.mark_lost(current.boot)
        current.main_connection.close()
        for connection in idle:
            connection.close()
        self._on_lost()

    # -- the pool of connections

    def _idle_or_new(self, current: _OpenSession, deadline: float) -> "NodeConnection":
        with self._lock:
            if current.idle:
                return current.idle.pop()
        connection = NodeConnection(
            self._config.socket_path(),
            max(deadline - time.monotonic(), 1e-3),
            node_uid=self._config.node_uid,
        )
        try:
            connection.call(Join(next_request_id(), current.id), deadline - time.monotonic())
        except LookupBufferError as error:
            connection.close()
            raise NodeUnavailable(f"the session with the node has ended: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_idle(self, current: _OpenSession, connection: "NodeConnection") -> None:
        with self._lock:
            if connection.open and self._open_session is current and not self._closing.is_set():
                current.idle.append(connection)
                return
        connection.close()


class NodeConnection:
    """A blocking connection to the node. Not thread-safe, except `close`, which any thread may call
    and which ends a wait of another thread."""

    def __init__(self, path: Path, timeout: float, *, node_uid: int | None = None) -> None:
        """`node_uid`: see `BufferConfig`.

        Raises:
            NodeUnavailable: nobody answers at `path`.
            NodeRefused: the process there runs as a user that is not trusted.
        """
        self._path = path
        self._decoder = FrameDecoder()
        self._staging: Staging | None = None
        self.open = True
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no free descriptor
            raise NodeUnavailable(f"no connection to the node at {path}: {error}") from error
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise NodeUnavailable(f"no node answers at {path}: {error}") from error
        _, uid = peer_of(self._socket)
        if uid not in (os.getuid(), 0, node_uid):
            self._socket.close()
            may_be_set = (
                f", or set 'node_uid' to {uid} if that one may see and choose all that this one "
                "inserts and reads"
            )
            raise NodeRefused(
                f"the process that listens at {path} runs as user {uid}, this one as user "
                f"{os.getuid()}: run the node as the same user or as root"
                f"{unmapped_user(uid) or may_be_set}"
            )

    def call(self, request: Request, timeout: float) -> dict[str, Any]:
        """The reply to `request`.

        Raises:
            NodeUnavailable: no reply within `timeout` seconds, or the node ended.
            LookupBufferError: the node's answer is an error.
        """
        deadline = time.monotonic() + timeout
        self.send(request, deadline=deadline)
        return self.reply(request, deadline)

    def reply(self, request: Request, deadline: float) -> dict[str, Any]:
        """The reply to a request that was sent. Raises as `call`."""
        while True:
            for message in self.receive(deadline):
                if message.get("id") != request.id:
                    continue
                if "fetching" in message:
                    deadline = max(deadline, time.monotonic() + TRANSFER_NEWS_SECONDS)
                    continue
                if "error" in message:
                    raise error_of(message)
                return message

    def send(self, request: Request, *, deadline: float, descriptors: Iterable[int] = ()) -> None:
        frame = encode_frame(request.to_wire())
        ancillary = [
            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            for descriptor in descriptors
        ]
        try:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
            sent = self._socket.sendmsg([frame], ancillary)
            if sent < len(frame):
                self._socket.sendall(frame[sent:])
        except OSError as error:
            raise self._broken(error) from error

    def send_now(self, request: Request) -> None:
        """Send a one-way request. If the socket is full, and the node reads nothing for as long as
        a call may take, the connection is closed and the node counts as unavailable."""
        frame = memoryview(encode_frame(request.to_wire()))
        while frame:
            try:
                # Not settimeout: another thread receives on this socket.
                frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError as error:
                if not self._ready(select.POLLOUT, CALL_SECONDS):
                    raise self._broken(OSError("its socket is full")) from error
            except OSError as error:
                raise self._broken(error) from error

    def readable_within(self, seconds: float) -> bool:
        """Whether `receive` can return or raise without waiting, within `seconds`; also at the end
        of the connection."""
        return self._ready(select.POLLIN, seconds)

    def is_writable(self) -> bool:
        """Whether `send_now` can send about 100 KB without waiting."""
        return self._ready(select.POLLOUT, 0.0)

    def receive(self, deadline: float | None) -> list[dict[str, Any]]:
        """Read once and return the messages that the bytes complete, perhaps none."""
        try:
            wait = None if deadline is None else max(deadline - time.monotonic(), 1e-6)
            self._socket.settimeout(wait)
            data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise self._broken(OSError("it closed the connection"))
        return self._decode(data)

    def receive_with_descriptors(self, deadline: float) -> tuple[dict[str, Any], list[int]]:
        """The first message and the descriptors sent with it, which the caller owns."""
        descriptors: list[int] = []
        try:
            return self._first_message(descriptors, deadline), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _first_message(self, descriptors: list[int], deadline: float) -> dict[str, Any]:
        """What comes with it is appended to `descriptors`."""
        while True:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-6))
                data, ancillary, _, _ = self._socket.recvmsg(
                    READ_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise self._broken(error) from error
            descriptors += descriptors_in(ancillary)
            if not data:
                raise self._broken(OSError("it closed the connection"))
            for message in self._decode(data):
                if "error" in message:
                    raise error_of(message)
                return message

    def stage(self, nbytes: int, timeout: float) -> Staging:
        """This connection's staging area, grown to hold `nbytes`.

        Raises:
            NodeUnavailable: the node did not answer in time.
        """
        if self._staging is None or self._staging.nbytes < nbytes:
            staging = Staging(max(STAGING_BYTES_MIN, 1 << (nbytes - 1).bit_length()))
            request = Stage(next_request_id())
            deadline = time.monotonic() + timeout
            try:
                self.send(request, deadline=deadline, descriptors=[staging.fd])
                self.reply(request, deadline)
            except BaseException:
                staging.close()
                raise
            if self._staging is not None:
                self._staging.close()
            self._staging = staging
        return self._staging

    def close(self) -> None:
        """Idempotent."""
        if not self.open:
            return
        self.open = False
        with suppress(OSError):  # the node closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._staging is not None:
            self._staging.close()

    def _decode(self, data: bytes) -> list[dict[str, Any]]:
        try:
            return [frame.header for frame in self._decoder.feed(data)]
        except ProtocolError:
            self.close()
            raise

    def _ready(self, event: int, seconds: float) -> bool:
        poller = select.poll()
        try:
            poller.register(self._socket, event)
        except ValueError as error:  # closed meanwhile, by another thread or a failed send
            raise self._broken(OSError("the connection is closed")) from error
        return bool(poller.poll(seconds * 1000))

    def _broken(self, error: OSError) -> NodeUnavailable:
        self.close()
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return NodeUnavailable(f"the node at {self._path} is not available: {reason}")


def error_of(message: dict[str, Any]) -> LookupBufferError:
    """The error in a reply, or in one of its results."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, LookupBufferError)):
        kind = LookupBufferError
    error: LookupBufferError = kind(str(message.get("message", "")))
    return error
