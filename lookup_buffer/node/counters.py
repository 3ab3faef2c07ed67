"""The node's counters: what happened, by reason. Names form a closed set; see `COUNTERS`.

Any thread may count. Totals are for clients of the node; deltas go to Redis in batches, and so do
hits per key, so that a hit never costs a round trip.

A histogram of seconds with fixed buckets, as Prometheus wants it: cumulative, and a sum.

Any thread may observe. It costs 0.5 µs, for it is on the way of every transfer.
"""

import threading
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Final

from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.inventory import Item
from lookup_buffer.protocol.messages import LANES, ClaimOutcome, Fallback
from store import GoneReason

BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""From a small tensor on one rack to 130 MB over a slow link; what is beyond has a bucket too."""


class Histogram:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self._sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
            self._sum_seconds += seconds

    def read(self) -> tuple[list[int], float]:
        """How many took at most each of `BOUNDS_SECONDS`, and how many in all; their sum."""
        with self._lock:
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
)
"""Those that a node counts."""
FETCH_FAILURES: Final = (
    MissReason.STALE,
    MissReason.CHECKSUM,
    MissReason.PEER_FAILED,
    MissReason.NO_ROOM,
)
"""Why one source was passed over, whether or not another had the tensor."""
REMOVAL_REASONS: Final = (GoneReason.EVICTED, GoneReason.EXPIRED, GoneReason.INVALIDATED)
"""Why what may be had from here is here no more, but by its taker."""
RENEWED: Final = "renewed"
"""A claim that its engine had already was granted again."""
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
"""Encodes that were timed, and how long they took in all: `Counters.encode_seconds`, for Redis."""
HITS_KEYS_MAX: Final = 100_000
"""Bound on keys whose hits wait for a store that is away; the hits of further keys are not kept."""


class Counters:
    """Totals since the node's start, and what has not been flushed yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._unflushed: Counter[str] = Counter()
        self._hits: Counter[QualifiedKey] = Counter()
        self.fetch_seconds = Histogram()
        """Of fetches that brought the tensor, from the request to the verified bytes."""
        self.encode_seconds = Histogram()
        """Of encodes that ended with their output here, from the step that was to run them."""

    def add(self, name: str, amount: int = 1) -> None:
        assert name in COUNTERS, name
        with self._lock:
            self._totals[name] += amount
            self._unflushed[name] += amount

    def spare(self, encodes: int) -> None:
        """Readers were engines that need not encode what they got."""
        if encodes:
            self.add("encodes_saved", encodes)

    def encoded(self, seconds: float) -> None:
        """An engine stored what it had said that it encodes so long before."""
        self.encode_seconds.observe(seconds)
        with self._lock:
            for name, amount in ((ENCODES, 1), (ENCODE_MILLISECONDS, round(seconds * 1e3))):
                self._totals[name] += amount
                self._unflushed[name] += amount

    def hit(self, item: Item, count: int = 1) -> None:
        """Readers got `item`, that a client of this node stored or that was fetched."""
        with self._lock:
            self._count_source(item, count)
            self._count_hits(item.address, count)

    def hit_lane(self, address: QualifiedKey, nbytes: int) -> None:
        """A reader's process has the bytes in its pool."""
        with self._lock:
            self._count_to("lane", 1, nbytes)
            self._count_hits(address, 1)

    def hit_handoff(self, item: Item, count: int = 1) -> None:
        """Not by key: each is hit once, and would drive what is hit often out of the list."""
        with self._lock:
            self._count_source(item, count)

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def take_unflushed(self) -> tuple[dict[str, int], dict[QualifiedKey, int]]:
        """Counters and hits since the last call; give them back by `put_back` on failure."""
        with self._lock:
            counters, hits = self._unflushed, self._hits
            self._unflushed, self._hits = Counter(), Counter()
        return dict(counters), dict(hits)

    def put_back(self, counters: dict[str, int], hits: dict[QualifiedKey, int]) -> None:
        with self._lock:
            self._unflushed.update(counters)
            for address, count in hits.items():
                self._count_hits(address, count)

    def _count_source(self, item: Item, count: int) -> None:
        source = "local" if item.origin == "local" else "remote"
        self._count_to(source, count, count * item.nbytes)

    def _count_to(self, source: str, count: int, nbytes: int) -> None:
        for name, amount in ((f"hits_{source}", count), (f"bytes_hit_{source}", nbytes)):
            self._totals[name] += amount
            self._unflushed[name] += amount

    def _count_hits(self, address: QualifiedKey, count: int) -> None:
        if address in self._hits or len(self._hits) < HITS_KEYS_MAX:
            self._hits[address] += count
