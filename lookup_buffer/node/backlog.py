"""The backlog: which addresses are still to be written to the store, and in what order.

An address is in it once, however often it changed: what is written is what the shelf holds when
its turn comes. Hand-offs that can be had come first, for their producers wait, and maybe their
takers; then the other fresh changes. What was written before and is written again (a walk of
the inventory, a store that lost its data) comes behind them and at a bounded pace.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.pace import Pace
from store import Location

BATCH = 64
"""Changes in one round trip: a millisecond of the server's time at most."""
AGAIN_PER_SECOND_MAX = 2000.0
"""Bound on rewriting, by one node: a tenth of what the fleet together may cost a server."""
FRESH_MAX = 1_000_000
"""Bound on fresh changes; past it the oldest are forgotten, which leaves records that name bytes
we no longer have: a reader asks, hears so, and goes on."""
RECENT_SECONDS = 60.0
"""Far longer than a replica lags behind: what was written in it may be lost by a failover."""


@dataclass(frozen=True, slots=True)
class Change:
    """The item at `address` appeared (reason "") or went (why)."""

    address: QualifiedKey
    reason: str
    claim_token: str | None = None
    """Of the claim under which it was produced; the publication drops it."""
    void: tuple[Location, ...] = ()
    """Of nodes that were asked and do not have it: withdrawn before it is published."""
    paced: bool = field(default=False, compare=False)
    """Written before, and now again: behind what is fresh, and at a bounded pace."""


class Backlog:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pace = Pace(AGAIN_PER_SECOND_MAX, BATCH, clock)
        self._urgent: dict[QualifiedKey, Change] = {}
        """Hand-offs that appeared: no more than the arena holds."""
        self._fresh: dict[QualifiedKey, Change] = {}
        self._again: dict[QualifiedKey, Change] = {}
        self._recent: dict[QualifiedKey, tuple[float, Change]] = {}

    def add(self, change: Change) -> None:
        with self._lock:
            self._add(change)

    def repeat(self, addresses: Iterable[QualifiedKey], per_second: float) -> None:
        """Write these again, in this order and at most so many a second."""
        with self._lock:
            self._pace.per_second = per_second
            for address in addresses:
                self._add_again(Change(address, "", paced=True))

    def repeat_recent(self) -> None:
        """Write again what was written within the last minute."""
        with self._lock:
            self._forget_old()
            for _, change in self._recent.values():
                self._add_again(change)

    def take(self, most: int = BATCH) -> list[Change]:
        """What to write now, out of the backlog. Give it back by `put_back` where that fails."""
        with self._lock:
            fresh = _pop_first(self._urgent, most)
            fresh += _pop_first(self._fresh, most - len(fresh))
            self._forget_old()
            for change in fresh:
                self._recent.pop(change.address, None)
                written = Change(change.address, change.reason, paced=True)
                self._recent[change.address] = (self._clock(), written)
            room = self._pace.take(min(most - len(fresh), len(self._again)))
            return fresh + _pop_first(self._again, room)

    def put_back(self, changes: Iterable[Change]) -> None:
        """These were not written: each goes back to where it came from, behind the others there.

        What changed meanwhile stays as it is.
        """
        with self._lock:
            for change in changes:
                if change.paced:
                    self._add_again(change)
                    continue
                newer = self._pop(change.address)
                self._add(change)
                if newer is not None:
                    self._add(newer)

    def wait_seconds(self) -> float | None:
        """Until `take` has something worth a round trip; None where there is nothing."""
        with self._lock:
            if self._urgent or self._fresh:
                return 0.0
            return self._pace.wait_seconds(len(self._again)) if self._again else None

    def __len__(self) -> int:
        with self._lock:
            return len(self._urgent) + len(self._fresh) + len(self._again)

    def _add(self, change: Change) -> None:
        self._again.pop(change.address, None)
        older = self._pop(change.address)
        if older is not None and change.claim_token is None:
            change = replace(change, claim_token=older.claim_token)
        if not change.reason and is_handoff(change.address[1]):
            self._urgent[change.address] = change
            return
        self._fresh[change.address] = change
        if len(self._fresh) > FRESH_MAX:
            del self._fresh[next(iter(self._fresh))]

    def _pop(self, address: QualifiedKey) -> Change | None:
        return self._urgent.pop(address, None) or self._fresh.pop(address, None)

    def _add_again(self, change: Change) -> None:
        if change.address not in self._urgent and change.address not in self._fresh:
            self._again.setdefault(change.address, change)

    def _forget_old(self) -> None:
        bound = self._clock() - RECENT_SECONDS
        while self._recent:
            address, (written_at, _) = next(iter(self._recent.items()))
            if written_at >= bound:
                return
            del self._recent[address]


def _pop_first(changes: dict[QualifiedKey, Change], most: int) -> list[Change]:
    return [changes.pop(address) for address in list(islice(changes, most))]
