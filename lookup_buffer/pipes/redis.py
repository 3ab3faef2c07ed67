"""`redis://HOST:PORT/DATABASE?pipe=NAME`: a pipe through a Redis or Valkey server.

Both ends reach the server. The address is its store URL, with the pipe's name as an additional
option. One end listens under the name, on a thread of its own. A connecting end pushes its session
id to a list (its key ends in `door`) that the listening end reads. The handshake then runs over the
session's own lists.

This module makes connections; `redis_link` owns the frames and their keys in the database.
"""

import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self

from lookup_buffer.errors import (
    ConfigError,
    LookupBufferError,
    PipeBroken,
    PipeTimeout,
    ProtocolError,
)
from lookup_buffer.pipes.pipe import KVPipe, PipeLimits
from lookup_buffer.pipes.redis_dial import NotListening, dial
from lookup_buffer.pipes.redis_link import CHECK_SECONDS, RedisLink, Session
from lookup_buffer.pipes.resp import Resp3Connection
from lookup_buffer.pipes.stream import StreamPipe
from lookup_buffer.protocol.acceptor import HANDSHAKE_SECONDS, Acceptor
from lookup_buffer.protocol.auth import HELLO_BYTES, client_handshake, server_handshake
from store import StoreUnavailable, StoreUrlError, redact
from store.url import parse

TRY_AGAIN_SECONDS: Final = 0.05
SESSION_SECONDS: Final = 60.0
"""Expiry of the list of session ids. Everything that a pipe writes expires."""
PREFIX: Final = "lb:pipe:"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SESSION: Final = re.compile(r"[0-9a-f]{32}")
_OPTION: Final = "pipe="


@dataclass(frozen=True, slots=True)
class _Address:
    uri: str = field(repr=False)
    url: str = field(repr=False)
    """The store URL of the server."""
    name: str

    @classmethod
    def parse(cls, uri: str) -> Self:
        address, _, query = uri.partition("?")
        options = query.split("&") if query else []
        names = [option.removeprefix(_OPTION) for option in options if option.startswith(_OPTION)]
        others = "&".join(option for option in options if not option.startswith(_OPTION))
        url = f"{address}?{others}" if others else address
        if len(names) != 1 or not _NAME.fullmatch(names[0]):
            raise ConfigError(
                f"{redact(url)!r} must name its pipe once, by ?pipe=NAME of A-Za-z0-9._-"
            )
        try:
            server = parse(url)
        except StoreUrlError as error:
            raise ConfigError(str(error)) from None
        if server.topology != "standalone":
            raise ConfigError(f"{redact(url)!r}: a pipe uses one server, not a Sentinel or Cluster")
        if server.username is not None and server.password is None:
            raise ConfigError(
                f"{redact(url)!r} names a user and no password; write redis://USER:PASSWORD@host, "
                "or redis://:PASSWORD@host for the default user"
            )
        return cls(uri, url, names[0])

    @property
    def session_list(self) -> bytes:
        return f"{PREFIX}{self.name}:door".encode()

    @property
    def listener_channel(self) -> bytes:
        """The channel of the listening end. Its name has the database's number, because a server's
        channels, unlike its keys, are shared by all databases."""
        return self.session_list + b"@%d" % parse(self.url).database

    def session(self, session: str) -> Session:
        return Session(f"{PREFIX}{self.name}:{session}")

    def connect(self, deadline: float, purpose: str) -> Resp3Connection:
        """Connect to the server; retries until `deadline`, a monotonic time. `purpose` is part of
        the connection's name in CLIENT LIST.

        Raises:
            PipeBroken: the server cannot be reached, or refuses the connection.
        """
        name = f"pipe:{self.name}:{purpose}"
        while True:
            seconds = max((deadline - time.monotonic()) / 2, 0.01)
            try:
                return Resp3Connection(dial(self.url, seconds, name=name))
            except NotListening as error:
                if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
                    raise PipeBroken(str(error)) from error
                time.sleep(TRY_AGAIN_SECONDS)
            except StoreUnavailable as error:
                raise PipeBroken(str(error)) from error

    def link(
        self, session: str, deadline: float, silence_seconds: float, *, listens: bool
    ) -> RedisLink:
        """A link for a session. Before the handshake it accepts only small frames."""
        names = self.session(session)
        reader = self.connect(deadline, "reader")
        try:
            reader.subscribe(names.list_to(listens), deadline)
            writer = self.connect(deadline, "writer")
        except BaseException:
            reader.close()
            raise
        link = RedisLink(names, reader, writer, listens=listens, silence_seconds=silence_seconds)
        link.limit(header_bytes=HELLO_BYTES, payload_bytes=0)
        return link


class _ListeningPipe(StreamPipe):
    def __init__(
        self, address: _Address, token: str | None, limits: PipeLimits, deadline: float
    ) -> None:
        super().__init__(address.uri, limits)
        self._address = address
        self._token = token
        self._acceptor = Acceptor()
        self._connection = address.connect(deadline, "listener")
        self._stopping = False
        try:
            self._connection.subscribe(address.listener_channel, deadline)
            if self._connection.subscribers(address.listener_channel, deadline) > 1:
                raise ConfigError(f"another end already listens at pipe {address.name}")
            threading.Thread(target=self._accept, name="lb-pipe-accept", daemon=True).start()
        except RuntimeError as error:
            self._connection.close()
            raise PipeBroken(f"the system does not allow to listen: {error}") from error
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._stop_listening()
        super().close()

    def abort(self) -> None:
        self._stop_listening()
        super().abort()

    def _stop_listening(self) -> None:
        self._stopping = True
        self._connection.close()

    def _accept(self) -> None:
        reply_seconds = self._limits.silence_seconds + CHECK_SECONDS
        try:
            while True:
                command = (b"BLPOP", self._address.session_list, b"%.3f" % CHECK_SECONDS)
                reply = self._connection.request(command, time.monotonic() + reply_seconds)
                if reply is not None:
                    session = _session_of(reply)
                    self._acceptor.try_start(partial(self._handshake, session))
        except LookupBufferError as error:
            # Without the database this end cannot be used, even if no other end is connected.
            if not self._stopping and self._end_here(error):
                for remote_end in list(self._remote_ends):
                    remote_end.abort(error)

    def _handshake(self, session: str) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        with suppress(LookupBufferError):
            link = self._address.link(session, deadline, self._limits.silence_seconds, listens=True)
            try:
                if not link.is_other_end_connected(deadline):
                    raise PipeBroken("the connecting end has left")
                server_handshake(link, self._token, deadline)
            except BaseException:
                link.close()
                raise
            link.limit()
            self.add_remote_end(link)


def _session_of(reply: object) -> str:
    match reply:
        case [_, bytes(session)] if _SESSION.fullmatch(session.decode("latin-1")):
            return session.decode()
    raise ProtocolError("not a session id in the list of the pipe")


def open_end(
    uri: str, *, listen: bool, timeout: float, token: str | None, limits: PipeLimits
) -> KVPipe:
    """See `open_pipe`."""
    address = _Address.parse(uri)
    deadline = time.monotonic() + timeout
    if listen:
        return _ListeningPipe(address, token, limits, deadline)
    link = _announced_link(address, deadline, limits.silence_seconds)
    try:
        client_handshake(link, token, deadline)
    except BaseException:
        link.close()
        raise
    link.limit()
    pipe = StreamPipe(uri, limits)
    pipe.add_remote_end(link)
    return pipe


def _announced_link(address: _Address, deadline: float, silence_seconds: float) -> RedisLink:
    """A link for a new session, whose id was sent to the listening end."""
    session = secrets.token_hex(16)
    expiry = b"%d" % int(SESSION_SECONDS * 1000)
    announcement = (b"RPUSH", address.session_list, session.encode())
    connection = address.connect(deadline, "dialler")
    try:
        _wait_for_listener(address, connection, deadline)
        link = address.link(session, deadline, silence_seconds, listens=False)
        try:
            connection.send([announcement, (b"PEXPIRE", address.session_list, expiry)], deadline)
            connection.read_replies(deadline)
        except BaseException:
            link.close()
            raise
    finally:
        connection.close()
    return link


def _wait_for_listener(address: _Address, connection: Resp3Connection, deadline: float) -> None:
    while not connection.subscribers(address.listener_channel, deadline):
        if time.monotonic() + TRY_AGAIN_SECONDS > deadline:
            raise PipeTimeout(f"no end listens at pipe {address.name} of {redact(address.url)}")
        time.sleep(TRY_AGAIN_SECONDS)
