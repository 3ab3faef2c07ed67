"""The messages between a client and its node over the unix socket: one class per request.

Requests are header-only frames (see `framing`): a map with `op`, the number `id` that the reply
repeats, and the fields below. `parse` validates every request from outside; see `fields` for the
checks. Replies carry `id` and the fields after "→" in each docstring, or `error` (a class of
`lookup_buffer.errors`) and `message`. Requests marked *one-way* get no reply. The node answers
`Prefetch` and `ClaimAll` by events on the session's main connection (the first), so that their
caller need not wait. Tensor bytes never cross the socket: they are in shared memory. The last
requests, from `OpenPool` on, concern device pools; how lanes (transfers between the devices of two
processes) move their bytes belongs to `device`. Pure data and functions; any thread; no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from lookup_buffer.errors import ProtocolError
from lookup_buffer.protocol.fields import CHECKS, REPLY_CHECKS, is_count

VERSION: Final = 13


class InsertOutcome(Enum):
    STORED = "stored"
    EXISTS = "exists"
    """The key already existed; shared content never changes, so nothing was done. For a hand-off:
    another node holds one under that key that is not taken yet; this one was dropped."""


class ClaimOutcome(StrEnum):
    """The outcome of a claim or of a set of claims; the values are those in messages.

    The store decides only between GRANTED and HELD (`store.ClaimAnswer.granted`). The node adds
    STORED, because it has the list of live nodes.
    """

    GRANTED = "granted"
    """This client may produce the key, until the lease ends. For a set: it has all claims, as
    intents of a second at most."""
    HELD = "held"
    """Another engine, `holder`, has the claim. For a set: it has no claim, because `holder` had
    `key` until the end of the wait."""
    STORED = "stored"
    """No production is needed: a live node holds a complete copy. For a set: it has no claim,
    because a live node holds `key`; look the keys up again."""
    PENDING = "waiting"
    """Only for a set: not answered yet, or waiting for claims that others hold."""
    FAILED = "refused"
    """Only for a set: the node refused it, or did not answer."""


class Reached(StrEnum):
    """What became of an attempt to reach a node at the address that it advertises.

    yes            it answered there with its proof, and EXCHANGED_BYTES went each way
    refused        nothing listens there
    no_route       its host has no route there
    no_address     the address cannot be resolved
    timed_out      no connection in time, or no handshake over it
    broken         the connection was made, and ended before the handshake
    stranger       what listens there does not speak the protocol of nodes
    other          a node is there that refuses: another one, or one with another token or version
    stuck_there    after the handshake, large frames do not arrive at it
    stuck_back     large frames arrive at it, and its own do not arrive at the dialler
    cut            it does not reach the node that was to dial it, so that one could not be asked

    And why it was not tried, or not to its end:

    old            a node of an older protocol, which cannot exchange these frames
    unknown        the other node is not alive, as far as is known there
    unasked        the node that was to be asked could not be
    busy           it has too many such requests
    """

    YES = "yes"
    REFUSED = "refused"
    NO_ROUTE = "no_route"
    NO_ADDRESS = "no_address"
    TIMED_OUT = "timed_out"
    BROKEN = "broken"
    STRANGER = "stranger"
    OTHER = "other"
    STUCK_THERE = "stuck_there"
    STUCK_BACK = "stuck_back"
    CUT = "cut"
    OLD = "old"
    UNKNOWN = "unknown"
    UNASKED = "unasked"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Request:
    op: ClassVar[str]
    id: int

    def to_wire(self) -> dict[str, Any]:
        return {"op": self.op} | {name: getattr(self, name) for name in field_names(type(self))}


_names: Final[dict[type[Request], tuple[str, ...]]] = {}


def field_names(kind: type[Request]) -> tuple[str, ...]:
    """The field names of a kind of request, in their order."""
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(item.name for item in fields(kind))
    return names


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """Open a session. → session, node, boot, arena_bytes, and the descriptors of the arena, the
    local index and the remote index.

    `seat` is [engine id, rank or None for the scheduler, world size, whether each tensor read saves
    it an encode, its device], or None for a client outside an engine. `expects` holds the values
    that must be equal in the configurations of client and node (capacity, store, and whether they
    only read). A node with other values refuses the session; its error names both.
    """

    op = "hello"
    version: int
    seat: list[Any] | None
    expects: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Join(Request):
    """Add a connection to an open session. → nothing."""

    op = "join"
    session: int


@dataclass(frozen=True, slots=True)
class Stage(Request):
    """Set the staging area of this connection; its descriptor is sent with the frame. Not while an
    `Insert` of the connection is not answered. → nothing."""

    op = "stage"


@dataclass(frozen=True, slots=True)
class Contains(Request):
    """→ present: list of booleans, False for keys still unknown after `budget_seconds`. None: after
    the time in which the node's store usually answers, at most LOOK_UP_SECONDS_MAX."""

    op = "contains"
    namespace: str
    keys: list[str]
    budget_seconds: float | None


@dataclass(frozen=True, slots=True)
class Insert(Request):
    """Insert tensors, whose bytes begin at `offsets` in this connection's staging area. → results:
    for each, `outcome` stored (and the `checksum` of the bytes) or exists; or an error's fields.

    A hand-off without room waits for room, for at most `wait_seconds`.
    """

    op = "insert"
    namespace: str
    keys: list[str]
    headers: list[dict[str, Any]]
    offsets: list[int]
    ttl_seconds: float | None
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Select(Request):
    """→ ticket, offset, generation, header, source; or state: missing, and the reason.

    During a transfer from another node, interim replies announce its bytes as `fetching`, every
    TRANSFER_TOLD_SECONDS.
    """

    op = "select"
    namespace: str
    key: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Take(Request):
    """Take a hand-off. → as for `Select`, with token and lease_seconds: the client acknowledges it
    or gives it back within that time.

    From node to node → token, lease_seconds, generation and checksum, with state leased, or state
    absent. While another taker has the lease, and `wait_seconds` last, that reply comes later, or
    upon `Leave`.
    """

    op = "take"
    namespace: str
    key: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Acknowledge(Request):
    """The taker has the bytes. → won: whether the lease was still valid. In either case the client
    releases the ticket."""

    op = "acknowledge"
    token: int


@dataclass(frozen=True, slots=True)
class GiveBack(Request):
    """One-way. The taker ends its lease without taking the hand-off."""

    op = "give_back"
    token: int


@dataclass(frozen=True, slots=True)
class Leave(Request):
    """One-way, from node to node. Ends the wait of the `Take` with this id."""

    op = "leave"
    take: int


@dataclass(frozen=True, slots=True)
class Holds(Request):
    """From node to node → state: present if the node has that hand-off, leased or not, else
    absent."""

    op = "holds"
    namespace: str
    key: str


@dataclass(frozen=True, slots=True)
class Prefetch(Request):
    """One-way. Answered by `settled` events on the main connection: `entries` of [index of the key,
    entry], an entry as for `Select`. An entry with state pending is followed by another event.

    A shared key that no node holds is waited for, up to `wait_seconds`, until it is published. If
    `claimer` is not 0, the request is also a `ClaimAll` of that id, for the same keys, in any
    order; then the claims wait, not the prefetch."""

    op = "prefetch"
    namespace: str
    keys: list[str]
    claimer: int
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class EndPrefetch(Request):
    """One-way. The client has released the handles of the keys at `indexes` of the `Prefetch` whose
    id is `prefetch`, which had not settled as far as it knows: they get no more events, and are no
    longer waited for. Tickets of events that were sent before it releases by `Release`."""

    op = "end_prefetch"
    prefetch: int
    indexes: list[int]


@dataclass(frozen=True, slots=True)
class Release(Request):
    """One-way. The client releases these tickets."""

    op = "release"
    tickets: list[int]


@dataclass(frozen=True, slots=True)
class Touch(Request):
    """One-way. How often the client read each key through the local index. The node counts hits,
    and the time of each item's last use."""

    op = "touch"
    namespace: str
    reads: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done(Request):
    """One-way. This rank has copied the bytes of these tickets."""

    op = "done"
    tickets: list[int]
    rank: int


@dataclass(frozen=True, slots=True)
class Claim(Request):
    """→ outcome (a `ClaimOutcome`): granted, held (by another: holder, state, remaining_seconds)
    or stored (a live node holds the key). While it is held the reply waits, at most `wait_seconds`.

    `state` is intent or encoding. The claim ends with the session at the latest.
    """

    op = "claim"
    namespace: str
    key: str
    lease_seconds: float
    state: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseClaim(Request):
    """→ released."""

    op = "release_claim"
    namespace: str
    key: str


@dataclass(frozen=True, slots=True)
class ClaimAll(Request):
    """One-way: claim all of `keys`, in their order, or none, as intents. Answered by `claimed`
    events on the main connection: `outcome` granted, stored (a live node holds `key`), held (by
    `holder`, until the end of the wait) or refused; before that, at most once, waiting (`holder`
    has `key`)."""

    op = "claim_all"
    namespace: str
    keys: list[str]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Encoding(Request):
    """One-way. The client is producing `keys`, and claims them for `lease_seconds` from now."""

    op = "encoding"
    namespace: str
    keys: list[str]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Unclaim(Request):
    """One-way. Ends the wait of the `ClaimAll` whose id is `waiter`, and gives back `keys`."""

    op = "unclaim"
    namespace: str
    keys: list[str]
    waiter: int


@dataclass(frozen=True, slots=True)
class Describe(Request):
    """One-way. The clear text of a namespace, which the node publishes."""

    op = "describe"
    namespace: str
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reach(Request):
    """Have node `dialler` dial node `node` at its advertised address. One of them may be this node.
    → outcome (a `Reached`), detail (of the outcome, for people).

    If `dialler` is not this node, `node` itself asks it to, upon this node's request: no node
    dials anything but the address of who asks.
    """

    op = "reach"
    dialler: str
    node: str


@dataclass(frozen=True, slots=True)
class AskDialBack(Request):
    """From node to node. Ask node `dialler` by a `DialBack`. → outcome, detail, as for `Reach`."""

    op = "ask_dial_back"
    dialler: str


@dataclass(frozen=True, slots=True)
class DialBack(Request):
    """From node to node. Dial me, the `boot` of `node`, at the address of its membership record.
    → outcome, detail, as for `Reach`."""

    op = "dial_back"
    node: str
    boot: str


@dataclass(frozen=True, slots=True)
class Exchange(Request):
    """From node to node. → nothing, at once; then the same `data`."""

    op = "exchange"
    data: bytes


@dataclass(frozen=True, slots=True)
class Stats(Request):
    """→ stats: gauges and counters of the node."""

    op = "stats"


@dataclass(frozen=True, slots=True)
class Metrics(Request):
    """Needs no session. → values (gauges and counters by name), histograms (name → [cumulative
    counts, sum in seconds]), unhealthy (why; "" if healthy)."""

    op = "metrics"


@dataclass(frozen=True, slots=True)
class Goodbye(Request):
    """One-way. End the session now: its pins are released at once."""

    op = "goodbye"


class SeenPool(NamedTuple):
    """A device pool of another node's process, and its address."""

    host: str
    lane: str
    library: str
    port: int
    pool: str


@dataclass(frozen=True, slots=True)
class OpenPool(Request):
    """One-way. This session has a device pool of at most `pool_bytes`, which a `lane` reaches at
    `port` of this host.

    Without `receives` the node sends it no `receive` event. Without `offers` the node does not
    announce it to others. The node's events for the pool, on the session's main connection:

    receive     id (a ticket), namespace, key, header, seconds, sources: receive it into the pool,
                hold it under the ticket, and send `Received`
    pools       there: new pools of other nodes' processes, each as the fields of a `SeenPool`;
                gone: ids of announced pools that no longer exist. With these, pairs can be set
                up before the first transfer
    let_go      tickets: release these, and cancel those in flight; keys: [namespace, key] of copies
                that the node no longer has: remove the pool's entries
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
class Prepare(Request):
    """One-way. The pool's entry `mark` holds the tensor that this client is about to insert under
    `key`. Copy and entry are published together, so that waiters get both locations. Followed by
    `Offer` if the insert stored the tensor, else by `Retract`."""

    op = "prepare"
    namespace: str
    key: str
    mark: int


@dataclass(frozen=True, slots=True)
class Offer(Request):
    """One-way. The pool's entry `mark` holds the tensor stored under `key` with this checksum. If
    the node no longer has it, or has other bytes of another producer, it sends `let_go`."""

    op = "offer"
    namespace: str
    key: str
    mark: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Retract(Request):
    """One-way. The pool no longer holds these."""

    op = "retract"
    namespace: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Received(Request):
    """One-way. The pool holds the tensor of `ticket`, or `reason` gives the cause (see `Fallback`).
    `source` is the number of the source that sent it, counted from 1; 0 if the pool already had
    it."""

    op = "received"
    ticket: int
    reason: str
    source: int


class OwnerReply(NamedTuple):
    """The owner node's reply to another node: `leased` or `absent` to a `Take`, `won` or `lost` to
    an `Acknowledge`, `present` or `absent` to a `Holds`.

    Or the fate of the request, which is never sent: `gone`, another boot replaced the owner, so
    there will never be a reply; `unreached`, the owner may or may not have received it.
    """

    state: str
    token: int = 0
    lease_seconds: float = 0.0
    generation: int = 0
    checksum: int = 0
    nbytes: int = 0

    @classmethod
    def parse(cls, message: object) -> tuple[int, "OwnerReply"]:
        """(number of the request, reply) from a decoded frame.

        Raises:
            ProtocolError: it is not a valid reply.
        """
        if isinstance(message, dict) and is_count(message.get("id")):
            reply = cls(*(message.get(name, 0) for name in cls._fields))
            if all(check(value) for check, value in zip(REPLY_CHECKS, reply, strict=True)):
                return message["id"], reply
        raise ProtocolError("the message is not an owner's reply")


def parse(message: object) -> Request:
    """The request in a decoded frame.

    Raises:
        ProtocolError: unknown request, or a field is missing, unknown, or of a wrong type or size.
    """
    if not isinstance(message, dict):
        raise ProtocolError("bad request: not a map")
    op = message.get("op")
    kind = _KINDS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise ProtocolError("bad request: unknown op")
    names = field_names(kind)
    if len(message) != len(names) + 1:
        raise ProtocolError(f"bad request: {op} takes {', '.join(names)}")
    values = []
    for name in names:
        value = message.get(name, _ABSENT)
        if not CHECKS[name](value):
            raise ProtocolError(f"bad request: {op} with a bad {name}")
        values.append(value)
    return kind(*values)


def hello_of_another_version(message: object) -> tuple[int, int] | None:
    """(id, version) of a `Hello` of another version, whatever its other fields; else None."""
    if isinstance(message, dict) and message.get("op") == Hello.op:
        number, version = message.get("id"), message.get("version")
        if is_count(number) and is_count(version) and version != VERSION:
            return number, version  # type: ignore[return-value]
    return None


def error_reply(request_id: int, error: Exception) -> dict[str, Any]:
    """The reply that makes the client raise `error`."""
    return {"id": request_id, **error_fields(error)}


def error_fields(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)}


CHANGES: Final = (Insert, Take, Claim, Encoding, OpenPool, Prepare, Offer)
"""The requests that change what others find. A node that only reads refuses them, and answers a
`ClaimAll` by refused."""
_ABSENT = object()
_KINDS: Final[Mapping[str, type[Request]]] = {
    kind.op: kind
    for kind in (
        Hello, Join, Stage, Contains, Insert, Select, Take, Acknowledge, GiveBack, Leave, Holds,
        Prefetch, EndPrefetch, Release, Touch, Done, Claim, ReleaseClaim, ClaimAll, Encoding,
        Unclaim, Describe, Reach, AskDialBack, DialBack, Exchange, Stats, Metrics, Goodbye,
        OpenPool, Prepare, Offer, Retract, Received,
    )
}  # fmt: skip
