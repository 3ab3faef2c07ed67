"""The contract of a metadata store. Implementations document only what they do differently.

A store holds who has what: records, claims, beats, counters. It never holds tensor bytes, and it
is a hint: it may lose everything at any moment, and what it says is checked where bytes arrive.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from store.answers import (
    Beat,
    ClaimAnswer,
    ClaimState,
    Failure,
    NodeInfo,
    Publication,
    Publishing,
    Releasing,
    ServerInfo,
    Withdrawing,
)
from store.errors import StoreFull, StoreUnavailable
from store.record import Location, Record

TTL_SECONDS = 30 * 60.0
"""How long a record lives that nobody renews."""

Found = Record | None | StoreUnavailable
"""A record, nothing, or why that is not known."""


class MetadataStore(ABC):
    """Who holds which key.

    Threads: any method from any thread at any time. A store must not be used on both sides of a
    fork at once; a child that wants one uses it first after the fork, or opens its own.

    Time: an operation ends within the call timeout, plus the connect timeout where there is no
    connection yet. Within it, what a server of a cluster did not carry out but pointed elsewhere
    is sent there; nothing else is repeated behind the caller's back. (The resolver looks a host's
    name up in its own time, and each of several addresses has a connect timeout: name the server
    by address where that counts.)

    Errors, of every method: StoreUnavailable, also after `close`; StoreCorrupt where a key of ours
    holds something foreign. StoreFull and NodeTaken only where it is said. ValueError for arguments
    that no store could hold (see `Record.check`). What is garbled inside a record is a miss, never
    an error.

    Repeating: every operation may be repeated after StoreUnavailable, but `add_hits` and
    `add_stats` may then count twice.

    Order: operations of one thread take effect in the order of the calls. But one that failed with
    StoreUnavailable may still take effect later, even after others that were called after it: a
    frozen server carries out on waking what was sent to it.
    """

    @abstractmethod
    def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        """Make it known that each `location` has the bytes of its `record`, in one round trip.

        The locations of `record` itself are ignored. Answers are in the order of the publishings.
        A record that is there must agree in dtype, shape, nbytes and kind, else CONFLICT and
        nothing changes; so it is with anything else that stands under its name. A newer
        generation, or another boot, takes the place of the same node's older location. A node that
        would be one more than LOCATIONS_MAX is not added: FULL; such an answer does not renew the
        record, so one whose holders are all dead ends by itself. ADDED and PRESENT let the record
        live for `ttl_seconds` from now, never shorter than it would have, and remove the tombstone.
        ADDED, PRESENT and FULL drop the claim that `claim_token` holds.
        What is `sole` has one node: where another one's location stands, that is no offer (see
        `Location.is_offer`), it is OWNED and nothing changes. Else it never is in CONFLICT with
        an older shape of the same key: the record starts anew. What lies on a server that
        was not reached is UNREACHED; where no server was reached, StoreUnavailable is raised.
        """

    def publish(
        self,
        record: Record,
        location: Location,
        *,
        ttl_seconds: float = TTL_SECONDS,
        claim_token: str | None = None,
    ) -> Publication:
        """Publish one, as `publish_many` does. Raises StoreFull for what would be REFUSED."""
        publishing = Publishing(record, location, ttl_seconds, claim_token)
        (publication,) = self.publish_many([publishing])
        if publication is Publication.REFUSED:
            raise StoreFull(f"the store has no memory left for {record.key!r}: not stored")
        return publication

    @abstractmethod
    def look_up(self, items: Sequence[tuple[str, str]]) -> list[Found]:
        """The records of each (namespace, key), in their order. Does not renew them.

        One round trip for each 1,000 items, to all servers of a cluster at once. What lies on a
        server that was not reached is no miss: it has StoreUnavailable in its place; where none
        was reached, that is raised. Whether a location's node lives is for the caller to judge,
        by `beats`.
        """

    def locate(self, namespace: str, keys: Sequence[str]) -> list[Record | None]:
        """The records of one namespace's `keys`, for those to whom not reached is a miss, too."""
        found = self.look_up([(namespace, key) for key in keys])
        return [None if isinstance(one, StoreUnavailable) else one for one in found]

    def place_of(self, namespace: str, key: str) -> str:
        """Names the server that the key lies on, as far as it is known; asks nobody.

        Keys of one place are reached together or not at all. "" where it is not known, or where
        there is only one server.
        """
        return ""

    @abstractmethod
    def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        """Remove each node's location, in one round trip; True where there was one.

        None for what lies on a server that was not reached; where none was reached,
        StoreUnavailable is raised.

        With the last location the record goes; `reason` is kept for its `gone_seconds` (see
        `gone`). Where no record stood and `may_have_ended` says so, it is kept as well, unless
        another one is.
        With `exactly`, only that very location is removed: for whoever found it stale, while the
        node may have published anew. Works when memory is full.
        """

    def withdraw(
        self,
        namespace: str,
        key: str,
        location_node: str,
        *,
        reason: str,
        exactly: Location | None = None,
    ) -> bool:
        """Withdraw one, as `withdraw_many` does."""
        (gone,) = self.withdraw_many([Withdrawing(namespace, key, location_node, reason, exactly)])
        return bool(gone)

    @abstractmethod
    def claim(
        self,
        namespace: str,
        key: str,
        *,
        holder: str,
        token: str,
        state: ClaimState,
        lease_seconds: float,
    ) -> ClaimAnswer:
        """Take the right to produce `key` for `lease_seconds`, if nobody has it.

        The same token asks again: an ENCODING claim is renewed, an INTENT becomes ENCODING; an
        INTENT that asks as such again keeps what is left of its lease, and an ENCODING claim stays
        one. `token` is unguessable to others by its randomness and has no colon; `holder` is for
        people and for those who wait; as long as a claim stays in one state it is the text that
        was said first. Raises StoreFull.
        """

    @abstractmethod
    def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        """Give claims back, in one round trip; False where the token does not hold it.

        None for what lies on a server that was not reached, as with `withdraw_many`. Works when
        memory is full.
        """

    def release_claim(self, namespace: str, key: str, *, token: str) -> bool:
        """Give one back, as `release_many` does."""
        (released,) = self.release_many([Releasing(namespace, key, token)])
        return bool(released)

    @abstractmethod
    def beat(self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None) -> bool:
        """Say that the node lives. Works when memory is full.

        True where this boot of the node was known. False at its first beat, and when the server
        has lost its data or another observer struck the node off: then it has to publish anew.

        Raises NodeTaken, and changes nothing, where another boot stands there, unless its beat is
        exactly `replacing`: the last one of a boot that the caller has seen standing still.
        """

    @abstractmethod
    def leave(self, node: str, boot: str, *, reason: str = "stopped") -> None:
        """Strike the node off, with its description and counters, if its boot is still this one.

        For a node that stops, and for an observer that has seen it dead for long. `reason` is
        kept for a day, for people. Works when memory is full, but for that.
        """

    @abstractmethod
    def beats(self) -> dict[str, Beat]:
        """The last beat of every node that has not left, dead ones included."""

    @abstractmethod
    def describe_node(self, info: NodeInfo) -> None:
        """Say where a node is reached and what it has; kept for a day. Raises StoreFull."""

    @abstractmethod
    def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        """What those nodes said of themselves, in one round trip.

        The unknown ones are left out, and so is what lies on a server that was not reached, unless
        none was: then StoreUnavailable is raised.
        """

    @abstractmethod
    def node_ages(self, nodes: Sequence[str]) -> dict[str, float]:
        """Seconds since each node last described itself, by the server's clock, in one round trip.

        The unknown ones are left out. Who describes itself each second, and did so a moment ago,
        lives: for whoever has no time to watch beats.
        """

    @abstractmethod
    def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        """Publish what a namespace stands for, in clear text, for a week. Raises StoreFull."""

    @abstractmethod
    def namespaces(self) -> dict[str, dict[str, str]]:
        """All described namespaces. Walks the whole server: for people and tools."""

    @abstractmethod
    def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        """Count hits of keys. Only the 10,000 keys with the most are kept. Raises StoreFull."""

    @abstractmethod
    def hits(self, namespace: str, keys: Sequence[str]) -> list[int]:
        """The hits of `keys`, in their order; 0 where nothing is known."""

    @abstractmethod
    def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        """Add to a node's counters, kept for a week. Raises StoreFull."""

    @abstractmethod
    def stats(self) -> dict[str, dict[str, int]]:
        """The counters of every node that has not left."""

    @abstractmethod
    def scan(self, namespace: str | None = None, *, limit: int | None = None) -> Iterator[Record]:
        """All records, or one namespace's, at most `limit`; in pages, so the server never stops.

        A record that is there all the while appears at least once, in rare cases twice; one that
        comes or goes meanwhile may or may not appear. Each page is an operation of its own, with
        its own timeout and its own errors.
        """

    @abstractmethod
    def gone(self, namespace: str, key: str) -> str | None:
        """Why the key's last location went, for `gone_seconds`; None where that is not known."""

    @abstractmethod
    def note_failures(self, failures: Sequence[Failure]) -> None:
        """Keep the last failure of each key for an hour, for people. Raises StoreFull."""

    @abstractmethod
    def failure(self, namespace: str, key: str) -> Failure | None:
        """The last fetch of the key that failed, within the last hour."""

    @abstractmethod
    def mark_invalid(self, namespace: str, at: float) -> None:
        """Have nodes drop what they hold of the namespace; kept for a week.

        `at` is the wall clock: for whoever reads it first, and starts later than that. Another
        `at` is another mark. Raises StoreFull.
        """

    @abstractmethod
    def invalidations(self) -> dict[str, float]:
        """The last mark of each namespace."""

    @abstractmethod
    def clear(self, namespace: str) -> int:
        """Remove all records of a namespace, with `GoneReason.INVALIDATED`; how many there were.

        In pages, as `scan`. Whoever holds a copy may publish it anew: see `mark_invalid`. Works
        when memory is full.
        """

    @abstractmethod
    def server_info(self) -> ServerInfo:
        """What kind of server this is and how full."""

    @abstractmethod
    def failovers(self) -> int:
        """How often another server has taken over, as far as calls have noticed; no round trip.

        The last writes before such a change may be lost, for servers replicate asynchronously.
        """

    @abstractmethod
    def ping(self) -> float:
        """Seconds that one round trip takes."""

    @abstractmethod
    def close(self) -> None:
        """Release all connections. Idempotent; what others are waiting for ends in an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
