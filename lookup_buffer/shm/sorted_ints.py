"""Sorted integers of which there may be hundreds of thousands, for `allocator`.

With 1,000 to 400,000 of them, to find both neighbours of one, remove it and add another takes 5 to
13 µs; with `sortedcontainers.SortedList` 1.4 to 3.3 times as long, measured side by side.
"""

from bisect import bisect_left, bisect_right, insort
from typing import Final

CHUNK: Final = 1024
"""No chunk is longer: one list of all would be moved by half for each number, 40 µs of 400,000."""


class SortedInts:
    """Different integers from 0 on, in ascending order.

    They are in chunks, so that adding or removing one moves few others however many there are.
    """

    def __init__(self) -> None:
        self._chunks: list[list[int]] = [[]]
        """None is empty, unless it is the only one."""
        self._starts = [0]
        """By chunk: no number in it is lower, and all before it are."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def highest(self) -> int | None:
        return self._chunks[-1][-1] if self._count else None

    def add(self, number: int) -> None:
        """A number that is not among them."""
        at = self._chunk_of(number)
        chunk = self._chunks[at]
        insort(chunk, number)
        self._count += 1
        if len(chunk) > CHUNK:
            upper = chunk[CHUNK // 2 :]
            del chunk[CHUNK // 2 :]
            self._chunks.insert(at + 1, upper)
            self._starts.insert(at + 1, upper[0])

    def remove(self, number: int) -> None:
        """A number that is among them."""
        at = self._chunk_of(number)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, number)]
        self._count -= 1
        if len(chunk) < CHUNK // 4 and len(self._chunks) > 1:
            self._join(max(at, 1))

    def at_least(self, number: int) -> int | None:
        """The lowest that is not below `number`."""
        at = self._chunk_of(number)
        chunk = self._chunks[at]
        index = bisect_left(chunk, number)
        if index < len(chunk):
            return chunk[index]
        return self._chunks[at + 1][0] if at + 1 < len(self._chunks) else None

    def around(self, number: int) -> tuple[int | None, int | None]:
        """The next lower and the next higher one of a number that is among them."""
        at = self._chunk_of(number)
        chunk = self._chunks[at]
        index = bisect_left(chunk, number)
        if 0 < index < len(chunk) - 1:
            return chunk[index - 1], chunk[index + 1]
        lower = chunk if index or not at else self._chunks[at - 1]
        below = lower[index - 1] if index or at else None
        return below, self.at_least(number + 1)

    def rank(self, number: int) -> int:
        """How many are lower."""
        at = self._chunk_of(number)
        return sum(map(len, self._chunks[:at])) + bisect_left(self._chunks[at], number)

    def from_rank(self, first: int, count: int) -> list[int]:
        """Up to `count` of them, without the `first` lowest."""
        found: list[int] = []
        for chunk in self._chunks:
            if first < len(chunk):
                found += chunk[first : first + count - len(found)]
                if len(found) == count:
                    break
            first = max(0, first - len(chunk))
        return found

    def _chunk_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _join(self, at: int) -> None:
        """Join a chunk to the one before it, if both are short or one is empty."""
        before, chunk = self._chunks[at - 1], self._chunks[at]
        if not before or not chunk or len(before) + len(chunk) <= CHUNK // 2:
            before += chunk
            del self._chunks[at], self._starts[at]
