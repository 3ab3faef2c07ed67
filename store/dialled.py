"""Connected sockets: names and TLS. The deadline of a dialling, and no word to a server.

Plain sockets of Python. redis-py would do the same after 0.4 s of importing, its clients for
clusters and asyncio and what measures them among it; a command that lives for 0.2 s pays for that.
"""

import socket
import time
from dataclasses import dataclass, field

from store.tls import tls_context


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


def dialled(endpoint: Endpoint, access: Access, seconds: float) -> socket.socket:
    """A socket that is connected, through TLS where that is asked for.

    Each address of a host has `seconds`, its handshake included: nobody waits twice as long.

    Raises:
        OSError: TimeoutError, where that is the reason.
    """
    seconds = max(seconds, 0.001)
    if endpoint.path:
        return _connected(socket.AF_UNIX, endpoint.path, seconds)
    if not access.tls:
        return _reached(endpoint, seconds)[0]
    context = tls_context(
        dict(access.tls_files)
    )  # before dialling: reading files takes a while, too
    end, left = _reached(endpoint, seconds)
    try:
        end.settimeout(left)
        return context.wrap_socket(end, server_hostname=endpoint.host)
    except BaseException:
        end.close()
        raise


def _reached(endpoint: Endpoint, seconds: float) -> tuple[socket.socket, float]:
    """Connected to the first address that takes us in, and what is left of its time."""
    failure: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        ends_at = time.monotonic() + seconds
        try:
            end = _connected(family, address, seconds)
        except OSError as error:
            failure = error
            continue
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return end, max(ends_at - time.monotonic(), 0.001)
    raise failure or OSError("the name has no address")


def _connected(family: int, address: object, seconds: float) -> socket.socket:
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.settimeout(seconds)
        end.connect(address)  # type: ignore[arg-type]  # a path, or what getaddrinfo said
    except BaseException:
        end.close()
        raise
    return end
