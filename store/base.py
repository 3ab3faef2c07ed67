"""The contract of a metadata store. Implementations document only what they do differently.

`MetadataStore` is what a node needs. `BrowsableStore` adds what commands need. Both are
asynchronous; `store.blocking` calls them from threads. How other packages add a store:
`docs/stores.md`. The contract as tests: `store.testing`.

A store maps each key to the nodes that hold it. It keeps records, claims, heartbeats and counters,
and never tensor bytes. Its content is a hint: a server may lose everything at any moment, and nodes
verify every location when they transfer the bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from store.answers import (
    Address,
    Beat,
    ClaimAnswer,
    Claiming,
    ClaimState,
    Departure,
    Examined,
    Failure,
    Invalidation,
    NodeInfo,
    Publication,
    Publishing,
    Refused,
    Releasing,
    ServerInfo,
    Trace,
    Withdrawing,
)
from store.errors import StoreError, StoreFull, StoreUnavailable
from store.record import Location, Record

TTL_SECONDS = 30 * 60.0
"""Default life of a record without renewal."""

Found = Record | None | StoreUnavailable
"""The result of one look-up: the record, None for a miss, or the error that left it unknown."""


OnFound = Callable[[list[Found]], None]


Forgotten = Callable[[tuple[str, str] | None], None]
"""Called when an entry with a True verdict is dropped, with its namespace and key; with None when
all entries of a connection are.
"""


@dataclass(slots=True, eq=False)
class Entry:
    """The cached state of one key, valid until the mirror drops this object, or until `until`.

    `verdict` and `verdict_epoch` belong to the mirror's user: its judgement of the record, and the
    epoch of that judgement.
    """

    record: Record | None
    read_at: float
    until: float
    verdict: bool = False
    verdict_epoch: int = -1


class Mirror(ABC):
    """A cache of recently read records, kept true by what the servers report.

    It only saves reads: a wrong entry costs a miss or a failed fetch. It starts when it is made.
    All methods and callbacks run on one loop's thread.
    """

    pushes: int
    """Changes that the servers have reported, as a counter for people."""

    @abstractmethod
    def entries(self, namespace: str) -> Mapping[str, Entry]:
        """The cached entries of a namespace, each valid until its `until`. Do not keep it."""

    @abstractmethod
    def ask(self, namespace: str, keys: Sequence[str], on_found: OnFound) -> None:
        """Call `on_found` with the records of `keys`, in their order; at once if all are cached.

        It ends within the call timeout. A key whose server was not reached has StoreUnavailable as
        its result. It has StoreRefused while it moves to another server: then call the store.
        """

    @abstractmethod
    def forget(self, namespace: str, key: str) -> None:
        """Drop a key, so that its next read goes to the server.

        For a caller that learned of a newer state over another connection, before the push arrived.
        """

    @abstractmethod
    def watch(self, namespace: str, key: str, notify: Callable[[], None]) -> Callable[[], None]:
        """Call `notify` when the key's current state is known, and after each change.

        Returns a function that cancels the watch. A change is one of the record or of the claim.
        While there is a claim and no record, `notify` is not called. It is called only after the
        next change can no longer be missed, so a read or a claim inside `notify`, or later, sees
        the current state.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop all connections. Pending reads end with StoreUnavailable. Idempotent."""


class MirrorClaims(ABC):
    """Claims over a mirror's connections, without waiting: the mirror has the record of the reply.

    All methods and callbacks run on the mirror's loop; a callback may run before the method
    returns. StoreUnavailable means: call the store instead.
    """

    @abstractmethod
    def claim(self, claiming: Claiming, answer: Callable[[ClaimAnswer | StoreError], None]) -> None:
        """As MetadataStore.claim."""

    @abstractmethod
    def release(self, releasing: Releasing, answer: Callable[[bool | StoreError], None]) -> None:
        """As MetadataStore.release_many of one claim."""


class MetadataStore(ABC):
    """Which nodes hold which key.

    Loop: a store is opened without a running loop and does not connect then, so that a process may
    fork before the first call. All calls run on one asyncio loop, many at the same time, and must
    not block it. `place_of` and `failovers` may be called from any thread. Do not use a store on
    both sides of a fork at once.

    Deadlines: an operation ends within the call timeout, plus the connect timeout if it has to open
    a connection. Within that time it follows redirections of a cluster (MOVED, ASK). It retries
    nothing else. Two things are outside the bound: DNS resolution, and a host name with several
    addresses, each of which has a connect timeout of its own. Use an IP address in the URL where
    this matters.

    Errors of every method:

    - StoreUnavailable: no server was reached or served the call in time; also after `close`.
    - StoreCorrupt: one of our keys holds a foreign value, one that no node wrote; or the server
      cannot run our scripts.
    - ValueError: an argument that no store accepts (see `Record.check`).

    A method raises StoreFull or NodeTaken only where its docstring says so. A garbled field inside
    a record makes the record a miss, never an error.

    Retries: every operation may be repeated after StoreUnavailable. All are idempotent, except that
    `add_hits` and `add_stats` may then count twice.

    Order: what a caller has awaited takes effect before what it calls next. An operation that
    failed with StoreUnavailable may still take effect later, even after operations that were called
    after it: a frozen server executes what it has received when it resumes.
    """

    has_mirror: ClassVar[bool] = False
    """Whether `mirror` returns one. Without, a node calls the store for each look-up, and polls it
    while it waits for a key."""

    @abstractmethod
    async def publish_many(self, publishings: Sequence[Publishing]) -> list[Publication]:
        """Add each `location` to the record of its key, in one round trip.

        Returns one Publication for each element, in their order. `record.locations` is ignored.

        - An existing record must agree in dtype, shape, nbytes and kind. If it does not, or if the
          key holds a foreign value, the result is CONFLICT and nothing changes.
        - A node has at most one location in a record. A newer generation, or another boot, replaces
          its older one (ADDED). If the same or a newer generation of the boot is present, the
          result is PRESENT.
        - A record has at most LOCATIONS_MAX (4) nodes. One more is not added: FULL. FULL does not
          renew the record, so a record whose holders are all dead expires.
        - ADDED extends the life of the record to at least `ttl_seconds` from now; PRESENT does so
          if less than half of that is left, since a store may report each write to all that have
          read the record. Neither shortens it. Both remove the tombstone.
        - ADDED, PRESENT and FULL release the claim that `claim_token` holds.
        - With `sole` the key belongs to one node. If another node's location is present and is no
          offer (see `Location.is_offer`), the result is OWNED and nothing changes. Otherwise an
          older record of another shape is replaced instead of a CONFLICT.
        - Without memory on the server the result is REFUSED.
        - If the key's server was not reached, the result is UNREACHED. If no server was reached,
          StoreUnavailable is raised.
        """

    async def publish(
        self,
        record: Record,
        location: Location,
        *,
        ttl_seconds: float = TTL_SECONDS,
        claim_token: str | None = None,
    ) -> Publication:
        """Publish one location, as `publish_many` does. Raises StoreFull instead of REFUSED."""
        publishing = Publishing(record, location, ttl_seconds, claim_token)
        (publication,) = await self.publish_many([publishing])
        if publication is Publication.REFUSED:
            raise StoreFull(
                f"the store is out of memory, {record.key!r} was not published; raise maxmemory, "
                "or set maxmemory-policy volatile-lru"
            )
        return publication

    @abstractmethod
    async def look_up(self, items: Sequence[tuple[str, str]]) -> list[Found]:
        """Read the record of each (namespace, key), in their order. Does not renew them.

        Takes one round trip per 1,000 items, to all servers of a cluster at once. If an item's
        server was not reached, its result is the StoreUnavailable, not a miss. If no server was
        reached, it is raised. Records may name nodes that are dead: check them against `beats`.
        """

    async def locate(self, namespace: str, keys: Sequence[str]) -> list[Record | None]:
        """Read one namespace's records; an item whose server was not reached is a miss."""
        found = await self.look_up([(namespace, key) for key in keys])
        return [None if isinstance(one, StoreUnavailable) else one for one in found]

    def place_of(self, namespace: str, key: str) -> str:
        """Return the name of the server that holds the key, as far as it is known. Does no I/O.

        Keys with the same name here become unreachable together. Returns "" if the server is not
        known, or if there is only one.
        """
        return ""

    @abstractmethod
    async def withdraw_many(self, withdrawings: Sequence[Withdrawing]) -> list[bool | None]:
        """Remove a node's location from each record, in one round trip.

        Returns True where the location was present, else False; None if the key's server was not
        reached. If no server was reached, StoreUnavailable is raised. Works when memory is full.

        - Removing the last location removes the record and stores `reason` for `gone_seconds` (see
          `gone`).
        - If there is no record and `may_have_ended` is set, `reason` is stored as well, unless an
          earlier one is present.
        - With `exactly`, only that very location is removed. A reader that found it stale uses
          this, since the node may have published again in the meantime.
        """

    async def withdraw(
        self,
        namespace: str,
        key: str,
        location_node: str,
        *,
        reason: str,
        exactly: Location | None = None,
    ) -> bool:
        """Withdraw one location, as `withdraw_many` does."""
        (gone,) = await self.withdraw_many(
            [Withdrawing(namespace, key, location_node, reason, exactly)]
        )
        return bool(gone)

    @abstractmethod
    async def claim(
        self,
        namespace: str,
        key: str,
        *,
        holder: str,
        token: str,
        state: ClaimState,
        lease_seconds: float,
    ) -> ClaimAnswer:
        """Acquire the right to produce `key` for `lease_seconds`, if no other claimant holds it.

        Returns the claim as it is now, with its remaining seconds, and the key's record.

        Calling again with the same token:

        - ENCODING renews the lease; it changes an INTENT to ENCODING.
        - INTENT renews nothing. It keeps the remaining lease, and an ENCODING claim stays ENCODING.

        `token` is the fencing token: unguessable, 1 to 128 of A-Z a-z 0-9 . _ - (so no colon).
        `holder` names the claimant for waiters and for people; while the state does not change, the
        first text is kept. Raises StoreFull.
        """

    @abstractmethod
    async def release_many(self, releasings: Sequence[Releasing]) -> list[bool | None]:
        """Release claims, in one round trip; False where the token does not hold the claim.

        None if the key's server was not reached, as in `withdraw_many`. Works when memory is full.
        """

    async def release_claim(self, namespace: str, key: str, *, token: str) -> bool:
        """Release one claim, as `release_many` does."""
        (released,) = await self.release_many([Releasing(namespace, key, token)])
        return bool(released)

    @abstractmethod
    async def beat(
        self, node: str, boot: str, sequence: int, *, replacing: Beat | None = None
    ) -> bool:
        """Write a node's heartbeat. Works when memory is full.

        Returns True if this boot of the node was registered. Returns False for its first beat,
        after the server lost its data or its clock jumped ahead, so that records have expired, and
        after another node removed it as dead: then it has to publish everything again.

        Raises NodeTaken, and changes nothing, if another boot is registered under this node id.
        Exception: its beat equals `replacing`, the last beat of a boot that the caller has observed
        to be dead.
        """

    @abstractmethod
    async def leave(self, node: str, boot: str, *, reason: str = "stopped") -> None:
        """Remove the node with its description and counters, if its boot is still this one.

        Called by a node that stops, and by an observer that removes a dead node. `reason` is stored
        for a day, for people. Works when memory is full, except that `reason` is then not stored.
        """

    @abstractmethod
    async def beats(self) -> dict[str, Beat]:
        """Return the last beat of every registered node, by node id; dead nodes included.

        Of more than NODES_MAX nodes, any so many.
        """

    @abstractmethod
    async def describe_node(self, info: NodeInfo) -> None:
        """Store a node's endpoint and state for a day. Raises StoreFull."""

    @abstractmethod
    async def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        """Read the descriptions of `nodes`, in one round trip.

        Unknown nodes are left out, and so are those whose server was not reached. If no server was
        reached, StoreUnavailable is raised.
        """

    async def invalidations(self) -> dict[str, Invalidation]:
        """Return the last mark of each namespace: see `mark_invalid`.

        Of more than INVALIDATIONS_MAX namespaces, any so many.
        """
        return {}

    async def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        """A note for people. A BrowsableStore keeps it: see there."""
        return

    async def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        """A note for people. A BrowsableStore keeps it: see there."""
        return

    async def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        """A note for people. A BrowsableStore keeps it: see there."""
        return

    async def note_failures(self, failures: Sequence[Failure]) -> None:
        """A note for people. A BrowsableStore keeps it: see there."""
        return

    def failovers(self) -> int:
        """Return how many losses or replacements of a server calls have noticed. Does no I/O.

        Replication is asynchronous, so the last writes before such a change may be lost: then nodes
        publish again.
        """
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Close all connections. Idempotent. Pending calls end with StoreUnavailable."""

    def mirror(self, forgotten: Forgotten = lambda _: None) -> tuple[Mirror, MirrorClaims] | None:
        """A new mirror of this store's records, and claims over its connections; None without
        `has_mirror`.

        Called on the loop's thread. For `forgotten` see `Forgotten`. The mirror is closed before
        the store.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class BrowsableStore(MetadataStore):
    """What commands and the dashboard need besides. Errors and deadlines as in MetadataStore.

    It keeps what nodes write for people, too.
    """

    @abstractmethod
    async def describe_namespace(self, fingerprint: str, parts: Mapping[str, str]) -> None:
        """Store the parts of a namespace in clear text for a week, instead of those that it has.
        Raises StoreFull.
        """

    @abstractmethod
    async def add_hits(self, namespace: str, hits: Mapping[str, int]) -> None:
        """Add to the hits of keys; keep the 10,000 keys with the most. Raises StoreFull."""

    @abstractmethod
    async def add_stats(self, node: str, counters: Mapping[str, int]) -> None:
        """Add to a node's counters, kept for a week. A counter stays at COUNTER_MAX.

        Raises StoreFull.
        """

    @abstractmethod
    async def note_failures(self, failures: Sequence[Failure]) -> None:
        """Store the last failed fetch of each key for an hour, for people. Raises StoreFull."""

    @abstractmethod
    async def mark_invalid(self, namespace: str, mark: Invalidation) -> None:
        """Order all nodes to drop their items of the namespace; kept for a week, in place of its
        last mark.

        A node heeds each mark once; of those that it finds when it reads for the first time, the
        ones that are not older than its own start by more than a minute. Raises StoreFull.
        """

    @abstractmethod
    async def invalidations(self) -> dict[str, Invalidation]:
        """Return the last mark of each namespace."""

    @abstractmethod
    async def node_ages(self, nodes: Sequence[str]) -> dict[str, float]:
        """Return the seconds since each node last described itself, in one round trip.

        Measured by the server's clock. Unknown nodes are left out. A live node describes itself
        each second, so this shows without a wait which nodes are alive.
        """

    @abstractmethod
    async def namespaces(self) -> dict[str, dict[str, str]]:
        """Return the parts of every described namespace. Scans the whole server: for tools only."""

    @abstractmethod
    async def hits(self, namespace: str, keys: Sequence[str]) -> list[int]:
        """Return the hits of `keys`, in their order; 0 for an unknown key."""

    @abstractmethod
    async def stats(self) -> dict[str, dict[str, int]]:
        """Return the counters of every registered node, by node id."""

    @abstractmethod
    def scan(
        self, namespace: str | None = None, *, limit: int | None = None
    ) -> AsyncIterator[Record]:
        """Iterate over at most `limit` records of one namespace, or of all.

        Reads in pages, so no single command blocks the server for long. A record that exists during
        the whole scan appears at least once, in rare cases twice. One that is created or removed
        meanwhile may or may not appear. Each page is an operation with its own deadline and errors.
        """

    @abstractmethod
    async def gone(self, namespace: str, key: str) -> str | None:
        """Return why the key's last location was removed, for `gone_seconds`; None if unknown."""

    @abstractmethod
    async def failure(self, namespace: str, key: str) -> Failure | None:
        """Return the last failed fetch of the key within the last hour."""

    @abstractmethod
    async def clear(self, namespace: str) -> int:
        """Remove all records of a namespace, with `GoneReason.INVALIDATED`; return how many.

        Works in pages, as `scan` does. Nodes that hold a copy may publish it again: see
        `mark_invalid`. Works when memory is full.
        """

    @abstractmethod
    async def server_info(self) -> ServerInfo:
        """Return product, version, memory and policy of the server; of a cluster the total
        memory.
        """

    @abstractmethod
    async def ping(self) -> float:
        """Return the seconds that one round trip takes."""

    def traces(self) -> "Traces | None":
        """Everything that is stored about single keys; None if it cannot say.

        Needed by `why`, `top` and the dashboard, and by `show` for a part of a key.
        """
        return None

    def inspection(self) -> "Inspection | None":
        """Checks of Redis' servers, for `doctor`; None if there are none."""
        return None


class Traces(ABC):
    """The history of keys and nodes, to explain misses. Errors are those of MetadataStore."""

    @abstractmethod
    async def of(self, addresses: Sequence[Address]) -> list[Trace]:
        """The trace of each key, in their order."""

    @abstractmethod
    def find(self, part: str) -> AsyncIterator[Address]:
        """Iterate over (namespace, key) of keys that contain `part`; some come twice. Scans the
        server.
        """

    @abstractmethod
    async def hottest(self, namespaces: Sequence[str], most: int) -> dict[Address, int]:
        """Hits of the `most` keys with the most hits in each namespace; of those, the ones with the
        most hits whose names have HOTTEST_CHARACTERS_MAX (`store.trace`) together.
        """

    @abstractmethod
    async def departures(self, nodes: Sequence[str]) -> dict[str, Departure]:
        """How each node ended, as far as it is known."""


class Inspection(ABC):
    """Checks of the servers behind a store. Errors are those of MetadataStore."""

    @abstractmethod
    async def refused(self, *, read_only: bool = False, mirrored: bool = True) -> Refused | None:
        """The commands of a node that the servers deny by ACL or do not know; None if all are
        allowed. `read_only`: only those of a node that writes nothing; not `mirrored`: of one
        without a mirror."""

    @abstractmethod
    async def allowed_beyond_reads(self, *, mirrored: bool) -> Sequence[str]:
        """The commands that all servers allow and that a node that only reads does not need."""

    @abstractmethod
    async def clock_ahead_seconds(self) -> float | None:
        """How many seconds a server's clock is ahead of ours; the largest difference of all
        servers. None if it is unknown.
        """

    @abstractmethod
    async def foreign_nodes(self) -> Mapping[str, str]:
        """Foreign values under the names of the node list and node descriptions: key name and
        type.
        """

    @abstractmethod
    async def examine_records(self, limit: int) -> Examined:
        """Read up to `limit` records, and name those that readers of this version miss."""
