"""Copies of what is sent: in memory that is used again.

A copy into new memory costs two to six times one into memory that was touched before, in page
faults; and a pipe makes one of each large message.
"""

import mmap
import threading
from typing import Final

from lookup_buffer.advice import prefer_huge_pages
from lookup_buffer.arena import copy_bytes
from lookup_buffer.pointer import bytes_at, pointer_to

LEAST_BYTES: Final = 1 << 20
"""Fewer the allocator gives again by itself."""
KEPT_BYTES: Final = 64 << 20
"""Of memory without a copy in it, at the most."""
_STEP_BYTES: Final = 2 << 20
"""The size of a block is a multiple: so more sizes fit into it later."""


class _Block:
    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = pointer_to(self._map)
        prefer_huge_pages(self.address, nbytes)


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
        self._kept_bytes = 0
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
            self._free.clear()

    def give_back(self, block: _Block) -> None:
        with self._lock:
            if self._ended:
                return
            self._free.append(block)
            self._kept_bytes += block.nbytes
            while self._kept_bytes > KEPT_BYTES:  # the oldest goes: nobody had a use for it
                self._kept_bytes -= self._free.pop(0).nbytes

    def _take(self, nbytes: int) -> _Block | None:
        """The smallest that is large enough, but not one that is many times too large."""
        with self._lock:
            most = 4 * nbytes + _STEP_BYTES
            fitting = [block for block in self._free if nbytes <= block.nbytes <= most]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(best)
            self._kept_bytes -= best.nbytes
            return best
