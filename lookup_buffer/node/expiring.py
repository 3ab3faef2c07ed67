"""What ends at a time of its own, by a number: what is due is found without a look at the rest.

Pure bookkeeping, on the loop's thread. Used by `arena`.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class Expiring(Generic[T]):
    def __init__(self) -> None:
        self._there: dict[int, T] = {}
        self._heap: list[tuple[float, int]] = []
        """Their times and numbers, and no more of such as are not there any longer."""

    def add(self, at: float, number: int, thing: T) -> None:
        """The number was never used before."""
        self._there[number] = thing
        heappush(self._heap, (at, number))

    def discard(self, number: int) -> None:
        self._there.pop(number, None)
        if len(self._heap) > 2 * len(self._there):
            self._heap = [each for each in self._heap if each[1] in self._there]
            heapify(self._heap)

    def due(self, now: float) -> T | None:
        """The one that ended first, until it is discarded; None if none has ended."""
        heap, there = self._heap, self._there
        while heap and heap[0][0] <= now:
            if (thing := there.get(heap[0][1])) is not None:
                return thing
            heappop(heap)
        return None
