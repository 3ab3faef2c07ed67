"""What the operations of a store answer with, apart from records."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from store.record import POOLS_MAX, DeviceLocation, Location, PoolEndpoint, Record, check_node


class Publication(Enum):
    """What became of a publication. Only CONFLICT means that the bytes differ from the record's."""

    ADDED = "added"
    """The location is new, or it took the place of an older one of the same node."""
    PRESENT = "present"
    """This location, or a newer one of the same boot, was there; the record lives on."""
    FULL = "full"
    """Enough other nodes hold it: the location was not added, and nothing was renewed."""
    CONFLICT = "conflict"
    """The record has another dtype, shape, size or kind, or belongs to another key."""
    OWNED = "owned"
    """Another node has it, and this is something that only one may have: nothing changed."""
    REFUSED = "refused"
    """The server is out of memory and may evict nothing: not stored."""
    UNREACHED = "unreached"
    """The server that this key lies on was not reached, while others were: to be repeated."""


class ClaimState(Enum):
    """How far the holder of a claim has come."""

    INTENT = "intent"
    """It means to produce the key soon. Such a claim cannot be renewed, only become the next."""
    ENCODING = "encoding"
    """It is at work. Renewed by asking again, on signs of progress and never by a bare timer."""


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Who may produce the key now. `holder` and `state` are the caller's own where `granted`.

    `record` is the key's record as it stood right after the claim was decided, so that a claim
    granted just after the previous holder published does not lead to a second encode.
    """

    granted: bool
    holder: str
    state: ClaimState
    remaining_seconds: float
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Claiming:
    """One asking for a claim; see MetadataStore.claim."""

    namespace: str
    key: str
    holder: str
    token: str
    state: ClaimState
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Publishing:
    """One copy to be made known; see MetadataStore.publish_many."""

    record: Record
    location: Location
    ttl_seconds: float
    claim_token: str | None = None
    sole: bool = False
    """Only one node may have this key: see MetadataStore.publish_many."""
    device: DeviceLocation | None = None
    """Where a process of the node has the same bytes on its device; None takes away what there was
    beside this location."""

    def check(self) -> None:
        """Raise ValueError unless the store may hold this."""
        self.record.check()
        self.location.check()
        if self.device is not None:
            self.device.check()


class GoneReason(StrEnum):
    """Why a copy went, as docs/redis-keys.md has it. Other versions may have more."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    TAKEN = "taken"
    RETRACTED = "retracted"
    """A hand-off whose producer gave up waiting for room."""
    STALE = "stale"
    """The store named a copy that was not there."""
    OWNER_DEAD = "owner dead"
    INVALIDATED = "invalidated"
    """Its whole namespace was given up."""
    ELSEWHERE = "elsewhere"
    """A hand-off that another node has under the same key."""
    GONE = "gone"
    """For none of these reasons."""


GONE_SECONDS = 3600
"""How long it is told why the last copy of a key went, unless it is said otherwise."""


@dataclass(frozen=True, slots=True)
class Withdrawing:
    """One copy that is no more; see MetadataStore.withdraw_many."""

    namespace: str
    key: str
    node: str
    reason: str
    exactly: Location | None = None
    gone_seconds: int = GONE_SECONDS
    may_have_ended: bool = False
    """Whether the reason is kept as well where no record stands: it may have ended by itself."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A fetch that came to nothing; see MetadataStore.note_failures."""

    namespace: str
    key: str
    reason: str
    holder: str
    """The node that was asked."""
    reader: str
    """The node that asked."""


@dataclass(frozen=True, slots=True)
class Releasing:
    """One claim to be given back; see MetadataStore.release_many."""

    namespace: str
    key: str
    token: str


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's sign of life. It lives while `sequence` moves, seen by the observer's own clock."""

    boot: str
    sequence: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself, for its peers (`endpoint`) and for people (the rest)."""

    node: str
    boot: str
    endpoint: str
    host: str
    version: str
    capacity_bytes: int
    used_bytes: int
    items: int
    claims: int | None = None
    """How many its engines have; None where an older version does not say."""
    pools: tuple[PoolEndpoint, ...] = ()
    """From which others may take; an older version names none."""

    def check(self) -> None:
        """Raise ValueError unless the store may hold this."""
        check_node(self.node, self.boot)
        if len(self.pools) > POOLS_MAX:
            raise ValueError(f"a node names at most {POOLS_MAX} pools")
        for pool in self.pools:
            PoolEndpoint.parse(pool.text)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server behind a store. `maxmemory_bytes` 0 means that it sets itself no limit."""

    product: str
    version: str
    maxmemory_bytes: int
    used_memory_bytes: int
    policy: str
    mode: str
