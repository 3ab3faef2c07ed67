"""Findings of `why`: one `Finding`, a sentence and a hint, for each fact known of a key.

Input: what the store holds of a key (`Trace`) and which nodes are alive (`Fleet`). Output: what it
means and what to do. Also compares the parts of two namespaces. A part that is a JSON object, such
as the connector's, is compared member by member.

Pure: no I/O and no thread of its own; any thread may call it. It must not know how findings are
shown on a terminal or on the page.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from lookup_buffer.errors import MissReason
from lookup_buffer.inspection.heartbeats import HeartbeatMonitor
from lookup_buffer.inspection.records import age_since, age_text, size_text
from lookup_buffer.key import is_handoff
from lookup_buffer.times import HANDOFF_GONE_SECONDS
from store import GONE_SECONDS, ClaimState, GoneReason, Location

if TYPE_CHECKING:
    from store.answers import Claim, Departure, Gone, Trace


class Code(StrEnum):
    """The kind of a finding: a stable word for programs."""

    STORED = "stored"
    OFFERED = "offered"
    ENCODING = "encoding"
    INTENDED = "intended"
    HOLDER_SILENT = "holder_silent"
    HOLDER_DIED = "holder_died"
    HOLDER_STOPPED = "holder_stopped"
    HOLDER_RESTARTED = "holder_restarted"
    HOLDER_UNKNOWN = "holder_unknown"
    CHECKSUM_FAILED = "checksum_failed"
    FETCH_FAILED = "fetch_failed"
    UNREADABLE = "unreadable"
    EXPIRED = "expired"
    EVICTED = "evicted"
    TAKEN = "taken"
    RETRACTED = "retracted"
    STALE = "stale"
    OWNER_DEAD = "owner_dead"
    INVALIDATED = "invalidated"
    GONE = "gone"
    ENDED = "ended"
    OTHER_NAMESPACE = "other_namespace"
    NO_NAMESPACE = "no_namespace"
    ABSENT = "absent"


PRESENT: Final = frozenset([Code.STORED, Code.OFFERED])
IN_PROGRESS: Final = frozenset([Code.ENCODING, Code.INTENDED])
_GONE: Final[Mapping[str, tuple[Code, str, str]]] = {
    GoneReason.EXPIRED: (
        Code.EXPIRED,
        "it expired on {node}: its time to live ended",
        "insert it with a longer ttl_seconds, or without one",
    ),
    GoneReason.EVICTED: (
        Code.EVICTED,
        "it was evicted on {node}, whose arena was full",
        "raise capacity_bytes there; `lookup-buffer nodes` shows how full nodes are",
    ),
    GoneReason.TAKEN: (
        Code.TAKEN,
        "it was taken from {node}: a hand-off goes to one taker",
        "insert it again for another taker; `serve --log-level info` logs each one taken",
    ),
    GoneReason.RETRACTED: (
        Code.RETRACTED,
        "it was only offered by {node}: its producer stopped waiting for room",
        "hand-offs have half of the arena: take them sooner, or raise capacity_bytes there",
    ),
    GoneReason.STALE: (
        Code.STALE,
        "the store named a copy on {node}, which did not have it",
        "it is encoded again when an engine needs it",
    ),
    GoneReason.OWNER_DEAD: (
        Code.OWNER_DEAD,
        "it was on {node}, which was dead for over a minute: other nodes removed the copy",
        "it is encoded again when an engine needs it",
    ),
    GoneReason.INVALIDATED: (
        Code.INVALIDATED,
        "its whole namespace was invalidated, by `lookup-buffer invalidate`",
        "it is encoded again when an engine needs it",
    ),
}

Described = Mapping[str, Mapping[str, str]]
"""The parts of each namespace, by fingerprint; without namespaces that have no description."""
Differences = dict[str, tuple[str | None, str | None]]

_SHOWN_CHARACTERS = 32
_NAMED_MAX = 6
_PARTS_MAX = 256
_PARTS_CHARACTERS_MAX = 16 << 10
"""A description is taken apart into so many parts and names of so many characters; what is longer
is compared as a whole. That of a connector has about 2,000, but any client may describe."""
_VALUE_CHARACTERS_MAX = 1 << 10
"""Of a value of a difference."""
_COMPARED_MAX = 512
_COMPARED_WITH_MAX = 64
"""Namespaces that `most_alike` compares, and those with the key that it compares them with: all
that an honest fleet has. More would hold the page for many seconds."""
_DEPTH_MAX = 8
"""Objects within objects that are taken apart. Each level is read again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact of a key. `code`, names and numbers are for programs, the sentences for people."""

    code: Code
    namespace: str | None
    key: str
    sentence: str
    hint: str = ""
    node: str | None = None
    seconds: float | None = None
    """The age of the fact, or the time left; the sentence says which."""
    other_namespace: str | None = None
    differs: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """Parts in which `namespace` and `other_namespace` differ: (value here, value there)."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Which nodes are alive, and how the other nodes left."""

    monitor: HeartbeatMonitor
    departures: Mapping[str, "Departure"]


def findings_of(trace: "Trace", fleet: Fleet) -> list[Finding]:
    """All findings of one key in one namespace; empty if nothing is known of it."""
    found = list(_findings(trace, fleet))
    if not found and trace.hits:
        times = f"{trace.hits} times" if trace.hits > 1 else "once"
        found.append(
            _finding(
                trace,
                Code.ENDED,
                f"it was stored: it was hit {times} within the last week. Its record ended without "
                "a recorded reason: its holder died, or the server lost or evicted it",
                "a node that still holds it writes it again within ten minutes; otherwise it is "
                "encoded again when an engine needs it",
            )
        )
    return sorted(found, key=lambda one: (one.code not in PRESENT, one.code not in IN_PROGRESS))


def _findings(trace: "Trace", fleet: Fleet) -> Iterator[Finding]:
    for location in trace.record.locations if trace.record else ():
        yield _copy(trace, location, fleet)
    if trace.claim:
        yield _claimed(trace, trace.claim)
    if trace.unreadable:
        yield _unreadable(trace)
    if trace.gone:
        yield _gone(trace, trace.gone)
    if trace.failure:
        yield _failed(trace)


def _finding(
    trace: "Trace",
    code: Code,
    sentence: str,
    hint: str,
    node: str | None = None,
    seconds: float | None = None,
) -> Finding:
    rounded = None if seconds is None else round(seconds, 1)
    return Finding(code, trace.namespace, trace.key, sentence, hint, node, rounded)


def _copy(trace: "Trace", location: Location, fleet: Fleet) -> Finding:
    record = trace.record
    assert record is not None
    node, boot = location.node, location.boot
    if not fleet.monitor.alive(node, boot):
        return _lost_copy(trace, location, fleet)
    if location.is_offer:
        return _finding(
            trace, Code.OFFERED,
            f"a hand-off, offered by {node}, which has no room for it yet: it can be taken, "
            "but not read",
            "taking it makes the room; or raise capacity_bytes there",
            node,
        )  # fmt: skip
    hits = f", hit {trace.hits} times" if trace.hits > 1 else ", hit once" if trace.hits else ""
    lane = next(
        (f", and on a device there, by {on.kind}" for on in record.devices if on.node == node), ""
    )
    size = "a stored None" if record.kind == "none" else size_text(record.nbytes)
    return _finding(
        trace, Code.STORED,
        f"stored on {node}, which is alive: {size}, first published "
        f"{age_text(age_since(record.created))} ago{hits}{lane}",
        "an engine that misses it has another namespace (see its log: `lookup buffer: namespace`) "
        "or store, or another key; `lookup-buffer stats` counts misses by reason",
        node, age_since(record.created),
    )  # fmt: skip


def _lost_copy(trace: "Trace", location: Location, fleet: Fleet) -> Finding:
    node, boot = location.node, location.boot
    beat, departure = fleet.monitor.last.get(node), fleet.departures.get(node)
    again = "it is encoded again when an engine needs it; nodes remove this copy from the record"
    if beat is not None and beat.boot != boot:
        return _finding(
            trace, Code.HOLDER_RESTARTED,
            f"it was on {node}, which was restarted since: its memory ended with the old process",
            again, node,
        )  # fmt: skip
    if beat is not None:
        silent = departure.silent_seconds if departure else None
        since = "over a day" if silent is None else age_text(silent)
        return _finding(
            trace, Code.HOLDER_SILENT,
            f"it is on {node}, which has sent no heartbeat for {since}: dead, frozen or cut off "
            "from the store, so no node fetches from it",
            "check whether that node runs, and its node.log; the item is back when the node is",
            node, silent,
        )  # fmt: skip
    if departure is None or departure.boot != boot or not departure.reason:
        return _finding(
            trace, Code.HOLDER_UNKNOWN,
            f"it was on {node}, which is not in the fleet: it left over a day ago, or the "
            "store lost its data",
            again, node,
        )  # fmt: skip
    ago = departure.seconds_ago
    if departure.reason == "stopped":
        code, how = Code.HOLDER_STOPPED, f"which was stopped {age_text(ago)} ago"
    else:
        code, how = (
            Code.HOLDER_DIED,
            f"which died: other nodes evicted that node {age_text(ago)} ago",
        )
    return _finding(trace, code, f"it was on {node}, {how}", again, node, ago)


def _claimed(trace: "Trace", claim: "Claim") -> Finding:
    node, _, rest = claim.holder.partition(":")
    since = rest.partition(":")[2]
    seconds = age_since(float(since)) if since.isdecimal() else None
    left = f"{claim.remaining_seconds:.0f} s"
    if claim.state is ClaimState.ENCODING:
        lasted = "" if seconds is None else f" for {age_text(seconds)}"
        return _finding(
            trace, Code.ENCODING,
            f"it is being encoded by an engine of {node}{lasted}",
            f"other engines wait for it; without progress the claim expires in {left}",
            node, seconds,
        )  # fmt: skip
    ago = "" if seconds is None else f" {age_text(seconds)} ago"
    return _finding(
        trace, Code.INTENDED,
        f"an engine of {node} claimed it{ago} and has not begun to encode it",
        f"unless it begins, the claim expires in {left}",
        node, seconds,
    )  # fmt: skip


def _unreadable(trace: "Trace") -> Finding:
    hint = "`lookup-buffer doctor` lists such keys; UNLINK those that were written by hand"
    if trace.unreadable.startswith("of version"):
        hint = "run one version of lookup-buffer on all hosts; this record expires by itself"
    return _finding(
        trace, Code.UNREADABLE,
        f"its record is {trace.unreadable}, so it is a miss to nodes of this version",
        hint,
    )  # fmt: skip


def _gone(trace: "Trace", gone: "Gone") -> Finding:
    unknown = (Code.GONE, "it is gone from {node}: {reason}", "")
    code, sentence, hint = _GONE.get(gone.reason, unknown)
    kept: float = GONE_SECONDS
    if is_handoff(trace.key) and gone.remaining_seconds <= HANDOFF_GONE_SECONDS:
        kept = HANDOFF_GONE_SECONDS  # `clear` keeps hand-offs for GONE_SECONDS too
    ago = max(0.0, kept - gone.remaining_seconds)
    node = gone.node or "a node"
    text = f"{sentence.format(node=node, reason=gone.reason)} ({age_text(ago)} ago)"
    return _finding(trace, code, text, hint, gone.node or None, ago)


def _failed(trace: "Trace") -> Finding:
    failure, ago = trace.failure, age_text(trace.failed_seconds_ago)
    assert failure is not None
    holder, reader = failure.holder, failure.reader
    if failure.reason == MissReason.CHECKSUM:
        return _finding(
            trace, Code.CHECKSUM_FAILED,
            f"{reader} fetched it from {holder} {ago} ago and dropped it: its checksum was wrong",
            "the reader fetches from another holder, or encodes; if it happens again, test memory "
            "and network of both hosts",
            holder, trace.failed_seconds_ago,
        )  # fmt: skip
    return _finding(
        trace, Code.FETCH_FAILED,
        f"{reader} could not fetch it from {holder} {ago} ago ({failure.reason})",
        f"`lookup-buffer doctor` on the host of {reader}, with its token, shows whether "
        f"{holder} is reached and accepts its token and certificate",
        holder, trace.failed_seconds_ago,
    )  # fmt: skip


def absent(key: str, namespace: str | None, where: str = "") -> Finding:
    """The finding that there is no trace of `key`, in `namespace` or anywhere."""
    ago = "a minute" if is_handoff(key) else "an hour"
    return Finding(
        Code.ABSENT, namespace, key,
        f"no trace of it{where}: never published, or removed over {ago} ago",
        "an insert without room leaves no record; `lookup-buffer stats` counts them, and "
        "`lookup-buffer doctor` shows whether the server refuses records",
    )  # fmt: skip


def no_namespace(key: str, namespace: str, known: Sequence[str]) -> Finding:
    """The finding that no namespace begins with `namespace`."""
    named = ", ".join(each[:12] for each in known[:5]) + (", …" if len(known) > 5 else "")
    return Finding(
        Code.NO_NAMESPACE, namespace, key,
        f"there is no namespace that begins with {namespace!r}",
        f"known: {named or 'none'}; engines log theirs at start: `lookup buffer: namespace`",
    )  # fmt: skip


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Differences:
    """The parts that differ, by name: (value here, value there), of long values the first
    characters. None: that side lacks the part."""
    here, there = _flat(ours), _flat(theirs)
    return {
        name: (
            _shown(here.get(name), _VALUE_CHARACTERS_MAX),
            _shown(there.get(name), _VALUE_CHARACTERS_MAX),
        )
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    }


def most_alike(
    described: Described, without: Iterable[str], having: Iterable[str]
) -> dict[str, str]:
    """For each namespace of `without` the most similar one of `having`; the most similar first.

    Of many namespaces only the first ones by fingerprint are compared. Similar means that few parts
    differ; among equals the lower fingerprint comes first. Pairs in which a namespace is not
    described come last.
    """
    holders = sorted(having)[:_COMPARED_WITH_MAX]
    others = sorted(without)[:_COMPARED_MAX]
    flat = {
        space: frozenset(_flat(described.get(space, {})).items()) for space in (*others, *holders)
    }

    def unlike(one: str, other: str) -> tuple[bool, bool, int]:
        here, there = flat[one], flat[other]
        return not there, not here, len({name for name, _ in here ^ there})

    nearest = {space: min(holders, key=partial(unlike, space)) for space in others}
    order = sorted(nearest, key=lambda space: (unlike(space, nearest[space]), space))
    return {space: nearest[space] for space in order}


def difference_text(found: Differences) -> str:
    """The differences as text: `dtype (float16 here, bfloat16 there), …`."""
    named = [
        f"{name} ({_brief(here)} here, {_brief(there)} there)"
        for name, (here, there) in list(found.items())[:_NAMED_MAX]
    ]
    if len(found) > len(named):
        named.append(f"and {len(found) - len(named)} more")
    return ", ".join(named)


def _flat(parts: Mapping[str, str]) -> dict[str, str]:
    """The first _PARTS_MAX parts; those that are JSON objects member by member, as far as there is
    room for that."""
    whole: dict[str, str] = {}
    objects = dict(islice(parts.items(), _PARTS_MAX))
    room, characters = _PARTS_MAX - len(objects), _PARTS_CHARACTERS_MAX
    for _ in range(_DEPTH_MAX):
        taken_apart: dict[str, str] = {}
        for name, value in objects.items():
            members = _members(value, room)
            size = sum(len(name) + len(member) + len(text) for member, text in members.items())
            if members and size <= characters:
                room, characters = room - len(members), characters - size
                taken_apart |= {f"{name}.{member}": text for member, text in members.items()}
            else:
                whole[name] = value
        objects = taken_apart
    return whole | objects


def _members(value: str, most: int) -> dict[str, str]:
    """Of a JSON object with at most so many; none of anything else."""
    if not value.startswith("{") or len(value) > _PARTS_CHARACTERS_MAX:
        return {}
    try:
        found = json.loads(value)
        if len(found) > most:
            return {}
        return {
            name: member if isinstance(member, str) else json.dumps(member, sort_keys=True)
            for name, member in found.items()
        }
    except (ValueError, RecursionError):
        return {}


def _shown(value: str | None, most: int) -> str | None:
    if value is None or len(value) <= most:
        return value
    return value[: most - 1] + "…"


def _brief(value: str | None) -> str:
    return _shown(value, _SHOWN_CHARACTERS) or "nothing"
