"""The server: accepts clients on the unix socket, owns their sessions and dispatches requests.

Each type of message has one handler. It is a plain call, which returns the answer where that is
possible; else a coroutine, which runs as a task of the session. Runs on the loop's thread. `main`
builds and starts it.
"""

import asyncio
import logging
import os
import resource
import socket
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lookup_buffer.errors import (
    BufferFull,
    ConfigError,
    LookupBufferError,
    MissReason,
    NodeRefused,
    ProtocolError,
    ReadOnly,
)
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.client_process import ClientProcess
from lookup_buffer.node.closer import Closer, descriptors_max
from lookup_buffer.node.connection import (
    HELLO_BYTES_MAX,
    SHARE_OF_SESSIONS,
    Answer,
    Connection,
    Fields,
    Seat,
    Session,
    Tasks,
    new_pending,
    new_waits,
)
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Lanes
from lookup_buffer.node.insert import Inserts
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.prefetch import Prefetches
from lookup_buffer.node.reachability import Reachability
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.shares import Shares
from lookup_buffer.node.takes import Taken, Takes
from lookup_buffer.node.turns import Turns
from lookup_buffer.protocol.messages import (
    CHANGES,
    VERSION,
    Acknowledge,
    Claim,
    ClaimAll,
    Contains,
    Describe,
    Done,
    Encoding,
    EndPrefetch,
    GiveBack,
    Goodbye,
    Hello,
    Insert,
    Join,
    Metrics,
    Offer,
    OpenPool,
    Prefetch,
    Prepare,
    Reach,
    Received,
    Release,
    ReleaseClaim,
    Request,
    Retract,
    Select,
    Stage,
    Stats,
    Take,
    Touch,
    Unclaim,
    error_reply,
    hello_of_another_version,
    parse,
)
from lookup_buffer.protocol.sockets import unmapped_user
from lookup_buffer.shm.index import RemoteIndex
from lookup_buffer.times import QUARANTINE_SECONDS

CONNECTIONS_MAX = 1024
"""Of clients, with the sessions that were lost and still have pins, and inserts that go on after
the end of their connection. Each session has a descriptor more, for its process."""
CONNECTIONS_MIN = 8
CONNECTION_DESCRIPTORS = 7
"""What one of them can hold: its own, that of its process, a staging area, and four that the client
has passed."""
OTHER_DESCRIPTORS = 2600
"""What the node itself has, at most: two for each connection of another node, some for Redis, and
the message with which too many are to be closed."""
HELLO_SECONDS = 5.0
"""A connection that has no session after this time is closed."""
LAST_READ_SECONDS = 0.1
"""After the end of a client's process, for what it has sent: then its session ends, if its sockets
do not end."""
CLOSE_SECONDS = 2.0
"""For sessions at shutdown: their requests have only to notice that they are cancelled."""
STRANGERS_MAX = 16
"""Of so many users it is logged that they were refused."""
TRY_AGAIN_SECONDS = 0.05
"""Pause before the next accept, if the process has no free descriptor."""
_log = logging.getLogger(__name__)


def connections_max() -> int:
    """Of clients: CONNECTIONS_MAX, or as many as leave the node descriptors of its own, beside what
    may wait to be closed."""
    for_clients = descriptors_max() * (1 - SHARE_OF_SESSIONS) - OTHER_DESCRIPTORS
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, int(for_clients / CONNECTION_DESCRIPTORS)))


@dataclass(slots=True)
class Server:
    loop: asyncio.AbstractEventLoop
    identity: Identity
    arena: Arena
    remote_index: RemoteIndex
    reads: Reads
    inserts: Inserts
    takes: Takes
    claims: Claims
    lanes: Lanes
    registrar: Registrar
    reachability: Reachability
    counters: Counters
    expects: Mapping[str, str | int]
    """The settings that a client's configuration must share with this node; see `Hello.expects`."""
    read_only: bool = False
    """Whether CHANGES are refused."""
    closer: Closer = field(init=False)
    idle_since: float = field(default_factory=time.monotonic)
    _waits: Shares = field(default_factory=new_waits)
    _pending: Shares = field(default_factory=new_pending)
    _turns: Turns = field(init=False)
    _prefetches: Prefetches = field(init=False)
    _handlers: dict[type[Request], Callable[[Session, Any], Answer]] = field(init=False)
    """Of the requests that do not involve the connection on which they came. A `LookupBufferError`
    is raised by the client; a ProtocolError closes the connection, unless a coroutine raises it."""
    _sessions: dict[int, Session] = field(default_factory=dict)
    """Those that are open, by id."""
    _of: dict[Connection, Session | None] = field(default_factory=dict)
    """Each connection's session; None until Hello or Join, and of one that asks for `Metrics`."""
    _probes: set[Connection] = field(default_factory=set)
    """Those that asked for `Metrics` without a session."""
    _serving: Tasks = field(default_factory=Tasks)
    _lost: int = 0
    """Sessions that were lost and still have pins."""
    _strangers: set[int] = field(default_factory=set)
    """Users whose processes were refused."""
    _listener: socket.socket | None = None
    _socket_file: tuple[int, int] | None = None
    """Device and inode of the file of the listening socket."""

    def __post_init__(self) -> None:
        pools = self.lanes.pools
        self.closer = self.inserts.closer
        self._turns = Turns(self.loop)
        self._prefetches = Prefetches(
            self.reads, self.lanes, self.claims, self.counters, self._sessions
        )
        self._handlers = {
            Contains: self.reads.contains,
            Touch: self.reads.touch,
            Release: self._release,
            Done: self._done,
            Prefetch: self._prefetches.prefetch,
            EndPrefetch: self._prefetches.end,
            GiveBack: lambda session, request: self.takes.give_back(session, request.token),
            Claim: self.claims.claim,
            ReleaseClaim: self.claims.release,
            ClaimAll: lambda session, request: self.claims.claim_all(
                session, request, partial(session.tell, request)
            ),
            Encoding: self.claims.encoding,
            Unclaim: self.claims.unclaim,
            OpenPool: self.lanes.open,
            Prepare: pools.prepare,
            Offer: pools.offer,
            Retract: pools.retract,
            Received: self.lanes.received,
            Describe: lambda _, request: self.registrar.describe(request.namespace, request.parts),
            Reach: self.reachability.reach,
            Stats: self._stats,
        }

    def listen(self, path: Path) -> None:
        """Listen on `path` with mode 0600; the file of a socket where nobody listens is replaced.

        Raises:
            ConfigError: there is another kind of file, or somebody listens.
        """
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(
                    f"{path}, where the node's socket is to be, is another kind of file; remove "
                    "it, or choose another 'node_socket'"
                )
            if _has_listener(path):
                raise ConfigError(
                    f"another process listens at {path}; end it, or choose another 'node_socket'"
                )
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._socket_file = _file_at(path)
        self._listener.listen(128)
        self._watch()

    def remove_socket(self, path: Path) -> None:
        """Remove the file that `listen` made, if it is still there."""
        if self._socket_file == _file_at(path):
            path.unlink(missing_ok=True)

    async def close(self) -> None:
        """End all sessions, which gives back what they hold. Bounded."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self.loop.remove_reader(listener.fileno())
            listener.shutdown(socket.SHUT_RD)  # nobody connects any more
            self.closer.close([listener.detach()])  # with what waits to be accepted
        for connection in list(self._of):
            connection.end(None)
        self._serving.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_SECONDS)

    def idle_seconds(self) -> float:
        """Seconds since the last connection ended that was more than a question for `Metrics`; 0
        while there is one."""
        return 0.0 if self._of.keys() - self._probes else time.monotonic() - self.idle_since

    # -- connections

    def _watch(self) -> None:
        if self._listener is not None:  # else it was closed while there was no free descriptor
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no free descriptor: without a pause the loop would retry at once, forever
            self.loop.remove_reader(self._listener.fileno())
            self.loop.call_later(TRY_AGAIN_SECONDS, self._watch)
            return
        if len(self._of) + self._lost + self.inserts.left >= connections_max():
            self.closer.close_connection(sock)
            return
        connection = Connection(
            self.loop,
            sock,
            self,
            closer=self.closer,
            pending=self._pending,
            turns=self._turns,
            header_bytes_max=HELLO_BYTES_MAX,
        )
        self._of[connection] = None
        if connection.uid not in (os.getuid(), 0):
            connection.end(None)
            self._report_stranger(connection.uid)
            return
        self.loop.call_later(HELLO_SECONDS, self._expect_hello, connection)

    def _report_stranger(self, uid: int) -> None:
        """Once for each user, since the client is told nothing."""
        if uid in self._strangers or len(self._strangers) >= STRANGERS_MAX:
            return
        self._strangers.add(uid)
        _log.warning(
            "a process of user %d was refused: this node, of user %d, serves its own user and "
            "root%s", uid, os.getuid(), unmapped_user(uid),
        )  # fmt: skip

    def _expect_hello(self, connection: Connection) -> None:
        if connection in self._of and self._of[connection] is None:
            connection.end(None)

    def connection_lost(self, connection: Connection, error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self.counters.add("protocol_errors")
        session = self._of.pop(connection, None)
        if connection not in self._probes:
            self.idle_since = time.monotonic()
        self._probes.discard(connection)
        if session is None:
            return
        session.connections.discard(connection)
        self.inserts.unstage(connection)
        if connection is session.anchor:
            session.end(says_goodbye=False)

    # -- requests

    def message_received(self, connection: Connection, message: Any) -> None:
        session = self._of[connection]
        if session is None and (strange := hello_of_another_version(message)) is not None:
            connection.send(_refusal(*strange))
            return
        request = parse(message)
        try:
            if session is None:
                self._begin(connection, request)
                return
            answer = self._handle(connection, session, request)
            if isinstance(answer, dict):
                self._answer(connection, session, request, answer)
            elif answer is not None:
                self._start(connection, session, request, answer)
        except ProtocolError:
            raise  # `Connection` closes the connection
        except LookupBufferError as error:
            connection.send(error_reply(request.id, error))

    def _begin(self, connection: Connection, request: Request) -> None:
        """Answer a request on a connection without a session."""
        match request:
            case Hello():
                self._hello(connection, request)
            case Join():
                self._join(connection, request)
            case Metrics():
                self._probes.add(connection)
                connection.send({"id": request.id, **self._metrics()})
            case _:
                raise ProtocolError(f"{request.op} out of turn")

    def _handle(self, connection: Connection, session: Session, request: Request) -> Answer:
        if self.read_only and isinstance(request, CHANGES):
            raise ReadOnly(
                f"node {self.identity.node} only reads (setting 'read_only'): it refuses "
                f"{request.op}"
            )
        handler = self._handlers.get(type(request))
        if handler is not None:
            return handler(session, request)
        match request:
            case Select():
                return self.reads.select(connection, session, request)
            case Take():
                return self._take(connection, session, request)
            case Acknowledge():
                return self.takes.acknowledge(connection, session, request)
            case Stage():
                return self.inserts.stage(connection)
            case Metrics():
                return self._metrics()
            case Insert():
                self.inserts.insert(connection, session, request)  # it sends the answer itself
            case Goodbye():
                session.end(says_goodbye=True)
            case _:
                raise ProtocolError(f"{request.op} out of turn")
        return None

    def _start(
        self,
        connection: Connection,
        session: Session,
        request: Request,
        answer: Coroutine[Any, Any, Fields],
    ) -> None:
        keys = request.keys if isinstance(request, Contains) else ()
        try:
            session.start(
                self._answer_later(connection, session, request, answer), connection, keys=keys
            )
        except BufferFull:
            answer.close()
            raise

    async def _answer_later(
        self,
        connection: Connection,
        session: Session,
        request: Request,
        answer: Coroutine[Any, Any, Fields],
    ) -> None:
        try:
            self._answer(connection, session, request, await answer)
        except LookupBufferError as error:
            connection.send(error_reply(request.id, error))

    def _answer(
        self, connection: Connection, session: Session, request: Request, answer: Fields
    ) -> None:
        connection.send({"id": request.id, **answer})
        if not connection.open and "ticket" in answer:  # the client will never release it
            self.arena.release([answer["ticket"]], session.id)
            if "token" in answer:
                self.takes.give_back(session, answer["token"])

    # -- requests to more than one part, and the form of their answers

    def _release(self, session: Session, request: Release) -> None:
        self.arena.release(request.tickets, session.id)
        self.lanes.release(request.tickets, session)

    def _done(self, _: Session, request: Done) -> None:
        self.arena.done(request.tickets, request.rank)
        self.lanes.done(request.tickets, request.rank)

    def _take(self, connection: Connection, session: Session, request: Take) -> Answer:
        taken = self.takes.take_here(session, request)
        if taken is None:
            return self._take_later(connection, session, request)
        return self._taken(taken)

    async def _take_later(self, connection: Connection, session: Session, request: Take) -> Fields:
        found = await self.takes.take(connection, session, request)
        if isinstance(found, Taken):
            return self._taken(found)
        waited = request.wait_seconds > 0 and found is not MissReason.OWNER_DEAD
        return self.reads.missed(found, timed_out=waited)

    def _taken(self, taken: Taken) -> Fields:
        self.counters.hit(taken.held.item, by_key=False)
        lease = {"token": taken.token, "lease_seconds": taken.lease_seconds}
        return self.reads.resident(taken.held) | lease

    def _stats(self, _: Session, __: Stats) -> Fields:
        stats = {
            "lane_tickets": self.lanes.count_tickets(),
            "open_files": _open_files(),
        }
        return {"stats": self.gauges() | stats | self.counters.totals()}

    # -- health

    def gauges(self) -> dict[str, int]:
        """The current values, as `/metrics` shows them."""
        return {
            **asdict(self.arena.gauges()),
            "unpublished": self.registrar.pending(),
            "store_up": int(self.registrar.store_up),
            "store_breaker_open": int(self.registrar.breaker.open),
            "nodes_alive": self.registrar.directory.count_alive(),
            "claims": len(self.claims.held),
            "sessions": len(self._sessions),
        }

    def unhealthy_reason(self) -> str:
        """Why the node is unhealthy, as `/healthz` shows it; "" if it is healthy."""
        if not self.registrar.store_up:
            return "the store is not reached: only what this host holds is found"
        if not self.read_only and not self.registrar.heartbeat.established:
            return "the node has not joined its fleet yet: another node may be running with its id"
        return ""

    def _metrics(self) -> Fields:
        return {
            "values": self.counters.totals() | self.gauges(),
            "histograms": self.counters.histograms(),
            "unhealthy": self.unhealthy_reason(),
        }

    # -- sessions

    def _hello(self, connection: Connection, request: Hello) -> None:
        for name, wanted in request.expects.items():
            if self.expects.get(name) == wanted:
                continue
            raise NodeRefused(
                f"the node that runs here has {name} = {self.expects.get(name)!r}, but this "
                f"configuration has {wanted!r}; make them equal, or use another directory"
            )
        session = self._open(connection, request)
        process = ClientProcess(self.loop, connection)  # which its end would not show any more
        self._serving.own(self.loop.create_task(self._serve(session, process)))
        self._welcome(connection, session, request)

    def _open(self, connection: Connection, request: Hello) -> Session:
        seat = None if request.seat is None else Seat(*request.seat)
        number = int.from_bytes(os.urandom(7), "big")
        session = Session(number, connection, seat, self._waits)
        self._of[connection] = self._sessions[number] = session
        self._probes.discard(connection)
        connection.begin_session()
        self.counters.add("sessions_opened")
        return session

    def _welcome(self, connection: Connection, session: Session, request: Hello) -> None:
        memory = self.arena.memory
        fields = {
            "id": request.id,
            "session": session.id,
            "node": self.identity.node,
            "boot": self.identity.boot,
            "arena_bytes": memory.nbytes,
        }
        descriptors = [memory.fd, self.arena.local_index.fd, self.remote_index.fd]
        connection.send_with_descriptors(fields, descriptors)

    async def _serve(self, session: Session, process: ClientProcess) -> None:
        """One session, until its pins are released. If its main connection breaks without a
        Goodbye, these are kept until its process has ended, or for QUARANTINE_SECONDS: the client
        may be copying."""
        end = partial(session.end, says_goodbye=False)
        process.ended.add_done_callback(lambda _: self.loop.call_later(LAST_READ_SECONDS, end))
        try:
            try:
                says_goodbye = await session.run()
            finally:
                del self._sessions[session.id]
                self.lanes.close(session)
                self.takes.end(session)
                self.claims.end(session)
            if not says_goodbye and self._holds_pins(session):
                await self._end_of(process)
        finally:
            self.arena.release_all(session.id)
            self.lanes.release_all(session)
            process.close()

    def _holds_pins(self, session: Session) -> bool:
        return self.arena.holds_pins(session.id) or self.lanes.holds(session)

    async def _end_of(self, process: ClientProcess) -> None:
        """Return when the process has ended, or after QUARANTINE_SECONDS."""
        self._lost += 1
        try:
            await asyncio.wait([process.ended], timeout=QUARANTINE_SECONDS)
        finally:
            self._lost -= 1

    def _join(self, connection: Connection, request: Join) -> None:
        session = self._sessions.get(request.session)
        if session is None or session.has_ended:
            raise NodeRefused("this session does not exist: it ended, or the node restarted")
        session.connections.add(connection)
        self._of[connection] = session
        connection.begin_session()
        connection.send({"id": request.id})


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its queue is full
            return True
    return True


def _file_at(path: Path) -> tuple[int, int] | None:
    """Device and inode, also of a symbolic link itself; None if there is no file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _refusal(number: int, version: int) -> Fields:
    """The reply to a Hello of another protocol version."""
    why = (
        f"this node uses protocol version {VERSION}, the client {version}; "
        "install the same version of lookup-buffer for both, or stop the node"
    )
    return error_reply(number, NodeRefused(why))


def _open_files() -> int:
    """Of this process: as many as it may have, if it cannot open one more to count them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
