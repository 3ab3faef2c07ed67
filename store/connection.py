"""Connection: one conversation with one Redis or Valkey server, each exchange with a deadline.

The only module that imports redis-py, and hiredis beside it. redis-py dials: names, TLS and its
certificates. From then on the socket is ours, for what redis-py's own reading does not give: a
deadline for a whole exchange instead of for each wait, pushes in their order among the replies, and
commands that are under way to several servers at once. (It is not quicker: reading 32 HASHes takes
both the same time, nearly all of it the server's and hiredis'.)
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from store.errors import StoreUnavailable

Part = str | int | bytes
Command = Sequence[Part] | bytes
"""Its parts, or all of it as it goes over the wire."""

TRACK: Command = ("CLIENT", "TRACKING", "ON")
"""From then on the server pushes what changes of what is read on the connection."""

_READ_BYTES = 1 << 16
_MORE = object()
"""What the parser says when the next reply is not complete yet."""
_DRIVER = {"driver_info": redis.DriverInfo()} if hasattr(redis, "DriverInfo") else {}
"""Made once: redis-py would read its own version from disk anew for each dialling."""
_NOTHING_YET = (BlockingIOError, ssl.SSLWantReadError)


class Refusal(Exception):
    """The server's error reply to one command. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class Lost(StoreUnavailable):
    """The connection ended, or was never made: what the server knew may be gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens; `path` of a Unix socket, else host and port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """How to get into every server of one deployment, and how long to wait for it."""

    username: str | None
    password: str | None = field(repr=False)
    database: int
    tls: bool
    tls_files: tuple[tuple[str, str], ...]
    call_timeout_seconds: float
    connect_timeout_seconds: float


class Push(list[Any]):
    """Something the server said unasked: its kind, and what belongs to it."""


class Connection:
    """One thread at a time. After an error it is closed, and its replies with it."""

    def __init__(self, endpoint: Endpoint, access: Access, seconds: float) -> None:
        """Dial, within `seconds`; `log_in` is next. Raises Lost, or StoreUnavailable."""
        self._name = f"store {endpoint}"
        self._access = access
        self._dialled = _dialled(endpoint, access, seconds)
        try:
            self._dialled.connect()
        except redis.exceptions.ConnectionError as error:
            raise Lost(f"{self._name}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailable(f"{self._name}: {error}") from error
        self._socket: socket.socket = self._dialled._sock
        self._reader: Any = hiredis.Reader(  # its stubs know no buffers
            replyError=Refusal, protocolError=Lost, notEnoughData=_MORE
        )
        self._buffer = bytearray(_READ_BYTES)

    def log_in(self, deadline: float, *, protocol: int = 2) -> None:
        """RESP2's flat replies are parsed faster; RESP3 (3) has pushes. Raises StoreUnavailable."""
        access = self._access
        commands: list[Command] = []
        if access.password is not None:
            # Not within HELLO: a server that does not know it would quote the password back.
            user = [] if access.username is None else [access.username]
            commands.append(("AUTH", *user, access.password))
        if protocol != 2:
            commands.append(("HELLO", protocol))
        if access.database:
            commands.append(("SELECT", access.database))
        if commands:
            self.send(pack(commands), deadline)
            for command, reply in zip(commands, self.receive(len(commands), deadline), strict=True):
                if isinstance(reply, Refusal):
                    # Who does not know AUTH quotes what followed it, which is the password.
                    why = reply.code if command[0] == "AUTH" else str(reply)
                    raise StoreUnavailable(f"{self._name} refuses {command[0]!s}: {why}")

    def send(self, packed: bytes, deadline: float) -> None:
        """Send what `pack` made. `deadline` is a time.monotonic(). Raises StoreUnavailable."""
        try:
            self._socket.settimeout(self._left(deadline))
            self._socket.sendall(packed)
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, count: int, deadline: float) -> list[Any]:
        """The next `count` replies; a refused command has its Refusal for a reply."""
        replies: list[Any] = []
        while len(replies) < count:
            reply = self._reader.gets()
            if reply is _MORE:
                self._wait_for_bytes(deadline)
            else:
                replies.append(reply)
        return replies

    def receive_available(self) -> list[Any]:
        """All replies and pushes that are here already; never waits. Raises StoreUnavailable."""
        self._socket.settimeout(0.0)
        try:
            with contextlib.suppress(*_NOTHING_YET):
                while self._read() == _READ_BYTES or self._more_decrypted():
                    pass
        except OSError as error:
            raise self._failure(error) from error
        found: list[Any] = []
        while (reply := self._reader.gets()) is not _MORE:
            found.append(Push(reply) if isinstance(reply, hiredis.PushNotification) else reply)
        return found

    def send_available(self, packed: bytes) -> bytes:
        """Send as much as fits now, never waiting; what is left. Raises StoreUnavailable."""
        self._socket.settimeout(0.0)
        try:
            return packed[self._socket.send(packed) :]
        except (*_NOTHING_YET, ssl.SSLWantWriteError):
            return packed
        except OSError as error:
            raise self._failure(error) from error

    @property
    def in_step(self) -> bool:
        """Whether nothing is to be read: for a kept connection, that the server has not ended it.

        What arrives unasked over TLS, as session tickets do, is taken in by this look.
        """
        if not _readable(self._socket):
            return True
        try:
            return not self.receive_available()
        except StoreUnavailable:
            return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """The socket, logged in and with nothing left to read, for who speaks RESP himself.

        It is his to close; this connection is of no use from then on.
        """
        self._dialled._sock = None  # else redis-py closes it with its own object
        return self._socket

    def close(self) -> None:
        """Idempotent."""
        self._dialled.disconnect()

    def _wait_for_bytes(self, deadline: float) -> None:
        self._socket.settimeout(self._left(deadline))
        try:
            self._read()
        except OSError as error:
            raise self._failure(error) from error

    def _read(self) -> int:
        count = self._socket.recv_into(self._buffer)
        if not count:
            raise Lost(f"{self._name}: the server closed the connection")
        self._reader.feed(self._buffer, 0, count)
        return count

    def _more_decrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _left(self, deadline: float) -> float:
        # Never 0: that is the mode that does not wait at all, and a ready reply is still welcome.
        return max(deadline - time.monotonic(), 0.0005)

    def _failure(self, error: OSError) -> StoreUnavailable:
        if isinstance(error, TimeoutError):
            return StoreUnavailable(f"{self._name}: no answer in time")
        return Lost(f"{self._name}: {error}")


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as they go over the wire."""
    parts = []
    for command in commands:
        if isinstance(command, bytes):
            parts.append(command)
            continue
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            # surrogatepass: any str can be a key, also one that came from undecodable bytes.
            raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def hgetall(name: str | bytes) -> bytes:
    """HGETALL as it goes over the wire: a look-up sends many, and packing each takes longer."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
    return b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%b\r\n" % (len(raw), raw)


def _readable(end: socket.socket) -> bool:
    waiting = select.poll()  # not select.select, which fails above 1,023 open files
    waiting.register(end, select.POLLIN)
    return bool(waiting.poll(0))


class _Hurried:
    """What redis-py reads as its time-outs: one time for each address, with the TLS handshake.

    The handshake would else have that time once more.
    """

    def __init__(self, *, seconds: float, **settings: Any) -> None:
        self._seconds = max(seconds, 0.001)
        self._ends_at = 0.0
        super().__init__(**settings)

    @property
    def socket_connect_timeout(self) -> float:
        """Read before each address of a host is tried."""
        self._ends_at = time.monotonic() + self._seconds
        return self._seconds

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, _: object) -> None:
        """redis-py assigns what it was given, in places."""

    @property
    def socket_timeout(self) -> float:
        """Read when an address has been connected to."""
        return max(self._ends_at - time.monotonic(), 0.001)

    @socket_timeout.setter
    def socket_timeout(self, _: object) -> None:
        """Likewise."""


class _OverTcp(_Hurried, redis.Connection):  # type: ignore[misc]
    pass


class _OverTls(_Hurried, redis.SSLConnection):  # type: ignore[misc]
    pass


class _OverUnix(_Hurried, redis.UnixDomainSocketConnection):  # type: ignore[misc]
    pass


def _dialled(endpoint: Endpoint, access: Access, seconds: float) -> Any:
    """redis-py's connection, not connected yet; it never retries. (Hardly annotated there.)"""
    kind: Any = _OverTcp
    settings: dict[str, Any] = {
        "seconds": seconds,
        **_DRIVER,
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": _leave_logging_in_to_us,
    }
    if endpoint.path:
        kind = _OverUnix
        settings["path"] = endpoint.path
    else:
        settings |= {"host": endpoint.host, "port": endpoint.port, "socket_keepalive": True}
        if access.tls:
            kind = _OverTls
            settings |= dict(access.tls_files)
    return kind(**settings)


def _leave_logging_in_to_us(_: Any) -> None:
    """redis-py would give each reply a timeout of its own, and ask two questions more."""
