"""The node's counters, by reason, histograms of seconds, and the last failed fetches.

The names of counters form a closed set, `COUNTERS`. Clients of the node and `/metrics` get totals;
Redis gets differences in batches, and hits per key likewise, so that a hit costs no round trip. A
counter stays at COUNTER_MAX: the reads that clients report, times the bytes of their items, may be
more than a message and the store can hold. A histogram has fixed buckets, cumulative as Prometheus
requires, and a sum.

Most modules of the node count here. `registrar` flushes the differences; this module does not know
how the figures are published.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import accumulate, islice
from typing import Final, TypeVar

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.items import Item
from lookup_buffer.protocol.fields import LANES, Fallback
from lookup_buffer.protocol.messages import ClaimOutcome
from store import COUNTER_MAX, GoneReason

_Name = TypeVar("_Name")
BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds: from a small tensor on one rack to 130 MB over a slow link. Longer times have a
bucket of their own."""


class Histogram:
    """Durations in seconds, counted in the buckets of BOUNDS_SECONDS."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self._sum_seconds += seconds

    def read(self) -> tuple[list[int], float]:
        """Cumulative counts, one for each of `BOUNDS_SECONDS` and one for all; the sum."""
        return list(accumulate(self._counts)), self._sum_seconds


MISS_REASONS: Final = (
    MissReason.ABSENT,
    MissReason.OWNER_DEAD,
    MissReason.STALE,
    MissReason.CHECKSUM,
    MissReason.PEER_FAILED,
    MissReason.STORE_DOWN,
    MissReason.TIMEOUT,
    MissReason.NO_ROOM,
    MissReason.TAKEN,
    MissReason.BUSY,
)
"""The reasons of misses that a node counts."""
FETCH_FAILURES: Final = (
    MissReason.STALE,
    MissReason.CHECKSUM,
    MissReason.PEER_FAILED,
    MissReason.NO_ROOM,
    MissReason.BUSY,
)
"""Why a fetch from one source failed, whether or not another source had the tensor."""
REMOVAL_REASONS: Final = (GoneReason.EVICTED, GoneReason.EXPIRED, GoneReason.INVALIDATED)
"""Why this node removed an item that readers could find, other than by its taker."""
RENEWED: Final = "renewed"
"""A claim was granted again to the engine that already held it."""
UNASKED: Final = "unasked"
"""A claim was granted because the store did not answer."""
CLAIM_ANSWERS: Final = (
    ClaimOutcome.GRANTED,
    RENEWED,
    ClaimOutcome.HELD,
    ClaimOutcome.STORED,
    UNASKED,
)
COUNTERS: Final = frozenset(
    {
        "hits_local",
        "hits_remote",
        "hits_lane",
        "encodes_saved",
        "inserts_stored",
        "inserts_exists",
        "inserts_refused",
        "handoffs_taken",
        "handoffs_returned",
        "handoffs_elsewhere",
        *REMOVAL_REASONS,
        "bytes_inserted",
        "bytes_fetched",
        "bytes_served",
        "bytes_hit_local",
        "bytes_hit_remote",
        "bytes_hit_lane",
        *(f"lane_received_{lane}" for lane in LANES),
        *(f"bytes_lane_{lane}" for lane in LANES),
        *(f"lane_fallbacks_{reason}" for reason in Fallback),
        *(f"claims_{answer}" for answer in CLAIM_ANSWERS),
        "publish_written",
        "publish_refused",
        "publish_conflict",
        "store_failures",
        "protocol_errors",
        "sessions_opened",
        *(f"misses_{reason}" for reason in MISS_REASONS),
        *(f"fetches_failed_{reason}" for reason in FETCH_FAILURES),
    }
)


ENCODES: Final = "encodes"
ENCODE_MILLISECONDS: Final = "encode_milliseconds"
"""The number of timed encodes, and their total time: `Counters.encode_seconds`, for Redis."""
HITS_KEYS_MAX: Final = 100_000
"""Most keys whose hits are kept while the store is away; hits of further keys are dropped."""
HITS_CHARACTERS_MAX: Final = 32 << 20
"""The same for the characters of their addresses, which keys of 250 characters do not reach."""
FAILURES_MAX: Final = 64
"""Most failed fetches that are noted between two beats; others are dropped."""


class Counters:
    """Totals since the node's start, and the part that is not flushed yet."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._flushed: Counter[str] = Counter()
        self._hits: Counter[QualifiedKey] = Counter()
        self._hits_characters = 0
        """Of their addresses."""
        self._failures: dict[QualifiedKey, tuple[str, str]] = {}
        self.fetch_seconds = Histogram()
        """Successful fetches, from the request to the verified bytes."""
        self.loop_blocked_seconds = Histogram()
        """Iterations of the node's loop that were longer than `main.BLOCKED_SECONDS`."""
        self.encode_seconds = Histogram()
        """Encodes whose output was stored here, from the step that was to run them."""

    def add(self, name: str, amount: int = 1) -> None:
        assert name in COUNTERS, name
        _grow(self._totals, name, amount)

    def miss(self, reason: MaybeMissed) -> None:
        self.add(f"misses_{reason or MissReason.ABSENT}")

    def spare(self, encodes: int) -> None:
        """Count encodes that engines were spared, because they read the output."""
        if encodes:
            self.add("encodes_saved", encodes)

    def encoded(self, seconds: float) -> None:
        """An engine stored an output, `seconds` after it reported the start of the encode."""
        self.encode_seconds.observe(seconds)
        _grow(self._totals, ENCODES, 1)
        _grow(self._totals, ENCODE_MILLISECONDS, round(seconds * 1e3))

    def hit(self, item: Item, count: int = 1, *, by_key: bool = True) -> None:
        """Count hits of `item`, local or remote by its origin, and by its key; not those of a
        hand-off that is taken: each is hit once, and would displace hot keys."""
        source = "local" if item.origin == "local" else "remote"
        self._count_to(source, count, count * item.nbytes)
        if by_key:
            self._count_hits(item.address, count)

    def hit_lane(self, address: QualifiedKey, nbytes: int) -> None:
        """Count a hit whose bytes are in the device pool of the reader's process."""
        self._count_to("lane", 1, nbytes)
        self._count_hits(address, 1)

    def totals(self) -> dict[str, int]:
        return dict(self._totals)

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        return {
            "fetch_seconds": self.fetch_seconds.read(),
            "encode_seconds": self.encode_seconds.read(),
            "loop_blocked_seconds": self.loop_blocked_seconds.read(),
        }

    def take_unflushed(self, keys_max: int = HITS_KEYS_MAX) -> dict[str | None, dict[str, int]]:
        """What was counted since the last call: None → counters, each namespace → hits by key, of
        `keys_max` keys at most, those first that were hit first. On failure return it by
        `put_back`."""
        taken: defaultdict[str | None, dict[str, int]] = defaultdict(dict)
        if counters := self._totals - self._flushed:
            taken[None] = counters
            self._flushed = self._totals.copy()
        for address in list(islice(self._hits, keys_max)):
            namespace, key = address
            taken[namespace][key] = self._hits.pop(address)
            self._hits_characters -= sum(map(len, address))
        return dict(taken)

    def put_back(self, namespace: str | None, counts: dict[str, int]) -> None:
        if namespace is None:
            self._flushed.subtract(counts)
            return
        for key, count in counts.items():
            self._count_hits((namespace, key), count)

    def fetch_failed(self, address: QualifiedKey, reason: str, holder: str) -> None:
        """The fetch of `address` from `holder` failed because of `reason`, which no record
        explains."""
        if len(self._failures) < FAILURES_MAX or address in self._failures:
            self._failures[address] = (reason, holder)

    def take_failures(self) -> dict[QualifiedKey, tuple[str, str]]:
        """The failed fetches since the last call: reason and holder by address."""
        failures, self._failures = self._failures, {}
        return failures

    def _count_to(self, source: str, count: int, nbytes: int) -> None:
        self.add(f"hits_{source}", count)
        self.add(f"bytes_hit_{source}", nbytes)

    def _count_hits(self, address: QualifiedKey, count: int) -> None:
        if address not in self._hits:
            characters = self._hits_characters + sum(map(len, address))
            if len(self._hits) >= HITS_KEYS_MAX or characters > HITS_CHARACTERS_MAX:
                return
            self._hits_characters = characters
        _grow(self._hits, address, count)


def _grow(counter: Counter[_Name], name: _Name, amount: int) -> None:
    counter[name] = min(counter[name] + amount, COUNTER_MAX)
