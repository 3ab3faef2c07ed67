"""The metadata store in Redis or Valkey: records, claims, heartbeats and counters.

It holds metadata only, never tensor bytes. The package imports none of the project's other
packages, reads no environment variables and writes no log. Start with `open_store`; `MetadataStore`
is the contract.
"""

from store.answers import (
    GONE_SECONDS,
    Beat,
    ClaimAnswer,
    Claiming,
    ClaimState,
    Failure,
    GoneReason,
    NodeInfo,
    Publication,
    Publishing,
    Releasing,
    ServerInfo,
    Withdrawing,
)
from store.base import TTL_SECONDS, Found, MetadataStore
from store.embedded import EmbeddedServer
from store.errors import (
    EmbeddedServerError,
    NodeTaken,
    StoreCorrupt,
    StoreError,
    StoreFull,
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
)
from store.url import parse, redact

__all__ = [
    "DEVICE",
    "GONE_SECONDS",
    "LOCATIONS_MAX",
    "POOLS_MAX",
    "TTL_SECONDS",
    "Beat",
    "ClaimAnswer",
    "ClaimState",
    "Claiming",
    "DeviceLocation",
    "EmbeddedServer",
    "EmbeddedServerError",
    "Failure",
    "Found",
    "GoneReason",
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
    "StoreRefused",
    "StoreUnavailable",
    "StoreUrlError",
    "Withdrawing",
    "open_store",
    "redact",
]


def open_store(
    url: str,
    *,
    call_timeout_seconds: float = 0.25,
    connect_timeout_seconds: float = 0.25,
    password: str | None = None,
    sentinel_password: str | None = None,
) -> MetadataStore:
    """Open the store at `url`. Connects on first use, so a server that is down is no error here.

    `password` and `sentinel_password` replace those in the URL. `call_timeout_seconds` bounds each
    operation, `connect_timeout_seconds` its connecting.

    Raises:
        StoreUrlError: the URL cannot be used, or names a user without a password.
    """
    address = parse(url)
    from store.redis_store import RedisStore  # imports hiredis, not needed to check a URL

    return RedisStore(
        address.with_passwords(password, sentinel_password),
        call_timeout_seconds=call_timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
    )
