"""A logged-in socket to a Redis server, for the payload lane of the `redis` pipe.

redis-py connects and logs in, so that its URL options hold here too. Then the pipe takes the socket
over: redis-py reads a payload into new bytes, and the pipe reads it in place.
"""

import socket
import ssl
from typing import Any

from redis.connection import (
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import AuthenticationError, RedisError, ResponseError, TimeoutError

from store import StoreUnavailable, StoreUrlError, redact
from store.connections import WITHOUT_SETINFO, connection_name
from store.tls import tls_context
from store.url import parse


class NotListening(StoreUnavailable):
    """No server listens there, or it closed the connection: it may be starting."""


class _TlsConnection(SSLConnection):
    """With the context that all options of the URL make; its errors name the option."""

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._context = context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


def dial(url: str, seconds: float, *, name: str = "pipe") -> socket.socket:
    """Connect and log in as `url` says, in RESP3. Takes up to `seconds` for each step.

    `name` is part of the connection's name in CLIENT LIST.

    Raises:
        StoreUrlError: the URL is not that of a single server, or has a user without a password.
        NotListening: no server listens there.
        StoreUnavailable: it was too slow, or refuses the login.
    """
    address = parse(url).with_passwords(None, None)
    if address.topology != "standalone":
        raise StoreUrlError(
            f"{redact(url)!r} names a deployment; use the URL of one server, such as redis://host"
        )
    server = address.path or "{}:{}".format(*address.hosts[0])
    options = {
        **address.options,
        **WITHOUT_SETINFO,
        "username": address.username,
        "password": address.password,
        "db": address.database,
        "protocol": 3,
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
    }
    kind: type[Any] = Connection
    if address.path:
        kind = UnixDomainSocketConnection
        options["path"] = address.path
    else:
        options["host"], options["port"] = address.hosts[0]
    if address.tls:
        kind = _TlsConnection
        options["context"] = tls_context(address.tls_options)
    connection: Any = kind(**options)
    try:
        connection.connect()
        _set_name(connection, connection_name(address.client_name, name))
        taken: socket.socket = connection._sock  # no public method gives it away
        connection._sock = None
    except (AuthenticationError, ResponseError):
        # A server that lacks HELLO or AUTH quotes the password in its error.
        raise StoreUnavailable(f"store {server} refuses the login") from None
    except TimeoutError as error:
        raise StoreUnavailable(f"store {server}: no answer in time") from error
    except (RedisError, OSError) as error:
        raise NotListening(f"store {server}: {error}") from error
    return taken


def _set_name(connection: Any, name: str) -> None:
    connection.send_command("CLIENT", "SETNAME", name)
    try:
        connection.read_response()
    except ResponseError:  # a server's ACL may forbid it
        pass
