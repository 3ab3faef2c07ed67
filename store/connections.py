"""Connections of redis-py to the servers of one deployment: their login, TLS and names.

Used from redis-py's asyncio client: `Connection` and its kinds, `ConnectionPool`, credential
providers. Not used: its `Redis` clients and their retries, which wait for up to a minute on a
server that hangs.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError

from store.credentials import ProviderLogin
from store.replies import REFUSALS, Reply, code_of, pack, read_replies
from store.tls import TlsContexts
from store.url_options import CLIENT_NAME, CONNECTIONS_MAX

_OPTIONS: Final = inspect.signature(AbstractConnection.__init__).parameters
# redis-py sends CLIENT SETINFO at each dial, which the documented ACL user may not do. This
# switches it off; the name depends on redis-py's version.
WITHOUT_SETINFO: Final[dict[str, Any]] = (
    {"driver_info": None} if "driver_info" in _OPTIONS else {"lib_name": None, "lib_version": None}
)
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._:-]")
_NAME_CHARACTERS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's network address: `path` of a Unix socket, or host and port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(eq=False)
class Access:
    """How to log in to all servers of one deployment, and how long a call may take.

    `options` are keyword arguments of redis-py's connections.
    """

    call_timeout_seconds: float
    connect_timeout_seconds: float
    tls_options: Mapping[str, Any] | None = None
    """See `tls_context`; None for no TLS."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    name: str = ""
    """Part of the names of connections, beside their purpose."""
    client_name: str = CLIENT_NAME
    """How these names begin."""
    connections_max: int = CONNECTIONS_MAX
    """Connections to one server, besides the tracked one. A call that needs another one fails."""
    _contexts: TlsContexts | None = field(default=None, init=False, repr=False)

    def connection(
        self, endpoint: Endpoint, purpose: str, logged_in: Callable[[str], None], **more: Any
    ) -> AbstractConnection:
        """A connection that is not connected yet. `purpose` is part of its name. For `logged_in`
        see `pool`.

        It has no `health_check_interval`: its owner reads replies as they arrive, and probes it.
        """
        kind, options = self._kind_and_options(endpoint)
        log_in: Any = self._log_in(purpose, logged_in)
        more = {"health_check_interval": 0, "redis_connect_func": log_in, **more}
        return kind(**(options | more))

    def pool(
        self, endpoint: Endpoint, purpose: str, logged_in: Callable[[str], None]
    ) -> ConnectionPool:
        """`logged_in` gets the server's run id after each dial; "" if the server does not say."""
        kind, options = self._kind_and_options(endpoint)
        return ConnectionPool(
            kind,
            max_connections=self.connections_max,
            **({"protocol": 2} | options),
            **_without_notifications(),
            redis_connect_func=self._log_in(purpose, logged_in),
        )

    async def close(self) -> None:
        """Give up a question to the credential provider. Idempotent."""
        if isinstance(self.credentials, ProviderLogin):
            await self.credentials.close()

    @property
    def credentials(self) -> CredentialProvider | None:
        """Which provides the password of each new connection; None if it stays the same."""
        return self.options.get("credential_provider")

    def name_of(self, purpose: str) -> str:
        """The name of a connection in CLIENT LIST, such as lookup-buffer:node-1:mirror."""
        return connection_name(self.client_name, self.name, purpose)

    def _kind_and_options(
        self, endpoint: Endpoint
    ) -> tuple[type[AbstractConnection], dict[str, Any]]:
        options: dict[str, Any] = {
            "socket_timeout": None,
            "socket_connect_timeout": self.connect_timeout_seconds,
            **WITHOUT_SETINFO,
            **self.options,
        }
        if endpoint.path:
            return _UnixConnection, options | {"path": endpoint.path}
        options |= {"host": endpoint.host, "port": endpoint.port}
        if self.tls_options is None:
            return Connection, options
        if self._contexts is None:
            self._contexts = TlsContexts(self.tls_options)
        return _TlsConnection, options | {"contexts": self._contexts}

    def _log_in(
        self, purpose: str, logged_in: Callable[[str], None]
    ) -> Callable[[AbstractConnection], Awaitable[None]]:
        """redis-py's login, then a name for CLIENT LIST. A server may refuse the name."""
        greeting = pack([("CLIENT", "SETNAME", self.name_of(purpose)), ("INFO", "server")])

        async def log_in(connection: AbstractConnection) -> None:
            try:
                await connection.on_connect_check_health(check_health=False)
                await connection.send_packed_command(greeting, check_health=False)
                _, info = await read_replies(connection, 2)
            except BaseException as error:
                await connection.disconnect(nowait=True)
                if isinstance(error, REFUSALS):
                    raise _without_secrets(error) from None
                raise
            logged_in(_run_id(info))

        return log_in


def _without_notifications() -> dict[str, Any]:
    """Options of a pool that keep newer versions of redis-py from asking for notices of maintenance
    in RESP3, by which the server would change addresses and timeouts.
    """
    if "maint_notifications_config" not in _OPTIONS:
        return {}
    from redis.maint_notifications import MaintNotificationsConfig

    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


class _UnixConnection(UnixDomainSocketConnection):
    """redis-py logs in twice on a Unix socket: once as part of connecting, by this method."""

    async def on_connect(self) -> None:
        return


class _TlsConnection(SSLConnection):
    """The context is that of all connections: redis-py would read the files for each."""

    def __init__(self, *, contexts: TlsContexts, **options: Any) -> None:
        super().__init__(**options)
        self._contexts = contexts

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = self._contexts.current()
        return super()._connection_arguments()

    async def disconnect(self, nowait: bool = False, *args: Any, **more: Any) -> None:
        """With `nowait` it also does not wait, in the background, for the server's TLS goodbye."""
        if nowait:
            self._close()
        await super().disconnect(nowait, *args, **more)

    def _close(self) -> None:
        writer = self._writer
        super()._close()  # type: ignore[no-untyped-call]
        if writer is not None:
            writer.transport.abort()


def connection_name(*parts: str) -> str:
    """A name that CLIENT SETNAME takes, of the parts that are not empty."""
    return _NOT_IN_NAMES.sub("_", ":".join(filter(None, parts)))[:_NAME_CHARACTERS_MAX]


def _without_secrets(refusal: Exception) -> ResponseError:
    """A server that lacks HELLO or AUTH quotes the password in its reply."""
    unknown = "unknown command" in str(refusal).lower()
    reason = "unknown command at the login" if unknown else "the login is refused"
    return ResponseError(f"{code_of(refusal) or 'ERR'} {reason}")


def _run_id(info: Reply) -> str:
    found = re.search(rb"run_id:(\w+)", info) if isinstance(info, bytes) else None
    return found[1].decode() if found else ""
