"""The control server: accepts clients on the unix socket and manages their sessions.

It handles `Hello`, `Join`, `Stage`, `Goodbye` and `Metrics`, and passes all other requests to
`Desk`. Runs on the loop's thread and never blocks. `node.py` starts it; `vitals` and the idle check
read its counts.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookup_buffer.errors import LookupBufferError, NodeRefused, ProtocolError
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.desk import Desk
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.session import Seat, Session
from lookup_buffer.protocol.messages import (
    VERSION,
    Goodbye,
    Hello,
    Join,
    Metrics,
    SessionRequest,
    Stage,
    error_reply,
    hello_of_another_version,
    parse,
)
from lookup_buffer.shm.index import RemoteIndex
from lookup_buffer.shm.memory import adopt_staging
from lookup_buffer.times import QUARANTINE_SECONDS

CONNECTIONS_MAX = 1024
HELLO_SECONDS = 5.0
"""A connection that has no session after this time is closed."""
TRY_AGAIN_SECONDS = 0.05
"""Pause before the next accept, if the process has no free descriptor."""


@dataclass(slots=True)
class Control:
    loop: asyncio.AbstractEventLoop
    desk: Desk
    identity: Identity
    counters: Counters
    remote_index: RemoteIndex
    expects: Mapping[str, str | int]
    """The settings that a client's configuration must share with this node; see `Hello.expects`."""
    metrics: Callable[[], dict[str, Any]]
    """The fields of the answer to `Metrics`."""
    idle_since: float = field(default_factory=time.monotonic)
    _sessions: dict[int, Session] = field(default_factory=dict)
    _of: dict[Connection, Session | None] = field(default_factory=dict)
    """Each connection's session; None until Hello or Join, and of one that asks for `Metrics`."""
    _probes: set[Connection] = field(default_factory=set)
    """Those that asked for `Metrics` without a session."""
    _next_session: Callable[[], int] = field(default=lambda: int.from_bytes(os.urandom(7), "big"))
    _listener: socket.socket | None = None

    def listen(self, path: Path) -> None:
        """Listen on `path` with mode 0600; a stale socket file is replaced.

        The caller holds the directory's lock, so no other node serves this path.
        """
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._watch()

    def close(self) -> None:
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for connection in list(self._of):
            connection.end(None)

    def count_sessions(self) -> int:
        return len(self._sessions)

    def idle_seconds(self) -> float:
        """Seconds since the last connection ended that was more than a question for `Metrics`; 0
        while there is one."""
        return 0.0 if self._of.keys() - self._probes else time.monotonic() - self.idle_since

    def _watch(self) -> None:
        assert self._listener is not None
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
        if len(self._of) >= CONNECTIONS_MAX:
            sock.close()
            return
        connection = Connection(self.loop, sock, self._on_message, self._on_end)
        self._of[connection] = None
        if connection.uid not in (os.getuid(), 0):
            connection.end(None)
            return
        self.loop.call_later(HELLO_SECONDS, self._expect_hello, connection)

    def _expect_hello(self, connection: Connection) -> None:
        if connection in self._of and self._of[connection] is None:
            connection.end(None)

    def _on_message(self, connection: Connection, message: Any) -> None:
        session = self._of[connection]
        if session is None and (strange := hello_of_another_version(message)) is not None:
            connection.send(_refusal(*strange))
            return
        request = parse(message)
        try:
            match request:
                case SessionRequest() if session is not None and not session.over:
                    self.desk.handle(connection, session, request)
                case Hello() if session is None:
                    self._hello(connection, request)
                case Join() if session is None:
                    self._join(connection, request)
                case Stage() if session is not None:
                    self._stage(connection, session, request)
                case Goodbye() if session is not None:
                    self._finish(session)
                case Metrics():
                    if session is None:
                        self._probes.add(connection)
                    connection.send({"id": request.id} | self.metrics())
                case _:
                    connection.end(ProtocolError(f"{request.op} out of turn"))
        except ProtocolError:
            raise  # `Connection` closes the connection
        except LookupBufferError as error:
            connection.send(error_reply(request.id, error))

    def _hello(self, connection: Connection, request: Hello) -> None:
        for name, wanted in request.expects.items():
            if self.expects.get(name) == wanted:
                continue
            if name == "token":  # a digest: shown, it would help to guess a weak token
                raise NodeRefused(
                    "the node that runs here has another token, or none; "
                    "give both the same token, or use another directory"
                )
            raise NodeRefused(
                f"the node that runs here has {name} = {self.expects.get(name)!r}, but this "
                f"configuration has {wanted!r}; make them equal, or use another directory"
            )
        seat = None if request.seat is None else Seat(*request.seat)
        session = Session(self._next_session(), connection, seat)
        if connection.pid == 0:
            session.process = connection.process()
        session.connections.add(connection)
        self._sessions[session.id] = self._of[connection] = session
        self.counters.add("sessions_opened")
        self.desk.attach(session)
        shelf = self.desk.shelf
        fields = {
            "id": request.id,
            "session": session.id,
            "node": self.identity.node,
            "boot": self.identity.boot,
            "arena_bytes": shelf.arena.nbytes,
        }
        connection.send_with_descriptors(
            fields, [shelf.arena.fd, shelf.local_index.fd, self.remote_index.fd]
        )

    def _join(self, connection: Connection, request: Join) -> None:
        session = self._sessions.get(request.session)
        if session is None:
            raise NodeRefused("this session does not exist: it ended, or the node restarted")
        session.connections.add(connection)
        self._of[connection] = session
        connection.send({"id": request.id})

    def _stage(self, connection: Connection, session: Session, request: Stage) -> None:
        descriptor = connection.take_descriptor()
        try:
            staging = adopt_staging(descriptor, self.desk.shelf.arena.nbytes)
        finally:
            os.close(descriptor)
        self.desk.inserts.unstage(session, connection)
        session.stagings[connection] = staging
        connection.send({"id": request.id})

    def _on_end(self, connection: Connection, error: LookupBufferError | None) -> None:
        if isinstance(error, ProtocolError):
            self.counters.add("protocol_errors")
        session = self._of.pop(connection, None)
        if connection not in self._probes:
            self.idle_since = time.monotonic()
        self._probes.discard(connection)
        if session is None:
            return
        session.connections.discard(connection)
        self.desk.inserts.unstage(session, connection)
        if connection is session.anchor and not session.over:
            self._lose(session)

    def _lose(self, session: Session) -> None:
        """The main connection broke without a Goodbye: keep the session's pins until its process
        ends, or for QUARANTINE_SECONDS."""
        process, session.process = session.process, None
        self._leave(session)
        if not self.desk.holds_pins(session):
            if process is not None:
                os.close(process)
            return  # nothing to keep: repeated reconnects must not cost a descriptor each
        try:
            process = _pidfd(session.anchor.pid) if process is None else process
        except ProcessLookupError:
            self.desk.release_all(session)
            return
        if process is None:
            self.loop.call_later(QUARANTINE_SECONDS, self.desk.release_all, session)
            return

        def ended() -> None:
            self.loop.remove_reader(process)
            os.close(process)
            bound.cancel()
            self.desk.release_all(session)

        bound = self.loop.call_later(QUARANTINE_SECONDS, ended)
        self.loop.add_reader(process, ended)

    def _finish(self, session: Session) -> None:
        """After a Goodbye: release all pins at once."""
        self._leave(session)
        self.desk.release_all(session)

    def _leave(self, session: Session) -> None:
        session.over = True
        if session.process is not None:
            os.close(session.process)
            session.process = None
        self._sessions.pop(session.id, None)
        self.desk.detach(session)
        for connection in list(session.connections):
            connection.end(None)


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when process `pid` ends; None if the kernel gives none.

    Raises:
        ProcessLookupError: it has already ended.
    """
    try:
        return os.pidfd_open(pid) if pid > 0 else None  # 0: it lives in another pid namespace
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _refusal(number: int, version: int) -> dict[str, Any]:
    """The reply to a Hello of another protocol version."""
    why = (
        f"this node uses protocol version {VERSION}, the client {version}; "
        "install the same version of lookup-buffer for both, or stop the node"
    )
    return error_reply(number, NodeRefused(why))
