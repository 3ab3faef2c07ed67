"""What a client says to its node over the unix socket: one class per request.

Requests are header-only frames (see `wire`): a map with `op`, the number `id` that the reply
repeats, and the fields below. `parse` validates all that comes from outside; a field's name
decides how, so it means the same in every request. Requests marked *one-way* get no reply.
Replies carry `id` and the fields named in each docstring, or `error` (a class of
`lookup_buffer.errors`) and `message`. `Prefetch` is answered by events on the first connection of
a session (the anchor), so that its caller need not wait.

Nothing larger than a header crosses the socket: bytes lie in shared memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from lookup_buffer.errors import ConfigError, ProtocolError
from store import ClaimState

VERSION: Final = 2
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


@dataclass(frozen=True, slots=True)
class Request:
    op: ClassVar[str]
    id: int

    def to_wire(self) -> dict[str, Any]:
        return {"op": self.op} | {name: getattr(self, name) for name in _NAMES[type(self)]}


@dataclass(frozen=True, slots=True)
class Hello(Request):
    """Open a session. → session, node, boot, arena_bytes, and the descriptors of
    arena and board.

    `seat` is [engine id, rank or None for the scheduler, world size], or None for a client that
    is no engine. `expects` names what the client's configuration says of the node (capacity,
    store, digest of the token); a node that differs refuses, naming both.
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


class DeskRequest(Request):
    """What the desk answers for a session that is open."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Contains(DeskRequest):
    """→ present: list of booleans, False where in doubt when `budget_seconds` have passed."""

    op = "contains"
    namespace: str
    keys: list[str]
    budget_seconds: float


@dataclass(frozen=True, slots=True)
class Insert(DeskRequest):
    """Take the first bytes of this connection's staging area. → outcome: stored or exists."""

    op = "insert"
    namespace: str
    key: str
    header: dict[str, Any]
    ttl_seconds: float | None


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
class Prefetch(DeskRequest):
    """One-way. Answered by `settled` events on the anchor: `entries` of [index of the key, entry],
    an entry as for `Select`, with state pending, and then another event, where it goes on."""

    op = "prefetch"
    namespace: str
    keys: list[str]


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
    """→ outcome: granted, held (by another: holder, state, remaining_seconds) or stored (a live
    node holds the key), after `wait_seconds` at most where it is held.

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
    names = _NAMES[kind]
    if len(message) != len(names) + 1:
        raise ProtocolError(f"bad request: {op} takes {', '.join(names)}")
    values = []
    for name in names:
        value = message.get(name, _ABSENT)
        if not _CHECKS[name](value):
            raise ProtocolError(f"bad request: {op} with a bad {name}")
        values.append(value)
    return kind(*values)


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
    if not _is_seconds(value):
        raise ConfigError(f"{name} is {value!r}; allowed: 0 to {SECONDS_MAX:.0f} seconds")
    return float(value)


def waiting(timeout: float) -> float:
    """As much of a caller's timeout as a request may carry."""
    return min(max(0.0, float(timeout)), SECONDS_MAX)


def failure(request_id: int, error: Exception) -> dict[str, Any]:
    """The reply that makes the client raise `error`."""
    return {"id": request_id, "error": type(error).__name__, "message": str(error)}


def is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= TEXT_MAX


def _is_seconds(value: object) -> bool:
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
    return all(_is_count(count) and 0 < count <= COUNT_MAX for count in value.values())


def _is_seat(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or len(value) != 3:
        return False
    engine_id, rank, world_size = value
    in_world = _is_count(world_size) and 0 < world_size <= 4096
    if not _is_text(engine_id) or not in_world:
        return False
    return rank is None or (_is_count(rank) and rank < world_size)


def is_parts(value: object) -> bool:
    """Whether these are parts of a namespace that a node takes."""
    return _is_small_map(value) and all(isinstance(part, str) for part in value.values())  # type: ignore[attr-defined]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_ABSENT = object()
_CLAIM_STATES = [state.value for state in ClaimState]  # a list: what is looked up may be unhashable
_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "id": _is_count,
    "version": _is_count,
    "seat": _is_seat,
    "expects": _is_small_map,
    "session": _is_count,
    "namespace": is_fingerprint,
    "key": _is_text,
    "keys": _list_of(_is_text),
    "budget_seconds": _is_seconds,
    "header": _is_small_map,
    "ttl_seconds": lambda value: value is None or _is_seconds(value),
    "wait_seconds": _is_seconds,
    "lease_seconds": _is_seconds,
    "state": _CLAIM_STATES.__contains__,
    "tickets": _list_of(_is_count),
    "reads": _is_reads,
    "rank": _is_count,
    "parts": is_parts,
}
_KINDS: Final[Mapping[str, type[Request]]] = {
    kind.op: kind
    for kind in (
        Hello, Join, Stage, Contains, Insert, Select, Prefetch, Release, Touch, Done, Claim,
        ReleaseClaim, Describe, Stats, Goodbye,
    )
}  # fmt: skip
_NAMES: Final = {kind: tuple(item.name for item in fields(kind)) for kind in _KINDS.values()}
