"""The failure detector: which nodes are alive, judged by the observer's monotonic clock.

A node increments a sequence number in Redis each second. It is alive if that number changed
recently as seen from here; no other machine's clock is used. Pure bookkeeping without threads or
I/O; the clock is an argument. Called by `membership`.
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
    """The known nodes, and since when their sequence has not changed."""

    def __init__(self, dead_after_seconds: float = DEAD_AFTER_SECONDS) -> None:
        self._dead_after_seconds = dead_after_seconds
        self._sightings: dict[str, _Sighting] = {}
        self._observed_at = -math.inf
        self._looking_since = math.inf

    def observe(
        self, beats: Mapping[str, tuple[str, int]], now: float, *, complete: bool = True
    ) -> None:
        """Apply one reading of all beats: node → (boot, sequence).

        Nodes that are absent have shut down. After the store lost its data the reading is not
        `complete`: absent nodes are then judged by their last beat.
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
        """This process was stopped for `seconds`: that time does not count as silence of others."""
        for seen in self._sightings.values():
            seen.changed_at = min(now, seen.changed_at + seconds)

    def alive(self, node: str, boot: str, now: float) -> bool:
        """Whether this boot of `node` beat recently; another boot counts as another node."""
        seen = self._sightings.get(node)
        return (
            seen is not None
            and seen.boot == boot
            and now - seen.changed_at <= self._dead_after_seconds
        )

    def dead_seconds(self, node: str, boot: str) -> float:
        """How long this boot has been dead, at the last reading; 0 if it may be alive.

        Stricter than `alive`, since its callers remove what others wrote: time without readings, or
        in which the store was losing its data, does not count. Infinite for a boot that another
        boot of the same node has replaced: it never returns.
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
        """Whether the last reading had this boot: it may have died since, but was not replaced."""
        seen = self._sightings.get(node)
        return seen is not None and seen.boot == boot

    def boots(self) -> Iterable[tuple[str, str]]:
        """(node, boot) of all that have not shut down, alive or not."""
        return [(node, seen.boot) for node, seen in self._sightings.items()]
