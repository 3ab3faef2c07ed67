"""Connection: one socket to a Redis or Valkey server, with a deadline for each exchange.

The only module that imports hiredis, which parses the replies. The rest is our own, because
redis-py lacks a deadline for a whole exchange (it has one for each wait), pushes in order among the
replies, and commands in flight to several servers at once. (It is not faster: reading 32 HASHes
takes both the same time, nearly all of it in the server and in hiredis.)
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import hiredis

from store.dialled import Access, Endpoint, open_socket
from store.errors import StoreUnavailable

Part = str | int | bytes
Command = Sequence[Part] | bytes
"""A sequence of parts, or the encoded command."""

TRACK: Command = ("CLIENT", "TRACKING", "ON")
"""After it the server pushes changes of what is read on the connection."""

_READ_BYTES = 1 << 16
_MORE = object()
"""The parser's result when the next reply is incomplete."""
_NOTHING_YET = (BlockingIOError, ssl.SSLWantReadError)


class ErrorReply(Exception):
    """The server's error reply to one command. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class Lost(StoreUnavailable):
    """The connection ended, or was never made: the server may have restarted and lost its data."""


class Push(list[Any]):
    """A message that the server sent without a request: its kind, then its data."""


class Connection:
    """Use by one thread at a time. After an error it is closed and pending replies are lost."""

    def __init__(self, endpoint: Endpoint, access: Access, seconds: float) -> None:
        """Connect within `seconds`; call `log_in` next. Raises Lost or StoreUnavailable."""
        self._name = f"store {endpoint}"
        self._access = access
        try:
            self._socket = open_socket(endpoint, access, seconds)
        except (TimeoutError, UnicodeError) as error:  # UnicodeError: not a valid host name
            raise StoreUnavailable(f"{self._name}: cannot be reached: {error}") from error
        except OSError as error:
            raise Lost(f"{self._name}: {_sentence(error)}") from error
        self._reader: Any = hiredis.Reader(  # its type stubs lack buffers
            replyError=ErrorReply, protocolError=Lost, notEnoughData=_MORE
        )
        self._buffer = bytearray(_READ_BYTES)

    def log_in(self, deadline: float, *, protocol: int = 2) -> None:
        """Authenticate and select the database. Raises StoreUnavailable.

        RESP2 (`protocol` 2) has flat replies that are parsed faster; RESP3 has pushes.
        """
        access = self._access
        commands: list[Command] = []
        if access.password is not None:
            # Not as part of HELLO: a server that lacks HELLO would quote the password in its error.
            user = [] if access.username is None else [access.username]
            commands.append(("AUTH", *user, access.password))
        if protocol != 2:
            commands.append(("HELLO", protocol))
        if access.database:
            commands.append(("SELECT", access.database))
        if commands:
            self.send(pack(commands), deadline)
            for command, reply in zip(commands, self.receive(len(commands), deadline), strict=True):
                if isinstance(reply, ErrorReply):
                    # A server that lacks AUTH quotes its arguments, so also the password.
                    why = reply.code if command[0] == "AUTH" else str(reply)
                    raise StoreUnavailable(f"{self._name} refuses {command[0]!s}: {why}")

    def send(self, packed: bytes, deadline: float) -> None:
        """Send what `pack` returned, until `deadline` (time.monotonic). Raises StoreUnavailable."""
        try:
            self._socket.settimeout(self._left(deadline))
            self._socket.sendall(packed)
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, count: int, deadline: float) -> list[Any]:
        """The next `count` replies; a failed command has an ErrorReply. Raises StoreUnavailable."""
        replies: list[Any] = []
        while len(replies) < count:
            reply = self._reader.gets()
            if reply is _MORE:
                self._wait_for_bytes(deadline)
            else:
                replies.append(reply)
        return replies

    def receive_available(self) -> list[Any]:
        """All replies and pushes that have arrived; never waits. Raises StoreUnavailable."""
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
        """Send as much as fits now, without waiting; return the rest. Raises StoreUnavailable."""
        self._socket.settimeout(0.0)
        try:
            return packed[self._socket.send(packed) :]
        except (*_NOTHING_YET, ssl.SSLWantWriteError):
            return packed
        except OSError as error:
            raise self._failure(error) from error

    @property
    def is_idle(self) -> bool:
        """Whether an unused connection is still open with nothing to read.

        Reads what arrives without a request over TLS, such as session tickets.
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
        """The socket, logged in and with nothing left to read, for a caller with its own RESP
        client.

        The caller closes it, and must not use this connection any more.
        """
        return self._socket

    def close(self) -> None:
        """Close the socket and wake a thread that waits on it. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on the socket
        self._socket.close()

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
        # Never 0, which means non-blocking: a reply that is ready is still read.
        return max(deadline - time.monotonic(), 0.0005)

    def _failure(self, error: OSError) -> StoreUnavailable:
        if isinstance(error, TimeoutError):
            return StoreUnavailable(f"{self._name}: no answer in time")
        return Lost(f"{self._name}: {_sentence(error)}")


def pack(commands: Sequence[Command]) -> bytes:
    """Encode commands as RESP."""
    parts = []
    for command in commands:
        if isinstance(command, bytes):
            parts.append(command)
            continue
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            # surrogatepass: any str is a valid key, also one from undecodable bytes.
            raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def hgetall(name: str | bytes) -> bytes:
    """Encode HGETALL. Faster than `pack`, as a look-up sends many."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogatepass")
    return b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%b\r\n" % (len(raw), raw)


def _readable(end: socket.socket) -> bool:
    waiting = select.poll()  # not select.select, which fails above 1,023 open files
    waiting.register(end, select.POLLIN)
    return bool(waiting.poll(0))


def _sentence(error: OSError) -> str:
    """The system's message without the error number."""
    return error.strerror or str(error)
