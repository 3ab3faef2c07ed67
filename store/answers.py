"""Arguments and results of a store's operations, except records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from store.record import POOLS_MAX, DeviceLocation, Location, PoolEndpoint, Record, check_node

_INVALIDATION = re.compile(r"([0-9a-f]{16}):([0-9]{1,12})\Z")


class Publication(Enum):
    """The result of a publication. Only CONFLICT means that the record describes other bytes."""

    ADDED = "added"
    """The location is new, or replaced an older one of the same node."""
    PRESENT = "present"
    """This location, or a newer one of the same boot, was present; the record was renewed."""
    FULL = "full"
    """LOCATIONS_MAX other nodes hold it: the location was not added, and nothing was renewed."""
    CONFLICT = "conflict"
    """The record has another dtype, shape, size or kind, or belongs to another key."""
    OWNED = "owned"
    """Another node holds this `sole` key: nothing changed."""
    REFUSED = "refused"
    """The server is out of memory and may evict nothing: not stored."""
    UNREACHED = "unreached"
    """The key's server was not reached, while others were: repeat it later."""


class ClaimState(Enum):
    """The progress of a claimant."""

    INTENT = "intent"
    """The claimant will produce the key soon. Such a claim cannot be renewed; it can only become
    ENCODING.
    """
    ENCODING = "encoding"
    """The claimant is producing the key. It renews the claim on signs of progress, never by a timer
    alone.
    """


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The claimant of the key now. If `granted`, `holder` and `state` are the caller's own.

    `record` is the key's record as it was when the claim was decided. So a claim granted right
    after the previous claimant published does not cause a second encode.
    """

    granted: bool
    holder: str
    state: ClaimState
    remaining_seconds: float
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Claiming:
    """The arguments of one claim; see MetadataStore.claim."""

    namespace: str
    key: str
    holder: str
    token: str
    state: ClaimState
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Publishing:
    """One location to publish; see MetadataStore.publish_many."""

    record: Record
    location: Location
    ttl_seconds: float
    claim_token: str | None = None
    sole: bool = False
    """Only one node may hold this key: see MetadataStore.publish_many."""
    device: DeviceLocation | None = None
    """The same bytes on the device of one of the node's processes. None removes an existing device
    location of the node.
    """

    def check(self) -> None:
        """Raise ValueError unless the store may hold this publication."""
        self.record.check()
        self.location.check()
        if self.device is not None:
            self.device.check()


class GoneReason(StrEnum):
    """Why a copy was removed; see docs/redis-keys.md. Other versions may have more reasons."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    TAKEN = "taken"
    RETRACTED = "retracted"
    """A hand-off whose producer gave up waiting for admission."""
    STALE = "stale"
    """The record named a copy that was not there."""
    OWNER_DEAD = "owner_dead"
    INVALIDATED = "invalidated"
    """Its whole namespace was invalidated."""
    ELSEWHERE = "elsewhere"
    """A hand-off that another node holds under the same key."""
    GONE = "gone"
    """None of these reasons."""


GONE_SECONDS = 3600
"""Default life of a tombstone: for so long the store can say why a key's last copy was removed."""


@dataclass(frozen=True, slots=True)
class Withdrawing:
    """One location to remove; see MetadataStore.withdraw_many."""

    namespace: str
    key: str
    node: str
    reason: str
    exactly: Location | None = None
    gone_seconds: int = GONE_SECONDS
    may_have_ended: bool = False
    """Store the reason even if there is no record, which may have expired."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed fetch; see MetadataStore.note_failures."""

    namespace: str
    key: str
    reason: str
    holder: str
    """The node that should have sent the bytes."""
    reader: str
    """The node that requested them."""


@dataclass(frozen=True, slots=True)
class Releasing:
    """One claim to release; see MetadataStore.release_many."""

    namespace: str
    key: str
    token: str


NODES_MAX = 16_384
"""Nodes that a store lists at most. Who can write it may add any number."""
INVALIDATIONS_MAX = 16_384
"""The same of invalidated namespaces."""
COUNTER_MAX = 2**63 - 1
"""What a counter is at most: it stays there. Servers, and messages, have integers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Invalidation:
    """The mark of an invalidated namespace.

    Nodes heed each `id` once. So a mark that a snapshot brings back removes nothing again, and none
    hides a later one, whatever its time.
    """

    id: str
    """16 random hex digits."""
    at: int
    """The wall clock of who set it, in seconds since 1970: only for nodes that have just started,
    and for people."""

    @property
    def text(self) -> str:
        """The stored form."""
        return f"{self.id}:{self.at}"

    @classmethod
    def parse(cls, text: str) -> "Invalidation":
        """The reverse of `text`. Raises ValueError for other text."""
        match = _INVALIDATION.match(text)
        if not match:
            raise ValueError("not a mark of an invalidation: 16 hex digits and a time are allowed")
        return cls(match[1], int(match[2]))

    def check(self) -> None:
        """Raise ValueError unless the store may hold this mark."""
        self.parse(self.text)


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's heartbeat. A node is alive while `sequence` changes, by the observer's own clock."""

    boot: str
    sequence: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's own description: `endpoint` and `pools` for other nodes, the rest for people."""

    node: str
    boot: str
    endpoint: str
    host: str
    version: str
    capacity_bytes: int
    used_bytes: int
    items: int
    claims: int | None = None
    """How many claims its engines hold; None from an older version that does not report it."""
    pools: tuple[PoolEndpoint, ...] = ()
    """Device pools that other nodes may read; an older version reports none."""

    def check(self) -> None:
        """Raise ValueError unless the store may hold this description."""
        check_node(self.node, self.boot)
        if len(self.pools) > POOLS_MAX:
            raise ValueError(f"{len(self.pools)} pools: at most {POOLS_MAX} are allowed")
        for pool in self.pools:
            PoolEndpoint.parse(pool.text)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server behind a store. `maxmemory_bytes` is 0 if it has no limit."""

    product: str
    version: str
    maxmemory_bytes: int
    used_memory_bytes: int
    policy: str
    mode: str


Address = tuple[str, str]
"""(namespace, key)."""


class Claim(NamedTuple):
    """The claim of a key: its holder will produce it (intent) or is producing it (encoding)."""

    holder: str
    state: ClaimState
    remaining_seconds: float


class Gone(NamedTuple):
    """Why the last copy was removed; `node` is empty if an older version wrote it."""

    reason: str
    node: str
    remaining_seconds: float
    """Until the tombstone expires."""


class Trace(NamedTuple):
    """Everything that is stored about one key in one namespace."""

    namespace: str
    key: str
    record: Record | None = None
    unreadable: str = ""
    """Why readers of this version miss the value under the record's name; empty if they can read
    it.
    """
    record_remaining_seconds: float = 0.0
    claim: Claim | None = None
    gone: Gone | None = None
    failure: Failure | None = None
    failed_seconds_ago: float = 0.0
    hits: int = 0

    @property
    def is_empty(self) -> bool:
        return self == Trace(self.namespace, self.key)


class Departure(NamedTuple):
    """What is known of a node that no longer beats."""

    reason: str
    """`stopped` or `died`; empty if no node removed it within the last day."""
    boot: str
    seconds_ago: float
    silent_seconds: float | None
    """Since it last described itself; None if not within the last day."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Commands that a server refuses to us, and its reply to the first of them."""

    commands: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Examined:
    """How many records were read, and by key name why readers of this version miss some of them."""

    looked_at: int
    unreadable: Mapping[str, str]
