"""Connection: one conversation with one Redis or Valkey server, each exchange with a deadline.

The only module that imports hiredis, which parses the replies. The rest is ours, for what redis-py
does not give: a deadline for a whole exchange instead of for each wait, pushes in their order among
the replies, and commands that are under way to several servers at once. (It is not quicker: reading
32 HASHes takes both the same time, nearly all of it the server's and hiredis'.)
"""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

import hiredis

from store.dialled import Access, Endpoint, dialled
from store.errors import StoreUnavailable

Part = str | int | bytes
Command = Sequence[Part] | bytes
"""Its parts, or all of it as it goes over the wire."""

TRACK: Command = ("CLIENT", "TRACKING", "ON")
"""From then on the server pushes what changes of what is read on the connection."""

_READ_BYTES = 1 << 16
_MORE = object()
"""What the parser says when the next reply is not complete yet."""
_NOTHING_YET = (BlockingIOError, ssl.SSLWantReadError)


class Refusal(Exception):
    """The server's error reply to one command. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class Lost(StoreUnavailable):
    """The connection ended, or was never made: what the server knew may be gone."""


class Push(list[Any]):
    """Something the server said unasked: its kind, and what belongs to it."""


class Connection:
    """One thread at a time. After an error it is closed, and its replies with it."""

    def __init__(self, endpoint: Endpoint, access: Access, seconds: float) -> None:
        """Dial, within `seconds`; `log_in` is next. Raises Lost, or StoreUnavailable."""
        self._name = f"store {endpoint}"
        self._access = access
        try:
            self._socket = dialled(endpoint, access, seconds)
        except (TimeoutError, UnicodeError) as error:  # the second: what can be no name of a host
            raise StoreUnavailable(f"{self._name}: cannot be reached: {error}") from error
        except OSError as error:
            raise Lost(f"{self._name}: {_sentence(error)}") from error
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
        return self._socket

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # who waits on another thread is woken
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
        # Never 0: that is the mode that does not wait at all, and a ready reply is still welcome.
        return max(deadline - time.monotonic(), 0.0005)

    def _failure(self, error: OSError) -> StoreUnavailable:
        if isinstance(error, TimeoutError):
            return StoreUnavailable(f"{self._name}: no answer in time")
        return Lost(f"{self._name}: {_sentence(error)}")


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


def _sentence(error: OSError) -> str:
    """What the system says, without the number that it has there."""
    return error.strerror or str(error)
