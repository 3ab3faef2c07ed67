"""Copies of what is sent: in memory that is used again.

A copy into new memory costs two to six times one into memory that was touched before, in page
faults; and a pipe makes one of each large message.
"""

import mmap
import threading
from typing import Final

from lookup_buffer.shm.memory import bytes_at, copy_bytes, discard, pointer_to, prefer_huge_pages

LEAST_BYTES: Final = 1 << 20
"""Fewer the allocator gives again by itself."""
KEPT_BYTES: Final = 64 << 20
"""Of memory without a copy in it, at the most, while nothing is sent."""
_STEP_BYTES: Final = 2 << 20
"""The size of a block is a multiple: so more sizes fit into it later."""


class _Block:
    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = pointer_to(self._map)
        prefer_huge_pages(self.address, nbytes)

    def __del__(self) -> None:
        discard(self.address, self.nbytes)  # a millisecond for 8 MiB, which others can use


class _Copy:
    """Lives as long as somebody sees the copy; then its block can be used again."""

    def __init__(self, copies: "Copies", block: _Block) -> None:
        self._copies = copies
        self._block = block

    def __del__(self) -> None:
        self._copies.give_back(self._block)


class Copies:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a copy may end wherever a garbage collection begins
        self._free: list[_Block] = []
        self._ended = False

    def copy(self, source: memoryview) -> memoryview:
        nbytes = source.nbytes
        if nbytes < LEAST_BYTES:
            return memoryview(bytes(source))
        block = self._take(nbytes) or _Block(-(-nbytes // _STEP_BYTES) * _STEP_BYTES)
        copy_bytes(block.address, pointer_to(source), nbytes)
        return bytes_at(block.address, nbytes, keep=_Copy(self, block))

    def end(self) -> None:
        """Keep nothing, now and later. Copies that somebody sees stay."""
        with self._lock:
            self._ended = True
            dropped, self._free = self._free, []
        del dropped  # without the lock, for it takes time

    def rest(self) -> None:
        """For now nothing is sent: keep no more than is worth it.

        Not before, for it takes longer than the copies do, and would be paid in between them.
        """
        dropped = []
        with self._lock:
            kept_bytes = sum(block.nbytes for block in self._free)
            while kept_bytes > KEPT_BYTES:  # the oldest goes: nobody had a use for it
                dropped.append(self._free.pop(0))
                kept_bytes -= dropped[-1].nbytes
        del dropped  # as in `end`

    def give_back(self, block: _Block) -> None:
        with self._lock:
            if not self._ended:
                self._free.append(block)

    def _take(self, nbytes: int) -> _Block | None:
        """The smallest that is large enough, but not one that is many times too large."""
        with self._lock:
            most = 4 * nbytes + _STEP_BYTES
            fitting = [block for block in self._free if nbytes <= block.nbytes <= most]
            if not fitting:
                return None
            best = min(reversed(fitting), key=lambda block: block.nbytes)  # the warmest of those
            self._free.remove(best)
            return best
