"""The dirty set: which addresses must be written to the store, and in which order.

An address is in it once, however often it changed: the publisher writes what the arena holds at
that moment. Hand-offs that became available come first, since their producers and perhaps their
takers wait; then other new changes, those of a sequence together. Rewrites (a walk of the
inventory, a store that lost its data) come last and at a bounded rate. Changes whose server of a
cluster was not reached are held apart by server until `retry`, so that they do not delay the
others. A write that got no answer may still take effect, even after a later one, for example when a
frozen server resumes. So once such an address was written, it is written again, as a rewrite.
`registrar` adds, `publisher` takes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.times import Clock
from store import Location

BATCH = 64
"""Changes in one round trip: at most a millisecond of the server's time."""
TOGETHER_SECONDS = 0.001
"""After a batch, new changes that are fewer than a batch wait so long for more of them: a round
trip for each would take as long as the insert that caused it. The first change after a pause does
not wait."""
AGAIN_PER_SECOND_MAX = 2000.0
"""Bound on rewrites by one node: a tenth of what the whole fleet may cost a server."""
FRESH_MAX = 1_000_000
"""Bound on new changes; beyond it the oldest are dropped. Their records may then name bytes that
this node no longer has; a reader gets `stale` and tries the next holder."""
RECENT_SECONDS = 60.0
"""Far longer than a replica lags behind: writes within this time may be lost in a failover."""


@dataclass(frozen=True, slots=True)
class Change:
    """The item at `address` appeared (reason "") or was removed (why)."""

    address: QualifiedKey
    reason: str
    claim_token: str | None = None
    """The fencing token of the claim under which it was produced; the publication drops that
    claim."""
    void: tuple[Location, ...] = ()
    """Locations of nodes that replied that they do not have it: withdrawn before the
    publication."""
    paced: bool = field(default=False, compare=False)
    """Written before, and now again: after new changes and at a bounded rate."""


class DirtySet:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._limiter = RateLimiter(AGAIN_PER_SECOND_MAX, BATCH, clock)
        self._urgent: dict[QualifiedKey, Change] = {}
        """Hand-offs that appeared: bounded by the arena."""
        self._fresh: dict[QualifiedKey, Change] = {}
        self._held: dict[str, dict[QualifiedKey, Change]] = {}
        """By server, see `hold`: not due before `retry`."""
        self._again: dict[QualifiedKey, Change] = {}
        """Rewrites of what is in none of the queues above."""
        self._walk: list[QualifiedKey] = []
        """Rewrites of the inventory, the next one last. They become changes only when it is their
        turn: 200,000 changes at once would block the loop for a second."""
        self._walk_began_at = 0.0
        """What was written later needs no rewriting."""
        self._recent: dict[QualifiedKey, tuple[float, Change]] = {}
        """What was written within RECENT_SECONDS and when, as rewrites; the oldest first."""
        self._taken_at = -math.inf
        """When new changes were taken last."""
        self._doubtful: set[QualifiedKey] = set()
        """Their last write got no answer."""

    def add(self, change: Change) -> bool:
        """Returns whether `wait_seconds` may be shorter now."""
        self._add(change)
        return bool(self._urgent) or len(self._fresh) in (1, BATCH)

    def walk(self, addresses: Sequence[QualifiedKey], per_second: float) -> None:
        """Write `addresses` again, in this order and at most `per_second`. The walk before has
        ended, see `walking`."""
        self._limiter.per_second = per_second
        self._walk, self._walk_began_at = list(reversed(addresses)), self._clock()

    @property
    def walking(self) -> bool:
        """Whether a walk has not ended."""
        return bool(self._walk)

    def repeat_recent(self) -> None:
        """Write again what was written within RECENT_SECONDS."""
        self._forget_old()
        for _, change in self._recent.values():
            self._add_again(change)

    def take(self, most: int = BATCH) -> list[Change]:
        """Remove and return up to `most` changes that are due. Return those that could not be
        written by `put_back` or `hold`, and report the others by `written`."""
        fresh = _pop_first(self._urgent, most)
        fresh += _pop_first(self._fresh, most - len(fresh))
        self._forget_old()
        if fresh:
            self._taken_at = self._clock()
        for change in fresh:
            self._recent.pop(change.address, None)
            written = Change(change.address, change.reason, paced=True)
            self._recent[change.address] = (self._taken_at, written)
        room = self._limiter.take(min(most - len(fresh), self._count_again()))
        again = _pop_first(self._again, room)
        return fresh + again + self._walk_on(room - len(again))

    def written(self, changes: Iterable[Change]) -> None:
        """These were written; those in doubt are written once more."""
        for change in changes if self._doubtful else ():
            if change.address in self._doubtful:
                self._doubtful.discard(change.address)
                self._add_again(Change(change.address, change.reason, paced=True))

    def put_back(self, changes: Iterable[Change]) -> None:
        """Return changes that were not written, each to the end of its queue.

        A newer change of the same address wins.
        """
        for change in changes:
            self._doubt(change)
            self._return(change)

    def hold(self, change: Change, place: str) -> None:
        """As `put_back`, for a change that is not due before `retry`, as its server, `place`, was
        not reached."""
        self._doubt(change)
        if self._queue_of(change.address) is not None:
            self._return(change)
            return
        self._held.setdefault(place, {})[change.address] = change
        if self._count_held() > FRESH_MAX:
            longest = max(self._held.values(), key=len)
            del longest[next(iter(longest))]

    def retry(self, most: int = BATCH) -> set[str]:
        """Make up to `most` of the held changes due: some of each server, those first that were
        held longest. Returns the names of the servers."""
        places = set(self._held)
        for place in places:
            self.retry_place(place, max(1, most // len(places)))
        return places

    def retry_place(self, place: str, most: int) -> int:
        """Make up to `most` held changes of this server due. Returns how many are still held."""
        held = self._held.get(place, {})
        for change in _pop_first(held, most):
            self._return(change)
        if not held:
            self._held.pop(place, None)
        return len(held)

    def wait_seconds(self) -> float | None:
        """Seconds until what `take` returns is worth a round trip; None if the set is empty."""
        if self._urgent or len(self._fresh) >= BATCH:
            return 0.0
        waits = []
        if self._fresh:
            waits.append(max(0.0, self._taken_at + TOGETHER_SECONDS - self._clock()))
        if again := self._count_again():
            waits.append(self._limiter.wait_seconds(again))
        return min(waits, default=None)

    def __len__(self) -> int:
        new = len(self._urgent) + len(self._fresh)
        return new + self._count_again() + self._count_held()

    def _count_again(self) -> int:
        return len(self._again) + len(self._walk)

    def _count_held(self) -> int:
        return sum(map(len, self._held.values()))

    def _queue_of(self, address: QualifiedKey) -> dict[QualifiedKey, Change] | None:
        """Where its change is, unless there is none, or only a rewrite."""
        queues = (self._urgent, self._fresh, *self._held.values())
        return next((queue for queue in queues if address in queue), None)

    def _add(self, change: Change) -> None:
        self._again.pop(change.address, None)
        queue = self._queue_of(change.address)
        older = None if queue is None else queue.pop(change.address)
        if older is not None and change.claim_token is None:
            change = replace(change, claim_token=older.claim_token)
        if not change.reason and is_handoff(change.address[1]):
            self._urgent[change.address] = change
            return
        self._fresh[change.address] = change
        if len(self._fresh) > FRESH_MAX:
            del self._fresh[next(iter(self._fresh))]

    def _add_again(self, change: Change) -> None:
        if self._queue_of(change.address) is None:
            self._again.setdefault(change.address, change)

    def _return(self, change: Change) -> None:
        if change.paced:
            self._add_again(change)
            return
        queue = self._queue_of(change.address)
        newer = None if queue is None else queue.pop(change.address)
        self._add(change)
        if newer is not None:
            self._add(newer)

    def _doubt(self, change: Change) -> None:
        if len(self._doubtful) < FRESH_MAX:
            self._doubtful.add(change.address)

    def _walk_on(self, most: int) -> list[Change]:
        """The next `most` addresses of the walk, less those that were or will be written since."""
        begin, never = max(0, len(self._walk) - most), (-math.inf, None)
        self._walk[begin:], addresses = [], self._walk[begin:]
        return [
            Change(address, "", paced=True)
            for address in reversed(addresses)
            if address not in self._again
            and self._queue_of(address) is None
            and self._recent.get(address, never)[0] < self._walk_began_at
        ]

    def _forget_old(self) -> None:
        bound = self._clock() - RECENT_SECONDS
        while self._recent:
            address, (written_at, _) = next(iter(self._recent.items()))
            if written_at >= bound:
                return
            del self._recent[address]


def _pop_first(changes: dict[QualifiedKey, Change], most: int) -> list[Change]:
    return [changes.pop(address) for address in list(islice(changes, most))]


class RateLimiter:
    """Allows `per_second` on average, and after a pause up to `at_once` together."""

    def __init__(self, per_second: float, at_once: int, clock: Clock) -> None:
        self.per_second = per_second
        self._at_once = at_once
        self._clock = clock
        self._credit = float(at_once)
        self._credited_at = clock()

    def take(self, most: int) -> int:
        """How many of `most` are allowed now; they are counted as done."""
        self._earn()
        taken = min(most, int(self._credit))
        self._credit -= taken
        return taken

    def wait_seconds(self, wanted: int) -> float:
        """Seconds until `wanted` are allowed at once, or the largest possible burst."""
        self._earn()
        lacking = min(wanted, self._at_once) - self._credit
        return max(0.0, lacking / self.per_second)

    def _earn(self) -> None:
        now = self._clock()
        earned = (now - self._credited_at) * self.per_second
        # Rounded, so that it is whole after `wait_seconds`.
        self._credit = min(round(self._credit + earned, 9), float(self._at_once))
        self._credited_at = now
