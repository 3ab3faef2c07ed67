"""The allocator: divides one contiguous range of bytes into allocated blocks and gaps.

Pure bookkeeping: no memory, no I/O, no clock. Not thread-safe. The node's arena and the shared
memory of a pipe use it. The content of the blocks does not matter here.

One list holds the allocated blocks by address. A gap is the space between two neighbours in it,
so adjacent gaps are merged by construction. A second list holds the gaps by size, for best fit.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

_MAX_ADDRESS_BITS: Final = 56
_BY_AGE_FRACTION: Final = 16
_BY_AGE_MIN: Final = 64
_BY_AGE_MAX: Final = 4096
"""`eviction_window` first examines one in `_BY_AGE_FRACTION` blocks by age, within these bounds.
Without a result it then examines blocks by address. By age, a block costs four times as much."""
_BY_ADDRESS: Final = 8192
"""So many it then examines by address; more if a block of that size takes the place of so many."""


class Allocator:
    """Contiguous best fit over `capacity_bytes`, which is rounded down to the alignment.

    Blocks are rounded up to the alignment, and a block of zero bytes takes one unit of it, so
    every block has an offset of its own. All sizes reported here are rounded sizes.

    `allocate` and `free` cost two or three binary searches and insertions into flat lists (about
    15 µs among 100,000 blocks). `eviction_window` examines as few blocks as possible, from the
    oldest on: one if all have one size, some hundreds of 100,000 if two neighbours must be
    evicted; 12,000, which takes 15 ms, if eight must be.
    """

    def __init__(self, capacity_bytes: int, alignment: int = 64) -> None:
        if alignment < 1 or not 0 <= capacity_bytes < 1 << _MAX_ADDRESS_BITS:
            raise ValueError(f"capacity {capacity_bytes} with alignment {alignment}")
        self.alignment: Final = alignment
        self.capacity_bytes: Final = capacity_bytes - capacity_bytes % alignment
        self._offsets: list[int] = []  # of allocated blocks, ascending
        self._sizes: dict[int, int] = {}  # offset → bytes
        self._gaps: list[int] = []  # size << _MAX_ADDRESS_BITS | offset, ascending
        self._used_bytes = 0
        self._next_offset = 0
        """From here on `eviction_window` will examine blocks by address."""
        self._add_gap(0, self.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated blocks."""
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest block that `allocate` can give now."""
        return self._gaps[-1] >> _MAX_ADDRESS_BITS if self._gaps else 0

    def __len__(self) -> int:
        """The number of allocated blocks."""
        return len(self._offsets)

    def rounded_bytes(self, nbytes: int) -> int:
        """The bytes that a block of `nbytes` takes."""
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes")
        return max(1, -(-nbytes // self.alignment)) * self.alignment

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new block, or None if no gap is large enough.

        Uses the low end of the smallest gap that fits; among equal gaps, of the lowest.
        """
        size = self.rounded_bytes(nbytes)
        position = bisect_left(self._gaps, size << _MAX_ADDRESS_BITS)
        if position == len(self._gaps):
            return None
        gap = self._gaps.pop(position)
        offset = gap & ((1 << _MAX_ADDRESS_BITS) - 1)
        self._add_gap(offset + size, (gap >> _MAX_ADDRESS_BITS) - size)
        insort(self._offsets, offset)
        self._sizes[offset] = size
        self._used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Free a block; its bytes merge with the gaps on both sides.

        Raises:
            KeyError: there is no such block (freed twice, or never allocated).
        """
        size = self._sizes.pop(offset)
        index = bisect_left(self._offsets, offset)
        start, end = self._end_of(index - 1), self._start_of(index + 1)
        del self._offsets[index]
        self._used_bytes -= size
        self._remove_gap(start, offset - start)
        self._remove_gap(offset + size, end - offset - size)
        self._add_gap(start, end - start)

    def eviction_window(
        self,
        nbytes: int,
        oldest_first: Iterable[tuple[float, int]],
        time_of: Callable[[int], float | None],
    ) -> list[int] | None:
        """The blocks to free so that `allocate(nbytes)` succeeds, chosen by their age.

        `oldest_first` lists the evictable blocks: the time of their last use, ascending, and their
        offset. `time_of` is the time of the block at an offset, None if it is not evictable.

        A run is a sequence of neighbouring evictable blocks; it suffices if its bytes and gaps
        together hold `nbytes`. Of these the result is the run whose youngest block is oldest;
        among equals the one that evicts the fewest bytes, then the lowest. Empty if a gap suffices
        already; None if no run suffices. The method itself frees nothing.

        Where none of the oldest suffices, and there are more than `_BY_ADDRESS` blocks, all this is
        only so for a part of the range: another one in each call.
        """
        size = self.rounded_bytes(nbytes)
        if self.largest_free_bytes >= size:
            return []
        if size > self.capacity_bytes:
            return None
        found = self._search_by_age(size, oldest_first)
        lowest, highest = found or self._next_blocks(size)
        run = self._best_run(size, time_of, lowest, highest)
        return None if run is None else self._offsets[run]

    def _search_by_age(
        self, size: int, oldest_first: Iterable[tuple[float, int]]
    ) -> tuple[int, int] | None:
        """The indexes of the first and the last block between which the best run lies; None if
        that needs a look at too many blocks.

        It adds blocks from the oldest on, and joins each to the neighbours added before, until a
        run suffices. The best run contains no younger block.
        """
        examined_max = min(max(_BY_AGE_MIN, len(self) // _BY_AGE_FRACTION), _BY_AGE_MAX)
        last_of: dict[int, int] = {}  # last block of each run so far, by its first block
        first_of: dict[int, int] = {}  # first block, by its last block
        lowest, highest, found_time = len(self), -1, math.inf
        for examined, (time, offset) in enumerate(oldest_first):
            if time > found_time or examined >= (examined_max if highest < 0 else 2 * _BY_AGE_MAX):
                break
            index = bisect_left(self._offsets, offset)
            first, last = first_of.pop(index - 1, index), last_of.pop(index + 1, index)
            last_of[first], first_of[last] = last, first
            if self._start_of(last + 1) - self._end_of(first - 1) >= size:
                # Continue: other blocks of the same age may form a run with fewer bytes.
                lowest, highest, found_time = min(lowest, first), max(highest, last), time
        return (lowest, highest) if highest >= 0 else None

    def _next_blocks(self, size: int) -> tuple[int, int]:
        """The indexes of the first and the last block of those to examine by address: where a block
        of `size` has room more than once. The next call goes on where such a block could begin."""
        offsets = self._offsets
        first = min(
            bisect_left(offsets, self._next_offset),
            max(0, len(self) - _BY_ADDRESS),
            bisect_left(offsets, self.capacity_bytes - 2 * size),
        )
        end = max(first + _BY_ADDRESS, bisect_left(offsets, self._end_of(first - 1) + 2 * size))
        self._next_offset = offsets[end] - size if end < len(self) else 0
        return first, min(end, len(self)) - 1

    def _best_run(
        self, size: int, time_of: Callable[[int], float | None], lowest: int, highest: int
    ) -> slice | None:
        """The best run for `eviction_window` from block `lowest` to `highest`."""
        offsets, sizes = self._offsets, self._sizes
        best_time, best_bytes = math.inf, 0
        best_run: slice | None = None
        youngest: deque[tuple[float, int]] = deque()  # (time, index) in the run, times descending
        first = lowest  # the run is offsets[first : last + 1]
        start = self._end_of(lowest - 1)  # start of the gap before the run
        run_bytes = 0
        for last in range(lowest, highest + 1):
            offset = offsets[last]
            block_bytes = sizes[offset]
            time = time_of(offset)
            if time is None or time > best_time:
                # No run with this block is evictable, or better than the best so far.
                first, start, run_bytes = last + 1, offset + block_bytes, 0
                youngest.clear()
                continue
            run_bytes += block_bytes
            while youngest and youngest[-1][0] <= time:
                youngest.pop()
            youngest.append((time, last))
            end = self._start_of(last + 1)
            if end - start < size:
                continue
            # Of the runs that end here the shortest is best: all others contain its blocks.
            while first < last and end - (after := self._end_of(first)) >= size:
                run_bytes -= sizes[offsets[first]]
                first, start = first + 1, after
            while youngest[0][1] < first:
                youngest.popleft()
            time = youngest[0][0]
            if best_run is None or (time, run_bytes) < (best_time, best_bytes):
                best_time, best_bytes, best_run = time, run_bytes, slice(first, last + 1)
        return best_run

    def _start_of(self, index: int) -> int:
        """The start of the block; after the last block, the end of the range."""
        return self._offsets[index] if index < len(self._offsets) else self.capacity_bytes

    def _end_of(self, index: int) -> int:
        """The end of the block; before the first block, the start of the range."""
        if index < 0:
            return 0
        offset = self._offsets[index]
        return offset + self._sizes[offset]

    def _add_gap(self, offset: int, size: int) -> None:
        if size:
            insort(self._gaps, size << _MAX_ADDRESS_BITS | offset)

    def _remove_gap(self, offset: int, size: int) -> None:
        if size:
            del self._gaps[bisect_left(self._gaps, size << _MAX_ADDRESS_BITS | offset)]
