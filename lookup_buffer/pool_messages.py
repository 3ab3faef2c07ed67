"""What a process that has a pool on a device says to its node, and the other way round.

Requests as in `messages`, all one-way. The node answers on the anchor of the pool's session:

    receive     id (a ticket), namespace, key, header, seconds, sources: bring it into the pool and
                hold it under the ticket; say `Received`
    let_go      tickets: these are held no longer, and what is still on its way is not wanted;
                keys: [namespace, key] of copies of the node that are no more, so that what is
                beside them in the pool is not either
"""

from dataclasses import dataclass

from lookup_buffer.request import DeskRequest


@dataclass(frozen=True, slots=True)
class OpenPool(DeskRequest):
    """This session has a pool, which others reach by a `lane` at `port` of this host."""

    op = "open_pool"
    lane: str
    library: str
    port: int
    pool: str


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
    """The pool holds the bytes of the copy that the node has of `key`, as its entry `mark`."""

    op = "offer"
    namespace: str
    key: str
    mark: int


@dataclass(frozen=True, slots=True)
class Retract(DeskRequest):
    """The pool holds these no more."""

    op = "retract"
    namespace: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Received(DeskRequest):
    """What the node asked for by `ticket` is held by the pool, or why not (see `lane.FALLBACKS`).
    `source` says which one of the sources it came from, counted from 1; 0: the pool had it."""

    op = "received"
    ticket: int
    reason: str
    source: int
