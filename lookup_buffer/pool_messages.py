"""What a process that has a pool on a device says to its node, and the other way round.

Requests as in `messages`, all one-way. The node answers on the anchor of the pool's session:

    receive     id (a ticket), namespace, key, header, seconds, sources: bring it into the pool and
                hold it under the ticket; say `Received`
    pools       there: other nodes' processes' pools that are new, each as the fields of a
                `SeenPool`; gone: ids of those that it was told of and that are no more. So that a
                pair can be made before anything is wanted
    let_go      tickets: these are held no longer, and what is still on its way is not wanted;
                keys: [namespace, key] of copies of the node that are no more, so that what is
                beside them in the pool is not either
"""

from dataclasses import dataclass
from typing import NamedTuple

from lookup_buffer.request import DeskRequest


class SeenPool(NamedTuple):
    """A pool of another node's process, and how it is reached."""

    host: str
    lane: str
    library: str
    port: int
    pool: str


@dataclass(frozen=True, slots=True)
class OpenPool(DeskRequest):
    """This session has a pool, which others reach by a `lane` at `port` of this host.

    It holds `pool_bytes` at most. Of one that `receives` nothing nothing is asked, and one that
    `offers` nothing is named to nobody.
    """

    op = "open_pool"
    lane: str
    library: str
    port: int
    pool: str
    pool_bytes: int
    receives: bool
    offers: bool


@dataclass(frozen=True, slots=True)
class Prepare(DeskRequest):
    """The pool holds as its entry `mark` what this client is about to insert under `key`, so that
    it is published with the copy: who waits for that is told of both. Followed by `Offer`, where
    it was stored, or by `Retract`."""

    op = "prepare"
    namespace: str
    key: str
    mark: int


@dataclass(frozen=True, slots=True)
class Offer(DeskRequest):
    """The pool holds, as its entry `mark`, what was stored under `key` with this checksum. Where
    the node has it no more, or other bytes of another producer, it says `let_go`."""

    op = "offer"
    namespace: str
    key: str
    mark: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Retract(DeskRequest):
    """The pool holds these no more."""

    op = "retract"
    namespace: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Received(DeskRequest):
    """What the node asked for by `ticket` is held by the pool, or why not (see `lane.Fallback`).
    `source` says which one of the sources it came from, counted from 1; 0: the pool had it."""

    op = "received"
    ticket: int
    reason: str
    source: int
