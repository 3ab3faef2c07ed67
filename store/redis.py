"""RedisLink: commands to one Redis or Valkey server, replies back, errors translated.

The only module that imports redis-py, of which it uses the connections, their pool and their
parser. Commands are packed here: reading 32 records then takes half as long as by redis-py's
pipeline. Runs in whatever thread calls; has none of its own. Knows nothing of records.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from store.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from store.url import StoreUrl

_CONNECTIONS_MAX = 64  # more callers at once than a node has threads; the next is refused

_REFUSALS = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,
)
# Codes for which redis-py has no class: the server is there but will not serve us now.
_REFUSAL_CODES = ("MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE")

Part = str | int | bytes


class Script:
    """A Lua script, sent by its digest; by its text where the server does not know it yet."""

    def __init__(self, name: str) -> None:
        text = files("store").joinpath("scripts", f"{name}.lua").read_bytes()
        self.by_text: tuple[Part, ...] = ("EVAL", text)
        self.by_digest: tuple[Part, ...] = ("EVALSHA", hashlib.sha1(text).hexdigest())


class RedisLink:
    """Up to 64 connections to one server; every method from any thread.

    A call takes a connection from the pool, sends everything at once and waits for the replies.
    `call_timeout_seconds` bounds each wait for more bytes. Nothing is retried. Errors are those of
    MetadataStore; what is foreign is their cause.
    """

    def __init__(
        self,
        address: StoreUrl,
        *,
        call_timeout_seconds: float,
        connect_timeout_seconds: float,
        password: str | None,
    ) -> None:
        self._name = address.path or f"{address.host}:{address.port}"
        self._pool = _pool(
            address, call_timeout_seconds, connect_timeout_seconds, password or address.password
        )
        self._closed = threading.Event()

    def run(self, script: Script, keys: Sequence[str], arguments: Iterable[Part]) -> Any:
        """Run one script and return its answer."""
        call = (len(keys), *keys, *arguments)
        (reply,) = self._exchange([(*script.by_digest, *call)])
        if isinstance(reply, redis.exceptions.NoScriptError):
            # Once after each start of the server; this also makes the script known there.
            (reply,) = self._exchange([(*script.by_text, *call)])
        if isinstance(reply, redis.ResponseError):
            raise self._translated(reply) from reply
        return reply

    def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Iterable[Part]]]
    ) -> list[Any]:
        """Run one script for each (keys, arguments) in `calls`, in one round trip.

        The answers are in the order of the calls. Where the server refused one, its place holds
        the StoreError; the others were carried out all the same.
        """
        flat = [(len(keys), *keys, *arguments) for keys, arguments in calls]
        replies = self._exchange([(*script.by_digest, *call) for call in flat])
        unknown = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, redis.exceptions.NoScriptError)
        ]
        again = self._exchange([(*script.by_text, *flat[index]) for index in unknown])
        for index, reply in zip(unknown, again, strict=True):
            replies[index] = reply
        return [
            self._translated(reply) if isinstance(reply, redis.ResponseError) else reply
            for reply in replies
        ]

    def read_hashes(self, names: Sequence[Part]) -> list[dict[bytes, bytes]]:
        """The fields of each HASH; empty where it is missing, or is no HASH at all."""
        hashes = []
        for reply in self._exchange([("HGETALL", name) for name in names]):
            if isinstance(reply, redis.ResponseError):
                error = self._translated(reply)
                if not isinstance(error, StoreCorrupt):
                    raise error from reply
                reply = ()
            hashes.append(dict(zip(reply[::2], reply[1::2], strict=True)))
        return hashes

    def batch(self, commands: Sequence[tuple[Part, ...]]) -> list[Any]:
        """Send commands together and return their replies; raise the first error among them."""
        replies = self._exchange(commands)
        for reply in replies:
            if isinstance(reply, redis.ResponseError):
                raise self._translated(reply) from reply
        return replies

    def _exchange(self, commands: Sequence[tuple[Part, ...]]) -> list[Any]:
        """One round trip. A command that the server refused has its error for a reply."""
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")
        if not commands:
            return []
        packed = b"".join(map(_pack, commands))
        try:
            connection: Any = self._pool.get_connection()  # hardly annotated in redis-py
            try:
                connection.send_packed_command([packed])
                return [_reply(connection.read_response) for _ in commands]
            except BaseException:
                # Its replies may still be on the way: never again may it be read from.
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
                if self._closed.is_set():
                    self._pool.disconnect(inuse_connections=False)
        except (redis.RedisError, OSError) as error:
            # Also a refusal during the handshake: no such user, no such database.
            raise StoreUnavailable(f"store {self._name}: {error}") from error

    def _translated(self, refusal: redis.ResponseError) -> StoreError:
        """What the server's refusal of one command means to callers."""
        text = f"store {self._name}: {refusal}"
        if isinstance(refusal, redis.exceptions.OutOfMemoryError):
            return StoreFull(text)
        code = str(refusal).partition(" ")[0]
        if isinstance(refusal, _REFUSALS) or code in _REFUSAL_CODES:
            return StoreUnavailable(text)
        return StoreCorrupt(text)

    def close(self) -> None:
        """Idempotent. A connection in use is closed by its user, as soon as it has its replies."""
        self._closed.set()
        self._pool.disconnect(inuse_connections=False)


def _pool(
    address: StoreUrl,
    call_timeout_seconds: float,
    connect_timeout_seconds: float,
    password: str | None,
) -> redis.ConnectionPool:
    """Connections that never retry, and wait no longer than they are told."""
    where: dict[str, Any]
    if address.path:
        where = {"connection_class": redis.UnixDomainSocketConnection, "path": address.path}
    else:
        kind = redis.SSLConnection if address.tls else redis.Connection
        where = {"connection_class": kind, "host": address.host, "port": address.port}
        where["socket_keepalive"] = True
        where.update(address.tls_files)
    return redis.ConnectionPool(
        max_connections=_CONNECTIONS_MAX,
        db=address.database,
        username=address.username,
        password=password,
        socket_timeout=call_timeout_seconds,
        socket_connect_timeout=connect_timeout_seconds,
        retry=Retry(NoBackoff(), 0),
        # RESP2: its flat replies are parsed faster, and nothing is pushed on these connections.
        protocol=2,
        **where,
    )


def _pack(command: tuple[Part, ...]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    for part in command:
        # surrogatepass: any str can be a key, also one that came from undecodable bytes.
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


def _reply(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except redis.ResponseError as error:
        return error
