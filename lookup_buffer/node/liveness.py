"""Which nodes live, judged by the observer's own monotonic clock.

A node raises a sequence number in Redis each second. What counts is that it *changed* within the
last seconds as seen from here; no clock of another machine, and none of the server, takes part.
Pure bookkeeping: no thread, no I/O; the clock is an argument.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lookup_buffer.times import BLIND_SECONDS, DEAD_AFTER_SECONDS


@dataclass(slots=True)
class _Sighting:
    boot: str
    sequence: int
    changed_at: float


class Liveness:
    """The nodes seen, and since when their sequence stands still."""

    def __init__(self, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._dead_after_seconds = dead_after_seconds
        self._sightings: dict[str, _Sighting] = {}
        self._observed_at = -math.inf
        self._looking_since = math.inf

    def observe(
        self, beats: Mapping[str, tuple[str, int]], now: float, *, complete: bool = True
    ) -> None:
        """Take in one reading of all beats: node → (boot, sequence).

        Absent nodes have left; but where the store has lost its data the reading is not
        `complete`, and they are judged by their silence, as if it had not been read.
        """
        if now - self._observed_at > BLIND_SECONDS or not complete:
            self._looking_since = now
        self._observed_at = now
        if complete:
            for node in self._sightings.keys() - beats.keys():
                del self._sightings[node]
        for node, (boot, sequence) in beats.items():
            seen = self._sightings.get(node)
            if seen is None or (seen.boot, seen.sequence) != (boot, sequence):
                self._sightings[node] = _Sighting(boot, sequence, now)

    def forgive(self, seconds: float, now: float) -> None:
        """We stood still for so long ourselves: nobody's silence meanwhile was heard."""
        for seen in self._sightings.values():
            seen.changed_at = min(now, seen.changed_at + seconds)

    def alive(self, node: str, boot: str, now: float) -> bool:
        """Whether this boot of `node` was seen to move lately; another boot is another node."""
        seen = self._sightings.get(node)
        return (
            seen is not None
            and seen.boot == boot
            and now - seen.changed_at <= self._dead_after_seconds
        )

    def dead_seconds(self, node: str, boot: str) -> float:
        """For how long this boot was seen to be dead, at the last reading; 0 where it may live.

        Stricter than `alive`, for who removes what others wrote: time in which nobody looked, or
        in which the store was losing its data, does not count. Infinite for a boot that another
        one of the same node has replaced: it never comes back.
        """
        seen = self._sightings.get(node)
        if seen is not None and seen.boot != boot:
            return math.inf
        since = self._looking_since
        if seen is not None:
            since = max(since, seen.changed_at)
        silent = self._observed_at - since
        return silent if silent > self._dead_after_seconds else 0.0

    def sees(self, node: str, boot: str) -> bool:
        """Whether the last readings had this boot: it may have died since, but was not replaced."""
        seen = self._sightings.get(node)
        return seen is not None and seen.boot == boot

    def boots(self) -> Iterable[tuple[str, str]]:
        """(node, boot) of all that have not left, alive or not."""
        return [(node, seen.boot) for node, seen in self._sightings.items()]
