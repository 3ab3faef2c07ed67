"""Raw commands to a real server, past the store: what is really in it, and how to set it up.

As a program it stands in for redis-cli on machines without one, for the recipes of
docs/redis-keys.md: `python resp.py SOCKET [--scan --pattern PATTERN | WORD ...]` prints what
redis-cli prints into a pipe: each string or number of the reply on a line of its own.
"""

import socket
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import hiredis

from patience import scaled

TIMEOUT_SECONDS = scaled(5.0)
_MORE = object()


class RespError(Exception):
    """The server refused a command; the text is its own."""


class RespConnection:
    """One conversation, on one thread. Strings in replies are bytes; a refusal is raised.

    `place` is the path of a unix socket or a port of this machine.
    """

    def __init__(
        self,
        place: str | int,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if isinstance(place, str):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(place)
        else:
            self._socket = socket.create_connection(("127.0.0.1", place), timeout_seconds)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="127.0.0.1")
        self._reader: Any = hiredis.Reader(replyError=RespError, notEnoughData=_MORE)

    def __call__(self, *parts: str | bytes | int) -> Any:
        raws = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
        packed = b"".join(b"$%d\r\n%b\r\n" % (len(raw), raw) for raw in raws)
        self._socket.sendall(b"*%d\r\n%b" % (len(raws), packed))
        return self.read()

    def read(self) -> Any:
        """The next reply, or what the server said unasked."""
        while (reply := self._reader.gets()) is _MORE:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(received)
        if isinstance(reply, RespError):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "RespConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lines(reply: Any) -> Iterator[str]:
    if isinstance(reply, list):
        for part in reply:
            yield from lines(part)
    else:
        yield "" if reply is None else reply.decode() if isinstance(reply, bytes) else str(reply)


def scan(connection: RespConnection, pattern: str) -> Iterator[str]:
    cursor = b"0"
    while True:
        cursor, names = connection("SCAN", cursor, "MATCH", pattern)
        yield from lines(names)
        if cursor == b"0":
            return


def main() -> None:
    path, *words = sys.argv[1:]
    with RespConnection(path) as connection:
        if words[0] == "--scan":
            found = scan(connection, words[words.index("--pattern") + 1])
        else:
            found = lines(connection(*words))
        for line in found:
            print(line)


if __name__ == "__main__":
    main()
