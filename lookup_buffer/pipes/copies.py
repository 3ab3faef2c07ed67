"""Copies of sent tensors, in memory that is reused.

A pipe copies each large message that it sends. A copy into new memory costs two to six times as
much as into memory that was used before, because of page faults.

Any thread may call this module.
"""

import mmap
import threading
from typing import Final

from lookup_buffer.shm.memory import bytes_at, copy_bytes, discard, pointer_to, prefer_huge_pages

LEAST_BYTES: Final = 1 << 20
"""Below this size the system's allocator reuses memory by itself."""
KEPT_BYTES: Final = 64 << 20
"""Bound on the free memory that is kept while nothing is sent."""
_STEP_BYTES: Final = 2 << 20
"""Block sizes are multiples of this, so that a block fits more sizes later."""


class Copies:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection may end a copy at any point
        self._free: list[_Block] = []
        self._closed = False

    def copy(self, source: memoryview) -> memoryview:
        nbytes = source.nbytes
        if nbytes < LEAST_BYTES:
            return memoryview(bytes(source))
        block = self._take(nbytes) or _Block(-(-nbytes // _STEP_BYTES) * _STEP_BYTES)
        copy_bytes(block.address, pointer_to(source), nbytes)
        return bytes_at(block.address, nbytes, keep=_Copy(self, block))

    def close(self) -> None:
        """Release all free blocks, now and later. Copies that are still in use stay valid."""
        with self._lock:
            self._closed = True
            dropped, self._free = self._free, []
        del dropped  # without the lock, because unmapping takes time

    def trim(self) -> None:
        """Called after a while without messages: reduce the free memory to `KEPT_BYTES`.

        Not earlier: releasing memory takes longer than the copies, and would delay the next ones.
        """
        dropped = []
        with self._lock:
            kept_bytes = sum(block.nbytes for block in self._free)
            while kept_bytes > KEPT_BYTES:  # the longest unused first
                dropped.append(self._free.pop(0))
                kept_bytes -= dropped[-1].nbytes
        del dropped  # as in `close`

    def give_back(self, block: "_Block") -> None:
        with self._lock:
            if not self._closed:
                self._free.append(block)

    def _take(self, nbytes: int) -> "_Block | None":
        """The smallest block that is large enough, but not one that is many times too large."""
        with self._lock:
            most = 4 * nbytes + _STEP_BYTES
            fitting = [block for block in self._free if nbytes <= block.nbytes <= most]
            if not fitting:
                return None
            best = min(reversed(fitting), key=lambda block: block.nbytes)  # the most recently used
            self._free.remove(best)
            return best


class _Block:
    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = pointer_to(self._map)
        prefer_huge_pages(self.address, nbytes)

    def __del__(self) -> None:
        # Returns the memory to the system. Takes a millisecond for 8 MiB.
        discard(self.address, self.nbytes)


class _Copy:
    """Lives as long as a view of the copy exists; then its block can be reused."""

    def __init__(self, copies: "Copies", block: _Block) -> None:
        self._copies = copies
        self._block = block

    def __del__(self) -> None:
        self._copies.give_back(self._block)
