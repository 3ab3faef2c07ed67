"""What the operations of a store answer with, apart from records."""

from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Who may produce the key now. `holder` is the caller's own where `granted`."""

    granted: bool
    holder: str
    remaining_seconds: float


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


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server behind a store. `maxmemory_bytes` 0 means that it sets itself no limit."""

    product: str
    version: str
    maxmemory_bytes: int
    used_memory_bytes: int
    policy: str
    mode: str
