"""Which nodes live, judged by the observer's own monotonic clock.

A node raises a sequence number in Redis each second. What counts is that it *changed* within the
last seconds as seen from here; no clock of another machine, and none of the server, takes part.
Pure bookkeeping: no thread, no I/O; the clock is an argument.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DEAD_AFTER_SECONDS = 5.0


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

    def observe(self, beats: Mapping[str, tuple[str, int]], now: float) -> None:
        """Take in one reading of all beats: node → (boot, sequence). Absent nodes have left."""
        for node in self._sightings.keys() - beats.keys():
            del self._sightings[node]
        for node, (boot, sequence) in beats.items():
            seen = self._sightings.get(node)
            if seen is None or (seen.boot, seen.sequence) != (boot, sequence):
                self._sightings[node] = _Sighting(boot, sequence, now)

    def alive(self, node: str, boot: str, now: float) -> bool:
        """Whether this boot of `node` was seen to move lately; another boot is another node."""
        seen = self._sightings.get(node)
        return (
            seen is not None
            and seen.boot == boot
            and now - seen.changed_at <= self._dead_after_seconds
        )

    def boots(self) -> Iterable[tuple[str, str]]:
        """(node, boot) of all that have not left, alive or not."""
        return [(node, seen.boot) for node, seen in self._sightings.items()]
