"""Who holds which tensor: records, claims, beats and counters, in Redis or Valkey.

Metadata only, never tensor bytes. Imports nothing of the other packages, reads no environment and
no logger. `open_store` is the door.
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
    """The store behind `url`. Connects at first use, so a server that is down is no error here.

    The passwords are for those who keep them apart from the URL; they come before those in it.
    Raises StoreUrlError.
    """
    address = parse(url)
    from store.redis_store import RedisStore  # loads hiredis, which a check of a URL does not need

    return RedisStore(
        address.with_passwords(password, sentinel_password),
        call_timeout_seconds=call_timeout_seconds,
        connect_timeout_seconds=connect_timeout_seconds,
    )
