"""Commands and replies of Redis, as redis-py sends and reads them, with this package's errors.

redis-py raises error replies as exceptions and takes most of their codes out of the messages. Here
a refusal is a value with its code, as others may follow it on the connection.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from store.errors import StoreCorrupt, StoreError, StoreFull, StoreRefused
from store.tls import TlsOptionError

Part = str | int | bytes
Command = Sequence[Part]
Reply = Any
"""What the server answered to one command; a refusal is an exception out of `REFUSALS`."""

REFUSALS: Final = (ResponseError, BusyLoadingError, AuthenticationError)
"""redis-py's exceptions for error replies. It raises its others when a connection fails."""
FAILURES: Final = (RedisError, OSError, ValueError)
"""What a connection that fails raises. ValueError: a redirection without an address."""
_pack: Final[Callable[[tuple[Part, ...]], bytes]] = hiredis.pack_command  # type: ignore[assignment]  # its types allow one part
_CODES: Final[Mapping[type[RedisError], str]] = {
    AuthenticationError: "NOAUTH",
    BusyLoadingError: "LOADING",
    MovedError: "MOVED",  # before ASK: a subclass
    AskError: "ASK",
    MasterDownError: "MASTERDOWN",  # before CLUSTERDOWN: a subclass
    ClusterDownError: "CLUSTERDOWN",
    NoPermissionError: "NOPERM",
    NoScriptError: "NOSCRIPT",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    TryAgainError: "TRYAGAIN",
}
"""redis-py takes these codes out of the messages; it leaves all others in."""
_NOT_SERVED: Final = frozenset(
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "MOVED", "NOAUTH"),
        *("NOPERM", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNKILLABLE", "WRONGPASS"),
    )
)
"""Error codes of servers that are reachable but do not serve the command now."""


def pack(commands: Sequence[Command]) -> bytes:
    """Encode commands as RESP. redis-py's own packing takes several times as long."""
    try:
        return b"".join(map(_pack, map(tuple, commands)))
    except UnicodeEncodeError:  # a surrogate
        return b"".join([_pack(tuple(map(_raw, command))) for command in commands])


def _raw(part: Part) -> bytes:
    if isinstance(part, bytes):
        return part
    # surrogatepass: any str is a valid key, also one from undecodable bytes.
    return str(part).encode("utf-8", "surrogatepass")


async def read_replies(connection: AbstractConnection, count: int) -> list[Reply]:
    """The next `count` replies; a refusal is returned, not raised. Raises one of FAILURES.

    By the parser of redis-py: its `Connection.read_response` doubles the time of 32 replies.
    """
    parser = parser_of(connection)
    replies: list[Reply] = []
    while len(replies) < count:
        try:
            replies.append(await parser.read_response())
        except REFUSALS as error:
            replies.append(error)
    return replies


def parser_of(connection: AbstractConnection) -> Any:
    """redis-py's parser of the connection's stream, which has no public name."""
    return connection._parser


def writer_of(connection: AbstractConnection) -> asyncio.StreamWriter:
    """The connection's stream, which has no public name. redis-py's `send_packed_command` also
    waits until the server has taken the bytes."""
    writer = connection._writer
    assert writer is not None, "it is connected"
    return writer


def abort(connection: AbstractConnection) -> None:
    """Drop what the server has not taken yet: it must not execute that when it resumes. Whoever
    calls this disconnects."""
    if connection._writer is not None:
        connection._writer.transport.abort()


def code_of(reply: Reply) -> str:
    """The error code of a refusal, such as READONLY; "" for any other reply."""
    if not isinstance(reply, REFUSALS):
        return ""
    for kind, code in _CODES.items():
        if isinstance(reply, kind):
            return code
    first = str(reply).partition(" ")[0]
    return first if first.isupper() else ""


def text_of(refusal: Exception) -> str:
    """A refusal as the server sent it: with its code, which redis-py takes out."""
    code, text = code_of(refusal) or "ERR", str(refusal)
    return text if text.startswith(code) else f"{code} {text}"


def translated(reply: Reply) -> Any:
    """The reply; a refusal becomes the matching StoreError."""
    if not isinstance(reply, REFUSALS):
        return reply
    code, text = code_of(reply), text_of(reply)
    kind: type[StoreError] = StoreCorrupt
    if code == "OOM" or "-OOM" in text:
        kind = StoreFull
    elif code in _NOT_SERVED:
        kind = StoreRefused
    error = kind(f"store: {text}")
    if isinstance(error, StoreRefused):
        error.forbidden = code == "NOPERM"
    if isinstance(error, StoreCorrupt):
        error.wrong_type = code == "WRONGTYPE"
    error.__cause__ = reply
    return error


def reason_of(error: BaseException) -> str:
    """Why a connection failed: in the words of the system if redis-py only quotes it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError | TlsOptionError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error)
