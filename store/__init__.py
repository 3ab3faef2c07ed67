"""The metadata store in Redis or Valkey: records, claims, heartbeats and counters.

It holds metadata only, never tensor bytes. The package imports none of the project's other
packages, reads no environment variables and writes no log. Start with `open_store`; `MetadataStore`
is the contract.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from store.answers import (
    COUNTER_MAX,
    GONE_SECONDS,
    INVALIDATIONS_MAX,
    NODES_MAX,
    Beat,
    ClaimAnswer,
    Claiming,
    ClaimState,
    Failure,
    GoneReason,
    Invalidation,
    NodeInfo,
    Publication,
    Publishing,
    Releasing,
    ServerInfo,
    Withdrawing,
)
from store.base import TTL_SECONDS, BrowsableStore, Found, MetadataStore
from store.blocking import BlockingStore
from store.embedded import EmbeddedServer
from store.errors import (
    EmbeddedServerError,
    NodeTaken,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreNotBrowsable,
    StoreRefused,
    StoreUnavailable,
    StoreUrlError,
)
from store.record import (
    DEVICE,
    LOCATIONS_MAX,
    POOLS_MAX,
    DeviceLocation,
    Location,
    PoolEndpoint,
    Record,
    check_namespace,
    check_node,
    check_token,
)
from store.schemes import is_foreign, open_foreign
from store.url import StoreUrl, parse, redact

if TYPE_CHECKING:
    from redis.credentials import CredentialProvider

__all__ = [
    "COUNTER_MAX",
    "DEVICE",
    "GONE_SECONDS",
    "INVALIDATIONS_MAX",
    "LOCATIONS_MAX",
    "NODES_MAX",
    "POOLS_MAX",
    "TTL_SECONDS",
    "Beat",
    "BlockingStore",
    "BrowsableStore",
    "ClaimAnswer",
    "ClaimState",
    "Claiming",
    "DeviceLocation",
    "EmbeddedServer",
    "EmbeddedServerError",
    "Failure",
    "Found",
    "GoneReason",
    "Invalidation",
    "Location",
    "MetadataStore",
    "NodeInfo",
    "NodeTaken",
    "PoolEndpoint",
    "Publication",
    "Publishing",
    "Record",
    "Releasing",
    "ServerInfo",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreNotBrowsable",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUrlError",
    "Withdrawing",
    "check_namespace",
    "check_node",
    "check_token",
    "import_client",
    "open_async_store",
    "open_store",
    "redact",
]


def import_client() -> None:
    """Import the client of Redis and Valkey, which `open_async_store` does else.

    It takes 0.3 s, and several on a busy machine. A program with an event loop calls this before it
    serves: the import of another thread would keep the GIL from the loop.
    """
    importlib.import_module("store.redis_store")


CONNECT_SECONDS_MIN: Final = 1.5
"""Connecting takes up to seven round trips: TCP, TLS (two), login, database, name, tracking."""


def open_async_store(
    url: str,
    *,
    call_timeout_seconds: float = 0.5,
    connect_timeout_seconds: float | None = None,
    password: str | None = None,
    sentinel_password: str | None = None,
    password_file: Path | None = None,
    sentinel_password_file: Path | None = None,
    credential_provider: "CredentialProvider | None" = None,
    name: str = "",
) -> MetadataStore:
    """Open the store at `url`. Connects on first use, so a server that is down is no error here.

    `password` and `sentinel_password` replace those in the URL. `call_timeout_seconds` bounds each
    operation, `connect_timeout_seconds` its connecting; None: as long as a call, at least
    `CONNECT_SECONDS_MIN`. `name` is part of the names of connections.
    A scheme that is not one of Redis' is looked for among installed packages: see `docs/stores.md`.

    A password that may change is read anew for each connection: from `password_file`, which
    replaces all other passwords, or by `credential_provider`, which replaces `password_file`.
    `sentinel_password_file` is that of the sentinels.

    Raises:
        StoreUrlError: the URL or the package cannot be used, or a user has no password.
    """
    if connect_timeout_seconds is None:
        connect_timeout_seconds = max(call_timeout_seconds, CONNECT_SECONDS_MIN)
    if is_foreign(url):
        if credential_provider is not None:
            raise StoreUrlError(
                f"store URL {redact(url)!r}: a credential provider is for Redis and Valkey only"
            )
        return open_foreign(
            url,
            call_timeout_seconds=call_timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            password=_password_now(password, password_file, "store_password_file"),
            sentinel_password=_password_now(
                sentinel_password, sentinel_password_file, "store_sentinel_password_file"
            ),
            name=name,
        )
    address = parse(url).with_passwords(
        password,
        sentinel_password,
        provided=bool(password_file or credential_provider),
        sentinel_provided=sentinel_password_file is not None,
    )
    from store.redis_store import RedisStore  # imports redis-py, not needed to check a URL
    from store.topology import open_topology

    return RedisStore(
        open_topology(
            address,
            call_timeout_seconds=call_timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            credentials=_credentials(address, password_file, credential_provider),
            sentinel_credentials=_password_file(
                sentinel_password_file, "store_sentinel_password_file", address.sentinel_username
            ),
            name=name,
        )
    )


def _password_now(password: str | None, file: Path | None, setting: str) -> str | None:
    """The password for a store of a package, which gets it once."""
    if file is None:
        return password
    from store.credentials import read_password  # imports redis-py

    return read_password(file, setting)


def _credentials(
    address: StoreUrl, file: Path | None, provider: "CredentialProvider | None"
) -> "CredentialProvider | None":
    from store.credentials import ProviderLogin

    if provider is not None:
        return ProviderLogin(provider, address.username)
    return _password_file(file, "store_password_file", address.username)


def _password_file(
    file: Path | None, setting: str, username: str | None
) -> "CredentialProvider | None":
    from store.credentials import PasswordFile

    return None if file is None else PasswordFile(file, setting, username)


def open_store(url: str, **options: Any) -> BlockingStore:
    """As `open_async_store`, for threads and commands."""
    return BlockingStore(open_async_store(url, **options))
