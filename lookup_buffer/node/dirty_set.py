"""The dirty set: which addresses must be written to the store, and in which order.

An address is in it once, however often it changed: the registrar writes what the arena holds at
that moment. Hand-offs that became available come first, since their producers and perhaps their
takers wait; then other new changes, those of a sequence together. Rewrites (a walk of the
inventory, a store that lost its data) come last and at a bounded rate. Changes whose server of a
cluster was not reached, or has no memory for them, are held apart by server until one of them was
written there, so that they do not delay the others. A write that got no answer may still take
effect, even after a later one, for example when a frozen server resumes. So once such an address
was written, it is written again, as a rewrite. `registrar` adds and takes.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeVar

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
CHANGE_BYTES: Final = 512
"""What one occupies beside the text of its address: 0.3 to 0.4 KB measured."""
WAITING_BYTES_MAX = 128 << 20
"""Bound on all that waits to be written, beside hand-offs: 200,000 changes with addresses of 130
characters. Beyond it the oldest are dropped. Their records may then name bytes that this node no
longer has; a reader gets `stale` and tries the next holder."""
RECENT_BYTES_MAX = 64 << 20
"""The same for what was written within RECENT_SECONDS."""
RECENT_SECONDS = 60.0
"""Far longer than a replica lags behind: writes within this time may be lost in a failover."""
FORGOTTEN_AT_ONCE = 1024
"""Bound on the older ones that one `take` forgets: a millisecond or two, and far more than it
adds."""


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
    unanswered_by: str | None = field(default=None, compare=False)
    """The server that did not answer its last write, or refused it; None if there was none."""

    def over(self, older: "Change | None") -> "Change":
        """This change in place of an older one of the same address, whose claim and doubt stay."""
        if older is None:
            return self
        by = older.unanswered_by if self.unanswered_by is None else self.unanswered_by
        token = older.claim_token if self.claim_token is None else self.claim_token
        paced = self.paced and older.paced
        return replace(self, claim_token=token, paced=paced, unanswered_by=by)


V = TypeVar("V")


class _Queue(OrderedDict[QualifiedKey, V]):
    """The oldest first. It counts what it occupies; only `del` removes any.

    Not a plain dict: to find the first of one walks over all that were removed there before.
    """

    nbytes = 0

    def __setitem__(self, address: QualifiedKey, value: V) -> None:
        if address not in self:
            self.nbytes += _bytes_of(address)
        super().__setitem__(address, value)

    def __delitem__(self, address: QualifiedKey) -> None:
        super().__delitem__(address)
        self.nbytes -= _bytes_of(address)

    def take(self, most: int) -> list[V]:
        """Remove and return the oldest."""
        return [self.take_at(address) for address in list(islice(self, most))]

    def take_at(self, address: QualifiedKey) -> V:
        value = self[address]
        del self[address]
        return value


def _bytes_of(address: QualifiedKey) -> int:
    return CHANGE_BYTES + sum(map(len, address))


class DirtySet:
    """Each address is in one of its queues at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._urgent = _Queue[Change]()
        """Hand-offs that appeared: bounded by the arena."""
        self._fresh = _Queue[Change]()
        self._again = _Queue[Change]()
        """Rewrites."""
        self._held: dict[str, _Queue[Change]] = {}
        """By server, see `hold`: not due."""
        self._back: set[str] = set()
        """Of these servers, those that were reached again."""
        self._walk: list[QualifiedKey] = []
        """Rewrites of the inventory, the next one last. They become changes only when it is their
        turn: 200,000 changes at once would block the loop for a second."""
        self._walk_began_at = 0.0
        """What was written later needs no rewriting."""
        self._per_second = AGAIN_PER_SECOND_MAX
        self._again_from = -math.inf
        """Rewrites may use the time since then, at `_per_second`; after a pause a batch at once."""
        self._recent = _Queue[tuple[float, str]]()
        """What was written within RECENT_SECONDS: when, and its reason; the oldest first."""
        self._repeating = 0
        """So many of them are to be written again, at most: the first ones, also in their turn."""
        self._repeat_began_at = 0.0
        self._taken_at = -math.inf
        """When new changes were taken last."""

    def add(self, change: Change) -> bool:
        """Returns whether `wait_seconds` may be shorter now."""
        self._queue(change.over(self._pop(change.address)))
        return bool(self._urgent) or len(self._fresh) in (1, BATCH)

    def walk(self, addresses: Sequence[QualifiedKey], per_second: float) -> None:
        """Write `addresses` again, in this order and at most `per_second`. The walk before has
        ended, see `walking`."""
        self._per_second = per_second
        self._walk, self._walk_began_at = list(reversed(addresses)), self._clock()

    @property
    def walking(self) -> bool:
        """Whether a walk has not ended."""
        return bool(self._walk)

    def repeat_recent(self) -> None:
        """Write again what was written within RECENT_SECONDS."""
        self._forget_old()
        self._repeating, self._repeat_began_at = len(self._recent), self._clock()

    def take(self, most: int = BATCH) -> list[Change]:
        """Remove and return up to `most` changes that are due. Return those that could not be
        written by `put_back` or `hold`, and report the others by `written`."""
        for place in list(self._back):  # a part each time, so that the loop is not blocked
            self._release(place, most)
        fresh = self._urgent.take(most)
        fresh += self._fresh.take(most - len(fresh))
        self._forget_old()
        if fresh:
            self._taken_at = self._clock()
        for change in fresh:
            if change.address in self._recent:
                del self._recent[change.address]
            self._recent[change.address] = self._taken_at, change.reason
        while self._recent.nbytes > RECENT_BYTES_MAX:
            self._recent.take(1)
        room = min(most - len(fresh), self._count_again(), self._allowed())
        self._again_from += room / self._per_second
        again = self._again.take(room)
        again += self._repeat_on(room - len(again))
        return fresh + again + self._walk_on(room - len(again))

    def written(self, changes: Iterable[Change]) -> None:
        """These were written; those in doubt are written once more. A server for which one of them
        was held has answered, so all others are due."""
        for change in changes:
            if change.unanswered_by is not None:
                self._add_again(change.address, change.reason)
                if change.unanswered_by in self._held:
                    self._back.add(change.unanswered_by)

    def put_back(self, changes: Iterable[Change]) -> None:
        """Return changes that were not written, each to the end of its queue.

        A newer change of the same address wins.
        """
        for change in changes:
            self._return(replace(change, unanswered_by=change.unanswered_by or ""))

    def hold(self, change: Change, place: str) -> None:
        """As `put_back`, for a change that is not due, since its server, `place`, was not reached
        or refused it."""
        self._back.discard(place)
        change = replace(change, unanswered_by=place)
        if self._is_queued(change.address):
            self._return(change)
            return
        self._held.setdefault(place, _Queue())[change.address] = change
        self._drop_old()

    def retry(self, most: int = BATCH) -> None:
        """Make up to `most` of the held changes due: some of each server, those first that were
        held longest."""
        places = list(self._held)
        for place in places:
            self._release(place, max(1, most // len(places)))

    def wait_seconds(self) -> float | None:
        """Seconds until what `take` returns is worth a round trip; None if the set is empty."""
        if self._urgent or self._back or len(self._fresh) >= BATCH:
            return 0.0
        waits = []
        if self._fresh:
            waits.append(max(0.0, self._taken_at + TOGETHER_SECONDS - self._clock()))
        if again := self._count_again():
            lacking = min(again, BATCH) - self._allowed()
            waits.append(max(0.0, lacking / self._per_second))
        return min(waits, default=None)

    def __len__(self) -> int:
        return sum(map(len, self._queues())) + self._repeating + len(self._walk)

    def _count_again(self) -> int:
        return len(self._again) + self._repeating + len(self._walk)

    def _allowed(self) -> int:
        """How many rewrites are allowed now."""
        now = self._clock()
        self._again_from = max(self._again_from, now - BATCH / self._per_second)
        # Rounding may have taken more than was earned, at a lower rate than now.
        return max(0, round((now - self._again_from) * self._per_second))

    def _queues(self) -> Iterable[_Queue[Change]]:
        return (self._urgent, *self._bounded())

    def _bounded(self) -> tuple[_Queue[Change], ...]:
        return (self._fresh, self._again, *self._held.values())

    def _drop_old(self) -> None:
        """Drop the oldest of the largest queue while all together are too large."""
        while sum(queue.nbytes for queue in self._bounded()) > WAITING_BYTES_MAX:
            max(self._bounded(), key=lambda queue: queue.nbytes).take(1)

    def _pop(self, address: QualifiedKey) -> Change | None:
        for queue in self._queues():
            if address in queue:
                return queue.take_at(address)
        return None

    def _queue(self, change: Change) -> None:
        if change.paced:
            self._again[change.address] = change
        elif not change.reason and is_handoff(change.address[1]):
            self._urgent[change.address] = change
        else:
            self._fresh[change.address] = change
        self._drop_old()

    def _return(self, change: Change) -> None:
        newer = self._pop(change.address)
        self._queue(change if newer is None else newer.over(change))

    def _add_again(self, address: QualifiedKey, reason: str) -> None:
        if not self._is_queued(address):
            self._again[address] = Change(address, reason, paced=True)
            self._drop_old()

    def _is_queued(self, address: QualifiedKey) -> bool:
        return any(address in queue for queue in self._queues())

    def _release(self, place: str, most: int) -> None:
        """Make up to `most` held changes of this server due."""
        held = self._held[place]
        for change in held.take(most):
            self._queue(change)
        if not held:
            del self._held[place]
            self._back.discard(place)

    def _repeat_on(self, most: int) -> list[Change]:
        """The next `most` of those written recently, which are written now: if that is lost, too,
        they are repeated again."""
        changes = []
        for _ in range(min(most, self._repeating)):
            address, (written_at, reason) = self._oldest()
            if written_at > self._repeat_began_at:
                self._repeating = 0  # all others were written since
                break
            self._repeating -= 1
            self._recent[address] = self._clock(), reason
            self._recent.move_to_end(address)
            if not self._is_queued(address):
                changes.append(Change(address, reason, paced=True))
        return changes

    def _walk_on(self, most: int) -> list[Change]:
        """The next `most` addresses of the walk, less those that were or will be written since."""
        begin, never = max(0, len(self._walk) - most), (-math.inf, "")
        self._walk[begin:], addresses = [], self._walk[begin:]
        return [
            Change(address, "", paced=True)
            for address in reversed(addresses)
            if not self._is_queued(address)
            and self._recent.get(address, never)[0] < self._walk_began_at
        ]

    def _forget_old(self) -> None:
        """Forget some of what was written longer ago than RECENT_SECONDS, unless it is still to be
        repeated."""
        bound = self._clock() - RECENT_SECONDS
        for _ in range(FORGOTTEN_AT_ONCE):
            address, (written_at, _) = self._oldest()
            if self._repeating or written_at >= bound:
                return
            del self._recent[address]

    def _oldest(self) -> tuple[QualifiedKey, tuple[float, str]]:
        """Of what was written; if that is nothing, one of the future."""
        return next(iter(self._recent.items()), (("", ""), (math.inf, "")))
