"""The allocator: divides one contiguous range of bytes into allocated blocks and gaps.

Pure bookkeeping: no memory, no I/O, no clock. Not thread-safe. The node's arena and the shared
memory of a pipe use it. The content of the blocks does not matter here.

The allocated blocks are sorted by address. A gap is the space between two neighbours among them,
so adjacent gaps are merged by construction. The gaps are sorted by size, for best fit.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from lookup_buffer.shm.sorted_ints import SortedInts

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

    `allocate` and `free` cost some binary searches (about 5 µs, however many blocks there are).
    `eviction_window` examines as few blocks as possible, from the oldest on: one if all have one
    size, some hundreds of 100,000 if two neighbours must be evicted; 12,000, which takes 15 ms, if
    eight must be.
    """

    def __init__(self, capacity_bytes: int, alignment: int = 64) -> None:
        if alignment < 1 or not 0 <= capacity_bytes < 1 << _MAX_ADDRESS_BITS:
            raise ValueError(f"capacity {capacity_bytes} with alignment {alignment}")
        self.alignment: Final = alignment
        self.capacity_bytes: Final = capacity_bytes - capacity_bytes % alignment
        self._offsets = SortedInts()  # of allocated blocks
        self._sizes: dict[int, int] = {}  # offset → bytes
        self._gaps = SortedInts()  # size << _MAX_ADDRESS_BITS | offset
        self._used_bytes = 0
        self._next_offset = 0
        """From here on `eviction_window` will examine blocks by address."""
        self.rounds = 0
        """How often it came to the end of the range: two more, and in between it examined all."""
        self._add_gap(0, self.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated blocks."""
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest block that `allocate` can give now."""
        return (self._gaps.highest or 0) >> _MAX_ADDRESS_BITS

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
        gap = self._gaps.at_least(size << _MAX_ADDRESS_BITS)
        if gap is None:
            return None
        self._gaps.remove(gap)
        offset = gap & ((1 << _MAX_ADDRESS_BITS) - 1)
        self._add_gap(offset + size, (gap >> _MAX_ADDRESS_BITS) - size)
        self._offsets.add(offset)
        self._sizes[offset] = size
        self._used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Free a block; its bytes merge with the gaps on both sides.

        Raises:
            KeyError: there is no such block (freed twice, or never allocated).
        """
        size = self._sizes.pop(offset)
        start, end = self._room_around(offset)
        self._offsets.remove(offset)
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
        first, count = found or self._next_blocks(size)
        return self._best_run(size, time_of, self._offsets.from_rank(first, count))

    def _search_by_age(
        self, size: int, oldest_first: Iterable[tuple[float, int]]
    ) -> tuple[int, int] | None:
        """The rank of the first block among which the best run lies, and their number; None if
        that needs a look at too many blocks.

        It adds blocks from the oldest on, and joins each to the neighbours added before, until a
        run suffices. The best run contains no younger block.
        """
        examined_max = min(max(_BY_AGE_MIN, len(self) // _BY_AGE_FRACTION), _BY_AGE_MAX)
        start_of: dict[int, int] = {}  # where each run so far begins with its gap, by its end
        end_of: dict[int, int] = {}  # where it ends with its gap, by its start
        lowest, highest, found_time = self.capacity_bytes, -1, math.inf
        for examined, (time, offset) in enumerate(oldest_first):
            if time > found_time or examined >= (examined_max if highest < 0 else 2 * _BY_AGE_MAX):
                break
            start, end = self._room_around(offset)
            start = start_of.pop(offset, start)  # of the run that ends where this block begins
            end = end_of.pop(offset + self._sizes[offset], end)
            start_of[end], end_of[start] = start, end
            if end - start >= size:
                # Continue: other blocks of the same age may form a run with fewer bytes.
                lowest, highest, found_time = min(lowest, start), max(highest, end), time
        if highest < 0:
            return None
        first = self._offsets.rank(lowest)
        return first, self._offsets.rank(highest) - first

    def _next_blocks(self, size: int) -> tuple[int, int]:
        """The rank of the first block of those to examine by address, and their number: where a
        block of `size` has room more than once. The next call goes on where such a block could
        begin."""
        offsets = self._offsets
        first = min(
            offsets.rank(self._next_offset),
            max(0, len(self) - _BY_ADDRESS),
            offsets.rank(max(0, self.capacity_bytes - 2 * size)),
        )
        (lowest,) = offsets.from_rank(first, 1)
        end = max(first + _BY_ADDRESS, offsets.rank(self._room_around(lowest)[0] + 2 * size))
        rest = offsets.from_rank(end, 1)
        self._next_offset = max(0, rest[0] - size) if rest else 0
        self.rounds += not rest
        return first, end - first

    def _best_run(
        self, size: int, time_of: Callable[[int], float | None], blocks: list[int]
    ) -> list[int] | None:
        """The best run for `eviction_window` among neighbouring blocks."""
        sizes = self._sizes
        best_time, best_bytes = math.inf, 0
        best_run: slice | None = None
        youngest: deque[tuple[float, int]] = deque()  # (time, index) in the run, times descending
        first = 0  # the run is blocks[first : last + 1]
        start = self._room_around(blocks[0])[0]  # start of the gap before the run
        ends = [*blocks[1:], self._room_around(blocks[-1])[1]]
        run_bytes = 0
        for last, (offset, end) in enumerate(zip(blocks, ends, strict=True)):
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
            if end - start < size:
                continue
            # Of the runs that end here the shortest is best: all others contain its blocks.
            while first < last and end - (after := blocks[first] + sizes[blocks[first]]) >= size:
                run_bytes -= sizes[blocks[first]]
                first, start = first + 1, after
            while youngest[0][1] < first:
                youngest.popleft()
            time = youngest[0][0]
            if best_run is None or (time, run_bytes) < (best_time, best_bytes):
                best_time, best_bytes, best_run = time, run_bytes, slice(first, last + 1)
        return None if best_run is None else blocks[best_run]

    def _room_around(self, offset: int) -> tuple[int, int]:
        """From the end of the block before to the start of the block after; without one, the start
        and the end of the range."""
        before, after = self._offsets.around(offset)
        start = 0 if before is None else before + self._sizes[before]
        return start, self.capacity_bytes if after is None else after

    def _add_gap(self, offset: int, size: int) -> None:
        if size:
            self._gaps.add(size << _MAX_ADDRESS_BITS | offset)

    def _remove_gap(self, offset: int, size: int) -> None:
        if size:
            self._gaps.remove(size << _MAX_ADDRESS_BITS | offset)
