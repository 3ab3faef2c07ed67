"""The messages between a client and its node over the unix socket: one class per request.

Requests are header-only frames (see `framing`): a map with `op`, the number `id` that the reply
repeats, and the fields below. `parse` validates every request from outside; `CHECKS` has one check
per field name, so a name means the same in every request. Replies carry `id` and the fields after
"→" in each docstring, or `error` (a class of `lookup_buffer.errors`) and `message`. Requests marked
*one-way* get no reply. The node answers `Prefetch` and `ClaimAll` by events on the session's main
connection (the first), so that their caller need not wait. Tensor bytes never cross the socket:
they are in shared memory. Pure data and functions; any thread. No I/O; how lanes (transfers between
the devices of two processes) move bytes belongs to `device`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, ClassVar, Final, Literal, NamedTuple

from lookup_buffer.errors import ConfigError, ProtocolError
from store import DEVICE, LOCATIONS_MAX, ClaimState

LANES: Final = ("gloo", "nccl")


class Fallback(StrEnum):
    """Why a transfer that could have used a lane went over the hosts:

    cold, abandoned     no communicator with that pool yet; or it failed, and is not retried yet
    version             the remote end has another kind of lane, or another version of its library
    stale               the pool no longer holds the tensor
    checksum            the received bytes differ from the record's checksum
    peer_failed         the remote process died, closed, or broke off
    timeout             the bytes did not arrive in the given time
    no_room, device     no room in the pool now, or ever; or the device had none, or failed
    busy, ended         too many transfers in flight; the receiving process has ended
    """

    COLD = "cold"
    ABANDONED = "abandoned"
    VERSION = "version"
    STALE = "stale"
    CHECKSUM = "checksum"
    PEER_FAILED = "peer_failed"
    TIMEOUT = "timeout"
    NO_ROOM = "no_room"
    DEVICE = "device"
    BUSY = "busy"
    ENDED = "ended"


MaybeFallback = Fallback | Literal[""]
"""Empty: the transfer uses the lane."""


KEYS_MAX: Final = 4096
"""Bound on the keys or tickets of one request."""
KEYS_BYTES_MAX: Final = 256 << 10
"""Bound on the total size of the keys of one request, which `split` keeps; a frame may hold four
times as much."""
COUNT_MAX: Final = (1 << 31) - 1
"""Bound on the hits of a key in one request: no sum of them overflows a counter."""
TEXT_MAX: Final = 4096
PARTS_MAX: Final = 256
"""Bound on the entries of a map: parts of a namespace, a client's `expects`, a header."""
SECONDS_MAX: Final = 86_400.0


def is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_MAX


def is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= SECONDS_MAX  # excludes infinity and NaN


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list) and len(value) <= KEYS_MAX and all(map(check, value))
    )


def _is_small_map(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= PARTS_MAX and all(map(_is_text, value))


def _is_reads(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > KEYS_MAX or not all(map(_is_text, value)):
        return False
    return all(is_count(count) and 0 < count <= COUNT_MAX for count in value.values())


def _is_seat(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 5:
        return False
    engine_id, rank, world_size, encodes, device = value
    in_world = is_count(world_size) and 0 < world_size <= 4096
    if not _is_text(engine_id) or not in_world or not isinstance(encodes, bool):
        return False
    if not isinstance(device, str) or (device and not DEVICE.match(device)):
        return False
    return rank is None or (is_count(rank) and rank < world_size)


def is_parts(value: object) -> bool:
    """Whether these are valid parts of a namespace."""
    return _is_small_map(value) and all(isinstance(part, str) for part in value.values())  # type: ignore[attr-defined]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LIBRARY, _POOL = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{12}")
_CLAIM_STATES = [
    state.value for state in ClaimState
]  # a list: the value to check may be unhashable
CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "id": is_count,
    "version": is_count,
    "seat": _is_seat,
    "expects": _is_small_map,
    "session": is_count,
    "namespace": is_fingerprint,
    "key": _is_text,
    "keys": _list_of(_is_text),
    "budget_seconds": is_seconds,
    "header": _is_small_map,
    "ttl_seconds": lambda value: value is None or is_seconds(value),
    "wait_seconds": is_seconds,
    "lease_seconds": is_seconds,
    "state": _CLAIM_STATES.__contains__,
    "waiter": is_count,
    "claimer": is_count,
    "tickets": _list_of(is_count),
    "reads": _is_reads,
    "token": is_count,
    "take": is_count,
    "rank": is_count,
    "parts": is_parts,
    "lane": LANES.__contains__,
    "library": lambda value: isinstance(value, str) and _LIBRARY.fullmatch(value) is not None,
    "port": lambda value: is_count(value) and 0 < value < 1 << 16,
    "pool": lambda value: isinstance(value, str) and _POOL.fullmatch(value) is not None,
    "pool_bytes": is_count,
    "receives": lambda value: isinstance(value, bool),
    "offers": lambda value: isinstance(value, bool),
    "checksum": lambda value: type(value) is int and 0 <= value < 1 << 64,
    "mark": lambda value: is_count(value) and 0 < value < 1 << 53,
    "ticket": is_count,
    "reason": ("", *Fallback).__contains__,
    "source": lambda value: is_count(value) and value <= LOCATIONS_MAX,
}


@dataclass(frozen=True, slots=True)
class Request:
    op: ClassVar[str]
    id: int

    def to_wire(self) -> dict[str, Any]:
        return {"op": self.op} | {name: getattr(self, name) for name in names_of(type(self))}


class SessionRequest(Request):
    """A request that the node's dispatch handles within an open session."""

    __slots__ = ()


_names: Final[dict[type[Request], tuple[str, ...]]] = {}


def names_of(kind: type[Request]) -> tuple[str, ...]:
    """The field names of a kind of request, in their order."""
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(item.name for item in fields(kind))
    return names


class SeenPool(NamedTuple):
    """A device pool of another node's process, and its address."""

    host: str
    lane: str
    library: str
    port: int
    pool: str


@dataclass(frozen=True, slots=True)
class OpenPool(SessionRequest):
    """One-way. This session has a device pool, reachable by a `lane` at `port` of this host.

    It holds at most `pool_bytes`. Without `receives` the node sends it no `receive`. Without
    `offers` the node does not announce it to others. The node's events for the pool, on the
    session's main connection:

    receive     id (a ticket), namespace, key, header, seconds, sources: receive it into the pool,
                hold it under the ticket, and send `Received`
    pools       there: new pools of other nodes' processes, each as the fields of a `SeenPool`;
                gone: ids of announced pools that no longer exist. With these, pairs can be set
                up before the first transfer
    let_go      tickets: stop holding these, and cancel those still in transit; keys:
                [namespace, key] of copies that the node no longer has: drop the pool's entries
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
class Prepare(SessionRequest):
    """One-way. The pool's entry `mark` holds the tensor that this client is about to insert under
    `key`. It is published with the copy, so that waiters learn of both. Followed by `Offer` if the
    insert stored the tensor, else by `Retract`."""

    op = "prepare"
    namespace: str
    key: str
    mark: int


@dataclass(frozen=True, slots=True)
class Offer(SessionRequest):
    """One-way. The pool's entry `mark` holds the tensor stored under `key` with this checksum. If
    the node no longer has it, or has other bytes of another producer, it sends `let_go`."""

    op = "offer"
    namespace: str
    key: str
    mark: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Retract(SessionRequest):
    """One-way. The pool no longer holds these."""

    op = "retract"
    namespace: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class Received(SessionRequest):
    """One-way. The pool holds the tensor of `ticket`, or `reason` says why not (see `Fallback`).
    `source` is the number of the source that sent it, counted from 1; 0: the pool already had
    it."""

    op = "received"
    ticket: int
    reason: str
    source: int


VERSION: Final = 8


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """Open a session. → session, node, boot, arena_bytes, and the descriptors of the arena, the
    local index and the remote index.

    `seat` is [engine id, rank or None for the scheduler, world size, whether each tensor read saves
    it an encode, its device], or None for a client that is no engine. `expects` holds the values
    that the client's configuration expects of the node (capacity, store, digest of the token). A
    node with other values refuses the session; its error names both.
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
    """Set the staging area of this connection; its descriptor is sent with the frame. → nothing."""

    op = "stage"


@dataclass(frozen=True, slots=True)
class Contains(SessionRequest):
    """→ present: list of booleans, False for keys still unknown after `budget_seconds`."""

    op = "contains"
    namespace: str
    keys: list[str]
    budget_seconds: float


@dataclass(frozen=True, slots=True)
class Insert(SessionRequest):
    """Insert the first bytes of this connection's staging area. → outcome: stored or exists;
    and the `checksum` of the stored bytes.

    A hand-off without room waits for room, for at most `wait_seconds`.
    """

    op = "insert"
    namespace: str
    key: str
    header: dict[str, Any]
    ttl_seconds: float | None
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Select(SessionRequest):
    """→ ticket, offset, generation, header, source; or state: missing, and the reason.

    During a transfer from another node, an interim reply announces its bytes as `fetching`.
    """

    op = "select"
    namespace: str
    key: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Take(SessionRequest):
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
class Acknowledge(SessionRequest):
    """The hand-off arrived. → won: whether the lease was still valid. Its ticket is released in
    either case."""

    op = "acknowledge"
    token: int


@dataclass(frozen=True, slots=True)
class GiveBack(SessionRequest):
    """One-way. The taker gives the hand-off back without taking it."""

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
class Prefetch(SessionRequest):
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
class Release(SessionRequest):
    """One-way. The client releases these tickets."""

    op = "release"
    tickets: list[int]


@dataclass(frozen=True, slots=True)
class Touch(SessionRequest):
    """One-way. How often the client read each key through the local index: hits, and uses."""

    op = "touch"
    namespace: str
    reads: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done(SessionRequest):
    """One-way. This rank has made its copies."""

    op = "done"
    tickets: list[int]
    rank: int


@dataclass(frozen=True, slots=True)
class Claim(SessionRequest):
    """→ outcome (a `ClaimOutcome`): granted, held (by another: holder, state, remaining_seconds)
    or stored (a live node holds the key). While it is held the reply waits, at most `wait_seconds`.

    `state` is the client's stage: intent or encoding. The claim ends with the session at the
    latest.
    """

    op = "claim"
    namespace: str
    key: str
    lease_seconds: float
    state: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseClaim(SessionRequest):
    """→ released."""

    op = "release_claim"
    namespace: str
    key: str


@dataclass(frozen=True, slots=True)
class ClaimAll(SessionRequest):
    """One-way: claim all of `keys`, in their order, or none, as intents. Answered by `claimed`
    events on the main connection: `outcome` granted, stored (a live node holds `key`), held (by
    `holder`, until the end of the wait) or refused; before that, at most once, waiting (`holder`
    has `key`)."""

    op = "claim_all"
    namespace: str
    keys: list[str]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Encoding(SessionRequest):
    """One-way. The client is producing `keys`: claims them for `lease_seconds` from now."""

    op = "encoding"
    namespace: str
    keys: list[str]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Unclaim(SessionRequest):
    """One-way. Ends the wait of the `ClaimAll` whose id is `waiter`, and gives back `keys`."""

    op = "unclaim"
    namespace: str
    keys: list[str]
    waiter: int


@dataclass(frozen=True, slots=True)
class Describe(SessionRequest):
    """One-way. The clear text behind a namespace's fingerprint, to be published."""

    op = "describe"
    namespace: str
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stats(SessionRequest):
    """→ stats: gauges and counters of the node."""

    op = "stats"


@dataclass(frozen=True, slots=True)
class Goodbye(Request):
    """One-way. End the session now: its pins are released at once."""

    op = "goodbye"


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
    names = names_of(kind)
    if len(message) != len(names) + 1:
        raise ProtocolError(f"bad request: {op} takes {', '.join(names)}")
    values = []
    for name in names:
        value = message.get(name, _ABSENT)
        if not CHECKS[name](value):
            raise ProtocolError(f"bad request: {op} with a bad {name}")
        values.append(value)
    return kind(*values)


def strange_hello(message: object) -> tuple[int, int] | None:
    """(id, version) of a `Hello` of another version, whatever its other fields; else None."""
    if isinstance(message, dict) and message.get("op") == Hello.op:
        number, version = message.get("id"), message.get("version")
        if is_count(number) and is_count(version) and version != VERSION:
            return number, version  # type: ignore[return-value]
    return None


def split(keys: Sequence[str], nbytes_max: int = KEYS_BYTES_MAX) -> Iterator[Sequence[str]]:
    """Any number of keys, split into parts that fit one request each."""
    start = nbytes = 0
    for index, key in enumerate(keys):
        nbytes += len(key)
        if nbytes > nbytes_max or index - start == KEYS_MAX:
            yield keys[start:index]
            start, nbytes = index, len(key)
    if start < len(keys):
        yield keys[start:]


def lasting(name: str, value: float) -> float:
    """`value` in seconds, if a request may carry it.

    Raises:
        ConfigError: it is negative, not a number, or more than a day.
    """
    if not is_seconds(value):
        raise ConfigError(f"{name} is {value!r}; allowed: 0 to {SECONDS_MAX:.0f} seconds")
    return float(value)


def waiting(timeout: float) -> float:
    """A caller's timeout in seconds, limited to what a request may carry."""
    return min(max(0.0, float(timeout)), SECONDS_MAX)


def failure(request_id: int, error: Exception) -> dict[str, Any]:
    """The reply that makes the client raise `error`."""
    return {"id": request_id, "error": type(error).__name__, "message": str(error)}


_ABSENT = object()
_KINDS: Final[Mapping[str, type[Request]]] = {
    kind.op: kind
    for kind in (
        Hello, Join, Stage, Contains, Insert, Select, Take, Acknowledge, GiveBack, Leave, Holds,
        Prefetch, Release, Touch, Done, Claim, ReleaseClaim, ClaimAll, Encoding, Unclaim, Describe,
        Stats, Goodbye, OpenPool, Prepare, Offer, Retract,
        Received,
    )
}  # fmt: skip


class InsertOutcome(Enum):
    STORED = "stored"
    EXISTS = "exists"
    """The key already existed; shared content never changes, so nothing was done. For a hand-off:
    another node holds one under that key that is not taken yet; this one was dropped."""


class ClaimOutcome(StrEnum):
    """The outcome of a claim or of a set of claims. The values are those of messages.

    The store decides only between GRANTED and HELD (`store.ClaimAnswer.granted`): it does not know
    which nodes are alive, and therefore not whether a key is STORED.
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
