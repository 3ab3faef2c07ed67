"""What a client says to its node over the unix socket: one class per request.

Requests are header-only frames (see `wire`): a map with `op`, the number `id` that the reply
repeats, and the fields below. `parse` validates all that comes from outside; a field's name
decides how, so it means the same in every request. Requests marked *one-way* get no reply.
Replies carry `id` and the fields named in each docstring, or `error` (a class of
`lookup_buffer.errors`) and `message`. `Prefetch` and `ClaimAll` are answered by events on the first
connection of a session (the anchor), so that their caller need not wait.

Nothing larger than a header crosses the socket: bytes lie in shared memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lookup_buffer.errors import ConfigError, ProtocolError
from lookup_buffer.fields import CHECKS, KEYS_BYTES_MAX, KEYS_MAX, SECONDS_MAX, is_count, is_seconds
from lookup_buffer.pool_messages import Offer, OpenPool, Prepare, Received, Retract
from lookup_buffer.request import DeskRequest, Request, names_of

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
