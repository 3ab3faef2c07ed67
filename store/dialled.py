"""Connected sockets: name resolution, connect and TLS within a deadline; no protocol on top.

Python's own sockets. redis-py would do the same, but its import takes 0.4 s (with its cluster,
asyncio and metrics parts), too much for a command that runs for 0.2 s.
"""

import socket
import time
from dataclasses import dataclass, field

from store.tls import tls_context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's network address: `path` of a Unix socket, or host and port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials, TLS files and timeouts for all servers of one deployment."""

    username: str | None
    password: str | None = field(repr=False)
    database: int
    tls: bool
    tls_files: tuple[tuple[str, str], ...]
    call_timeout_seconds: float
    connect_timeout_seconds: float


def open_socket(endpoint: Endpoint, access: Access, seconds: float) -> socket.socket:
    """Connect a socket, with TLS if `access.tls` is set.

    Each address of a host gets `seconds`, TLS handshake included, so one address never takes
    longer.

    Raises:
        OSError: it failed; TimeoutError if the time was too short.
    """
    seconds = max(seconds, 0.001)
    if endpoint.path:
        return _connect(socket.AF_UNIX, endpoint.path, seconds)
    if not access.tls:
        return _connect_to_host(endpoint, seconds)[0]
    # Before connecting: reading the files takes time, too.
    context = tls_context(dict(access.tls_files))
    end, left = _connect_to_host(endpoint, seconds)
    try:
        end.settimeout(left)
        return context.wrap_socket(end, server_hostname=endpoint.host)
    except BaseException:
        end.close()
        raise


def _connect_to_host(endpoint: Endpoint, seconds: float) -> tuple[socket.socket, float]:
    """Connect to the first address that accepts; return the socket and what is left of its time."""
    failure: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        ends_at = time.monotonic() + seconds
        try:
            end = _connect(family, address, seconds)
        except OSError as error:
            failure = error
            continue
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return end, max(ends_at - time.monotonic(), 0.001)
    raise failure or OSError("the host name has no address")


def _connect(family: int, address: object, seconds: float) -> socket.socket:
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.settimeout(seconds)
        end.connect(address)  # type: ignore[arg-type]  # a path, or from getaddrinfo
    except BaseException:
        end.close()
        raise
    return end
