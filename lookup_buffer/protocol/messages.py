"""What a client says to its node over the unix socket: one class per request.

Requests are header-only frames (see `wire`): a map with `op`, the number `id` that the reply
repeats, and the fields below. `parse` validates all that comes from outside; a field's name
decides how, so it means the same in every request. Requests marked *one-way* get no reply.
Replies carry `id` and the fields named in each docstring, or `error` (a class of
`lookup_buffer.errors`) and `message`. `Prefetch` and `ClaimAll` are answered by events on the first
connection of a session (the anchor), so that their caller need not wait.

Nothing larger than a header crosses the socket: bytes lie in shared memory.

Lanes: ways from one process's device to another's, beside the one over the hosts. Plain data.

What the node, its clients and the metrics have to agree on; how bytes take a lane is `device`'s.

What a field of a request may hold, by its name, and the limits. Pure.

All that comes from outside is checked by this before anything is done with it (see `messages`).

Request: what all that a client says to its node has in common. See `messages`.

What a process that has a pool on a device says to its node, and the other way round.

Requests as in `messages`, all one-way. The node answers on the anchor of the pool's session:

    receive     id (a ticket), namespace, key, header, seconds, sources: bring it into the pool and
                hold it under the ticket; say `Received`
    pools       there: other nodes' processes' pools that are new, each as the fields of a
                `SeenPool`; gone: ids of those that it was told of and that are no more. So that a
                pair can be made before anything is wanted
    let_go      tickets: these are held no longer, and what is still on its way is not wanted;
                keys: [namespace, key] of copies of the node that are no more, so that what is
                beside them in the pool is not either

What an insert and a claim came to.
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
    """Why what could have come by a lane came over the hosts:

    cold, abandoned     no communicator with that pool yet; or it failed, and is left alone a while
    version             the other end has another kind of lane, or another version of its library
    stale               the pool has it no more
    checksum            other bytes came than the record tells of
    peer_failed         the other process died, closed, or broke off
    timeout             it did not come in the time given
    no_room, device     no room in the pool, or never any; or the device had none, or failed
    busy, ended         too many are on their way; the process that was to receive it has gone
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
"""Empty: it comes by the lane."""


KEYS_MAX: Final = 4096
"""Bound on the keys or tickets of one request."""
KEYS_BYTES_MAX: Final = 256 << 10
"""Bound on the keys of one request together, that `split` keeps; a frame takes four times that."""
COUNT_MAX: Final = (1 << 31) - 1
"""Bound on the hits of a key that one request can tell: no sum of them outgrows a counter."""
TEXT_MAX: Final = 4096
PARTS_MAX: Final = 256
"""Bound on the entries of a map: parts of a namespace, what a client expects, a header."""
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
    return 0 <= value <= SECONDS_MAX  # which infinity and NaN are not


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
    """Whether these are parts of a namespace that a node takes."""
    return _is_small_map(value) and all(isinstance(part, str) for part in value.values())  # type: ignore[attr-defined]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_LIBRARY, _POOL = re.compile(r"[0-9a-f]{8}"), re.compile(r"[0-9a-f]{12}")
_CLAIM_STATES = [state.value for state in ClaimState]  # a list: what is looked up may be unhashable
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


class DeskRequest(Request):
    """What the desk answers for a session that is open."""

    __slots__ = ()


_names: Final[dict[type[Request], tuple[str, ...]]] = {}


def names_of(kind: type[Request]) -> tuple[str, ...]:
    """The fields of a kind of request, in their order."""
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(item.name for item in fields(kind))
    return names


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


VERSION: Final = 8


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """Open a session. → session, node, boot, arena_bytes, and the descriptors of
    arena, board and what lies elsewhere.

    `seat` is [engine id, rank or None for the scheduler, world size, whether what it gets spares it
    an encode, on what it computes], or None for a client that is no engine. `expects` names what
    the client's configuration says of the node (capacity, store, digest of the token); a node that
    differs refuses, naming both.
    """

    op = "hello"
    version: int
    seat: list[Any] | None
    expects: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Join(Request):
    """One more connection for a session that is open. → nothing."""

    op = "join"
    session: int


@dataclass(frozen=True, slots=True)
class Stage(Request):
    """The staging area of this connection; its descriptor comes with the frame. → nothing."""

    op = "stage"


@dataclass(frozen=True, slots=True)
class Contains(DeskRequest):
    """→ present: list of booleans, False where in doubt when `budget_seconds` have passed."""

    op = "contains"
    namespace: str
    keys: list[str]
    budget_seconds: float


@dataclass(frozen=True, slots=True)
class Insert(DeskRequest):
    """Take the first bytes of this connection's staging area. → outcome: stored or exists;
    and the `checksum` of what was stored.

    A hand-off for which there is no room waits for it, `wait_seconds` at most.
    """

    op = "insert"
    namespace: str
    key: str
    header: dict[str, Any]
    ttl_seconds: float | None
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Select(DeskRequest):
    """→ ticket, offset, generation, header, source; or state: missing, and why.

    While bytes are on their way from another node, an interim reply with `fetching` says so.
    """

    op = "select"
    namespace: str
    key: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Take(DeskRequest):
    """Take a hand-off. → as for `Select`, with token and lease_seconds: to be acknowledged or given
    back within that time.

    From node to node → token, lease_seconds, generation and checksum, with state leased, or state
    absent; while another has it, and there is time, that comes later, or upon `Leave`.
    """

    op = "take"
    namespace: str
    key: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Acknowledge(DeskRequest):
    """The hand-off arrived. → won: whether the lease was good. Its ticket goes in either case."""

    op = "acknowledge"
    token: int


@dataclass(frozen=True, slots=True)
class GiveBack(DeskRequest):
    """One-way. The taker does not want the hand-off after all."""

    op = "give_back"
    token: int


@dataclass(frozen=True, slots=True)
class Leave(Request):
    """One-way, from node to node. Who asked by the `Take` of this number waits no longer."""

    op = "leave"
    take: int


@dataclass(frozen=True, slots=True)
class Holds(Request):
    """From node to node → state: present where there is that hand-off, be it leased, or absent."""

    op = "holds"
    namespace: str
    key: str


@dataclass(frozen=True, slots=True)
class Prefetch(DeskRequest):
    """One-way. Answered by `settled` events on the anchor: `entries` of [index of the key, entry],
    an entry as for `Select`, with state pending, and then another event, where it goes on.

    What is shared and nobody has is waited for, up to `wait_seconds`, until it is published. But
    where `claimer` is not 0 it is also a `ClaimAll` of that id, for the same keys, in any order,
    and it is the claims that wait."""

    op = "prefetch"
    namespace: str
    keys: list[str]
    claimer: int
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Release(DeskRequest):
    """One-way. The owner lets go of these tickets."""

    op = "release"
    tickets: list[int]


@dataclass(frozen=True, slots=True)
class Touch(DeskRequest):
    """One-way. How often the client read each of these keys by the board: hits, and uses."""

    op = "touch"
    namespace: str
    reads: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done(DeskRequest):
    """One-way. This rank has taken its copies."""

    op = "done"
    tickets: list[int]
    rank: int


@dataclass(frozen=True, slots=True)
class Claim(DeskRequest):
    """→ outcome (a `ClaimOutcome`): granted, held (by another: holder, state, remaining_seconds)
    or stored (a live node holds the key), after `wait_seconds` at most where it is held.

    `state` is how far the client has come: intent or encoding. The claim ends with the session at
    the latest.
    """

    op = "claim"
    namespace: str
    key: str
    lease_seconds: float
    state: str
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseClaim(DeskRequest):
    """→ released."""

    op = "release_claim"
    namespace: str
    key: str


@dataclass(frozen=True, slots=True)
class ClaimAll(DeskRequest):
    """One-way: claim all of `keys`, in their order, or none, as intents. Answered by `claimed`
    events on the anchor: `outcome` granted, stored (a live node holds `key`), held (by `holder`,
    all the while) or refused; before that, at most once, waiting (`holder` has `key`)."""

    op = "claim_all"
    namespace: str
    keys: list[str]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Encoding(DeskRequest):
    """One-way. The client is at work on `keys`: claims them for `lease_seconds` from now."""

    op = "encoding"
    namespace: str
    keys: list[str]
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Unclaim(DeskRequest):
    """One-way. Ends the wait of the `ClaimAll` whose id is `waiter`, and gives back `keys`."""

    op = "unclaim"
    namespace: str
    keys: list[str]
    waiter: int


@dataclass(frozen=True, slots=True)
class Describe(DeskRequest):
    """One-way. The clear text behind a namespace's fingerprint, to be published."""

    op = "describe"
    namespace: str
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stats(DeskRequest):
    """→ stats: gauges and counters of the node."""

    op = "stats"


@dataclass(frozen=True, slots=True)
class Goodbye(Request):
    """One-way. End the session now: its pins are released at once."""

    op = "goodbye"


def parse(message: object) -> Request:
    """The request in a decoded frame.

    Raises:
        ProtocolError: unknown, or a field is missing, unknown, or of a wrong type or size.
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
    """(id, version) of a `Hello` of another version, whose other fields may be any; else None."""
    if isinstance(message, dict) and message.get("op") == Hello.op:
        number, version = message.get("id"), message.get("version")
        if is_count(number) and is_count(version) and version != VERSION:
            return number, version  # type: ignore[return-value]
    return None


def split(keys: Sequence[str], nbytes_max: int = KEYS_BYTES_MAX) -> Iterator[Sequence[str]]:
    """Any number of keys, cut into what one request takes."""
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
        ConfigError: it is negative, no number, or more than a day.
    """
    if not is_seconds(value):
        raise ConfigError(f"{name} is {value!r}; allowed: 0 to {SECONDS_MAX:.0f} seconds")
    return float(value)


def waiting(timeout: float) -> float:
    """As much of a caller's timeout as a request may carry."""
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
    """The key was there already; shared content never changes, so nothing was done. Of a hand-off:
    another node has one under that key, which nobody has taken; this one was dropped."""


class ClaimOutcome(StrEnum):
    """How a claim, or a set of claims, was decided. The values are those of messages.

    The store decides between two of them (`store.ClaimAnswer.granted`): it does not know which
    nodes are alive, and so not whether a key is STORED.
    """

    GRANTED = "granted"
    """The right to produce the key is ours, until the lease ends. Of a set: all are ours, as
    intents of a second at most."""
    HELD = "held"
    """Another engine has it: `holder`. Of a set: none is ours, for `holder` had `key` until the
    end of the wait."""
    STORED = "stored"
    """Nobody needs to produce it: a live node holds a complete copy. Of a set: none is ours, for a
    live node holds `key`; look for the keys again."""
    PENDING = "waiting"
    """Only of a set: not answered yet, or waiting for what others hold."""
    FAILED = "refused"
    """Only of a set: the node refused it, or did not answer."""
