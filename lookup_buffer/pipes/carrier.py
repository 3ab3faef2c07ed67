"""The carrier: memory that both ends of a pipe see, so that bytes need not go through a socket.

`Carrier` is what the outbox and the peer know of it. `SharedMemory` is the one there is: two
memfds, of which each end writes one and reads the other. They are passed by descriptor and have no
name, so nothing remains of them but in the processes that use them.
"""

import threading
from typing import Final, Protocol

from lookup_buffer.errors import ProtocolError
from lookup_buffer.shm.allocator import Allocator
from lookup_buffer.shm.memory import (
    PAGE_BYTES,
    Mapping,
    SealedMemory,
    adopt,
    copy_bytes,
    pointer_to,
)

PLACED_BYTES: Final = 8 << 10
"""Fewer go with their frame, for less than their place costs."""
PREFAULT_BYTES: Final = 64 << 20
"""So much becomes real with the first message, the rest as it is used for the first time."""
MEMORY_BYTES_MAX: Final = 1 << 40


class Carrier(Protocol):
    """Thread-safe."""

    def put(self, source: memoryview) -> tuple[memoryview, int] | None:
        """A copy of these bytes and its place; None where it is better, or only, sent."""
        ...

    def free(self, at: int) -> None:
        """The other end has no more use for what was put there."""
        ...

    def get(self, at: int, nbytes: int) -> memoryview:
        """What the other end has put there. The view is good also after `close`.

        Raises:
            ProtocolError: there is no such place.
        """
        ...

    def close(self) -> None:
        """Give the memory back, once the last view is gone. Idempotent."""
        ...


class SharedMemory:
    """A `Carrier`; see there. `descriptor` is to be sent to the other end, and its to `adopt`.

    Nobody else writes what lies in ours: see `SealedMemory`. The other end's may change under
    our eyes, if that end is malicious, but not vanish: its bytes are only ever copied.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = min(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, MEMORY_BYTES_MAX)
        self._lock = threading.Lock()
        self._ours: SealedMemory | None = SealedMemory("lookup-buffer-pipe", nbytes)
        self._theirs: Mapping | None = None
        self._blocks = Allocator(nbytes)
        self.descriptor = self._ours.fd

    def adopt(self, descriptor: int) -> None:
        """The other end's memory; the caller keeps owning the descriptor.

        Raises:
            ProtocolError: its owner could take it away, or it has no possible size.
        """
        self._theirs = adopt(descriptor, most_bytes=MEMORY_BYTES_MAX)

    def put(self, source: memoryview) -> tuple[memoryview, int] | None:
        nbytes = source.nbytes
        if nbytes < PLACED_BYTES:
            return None
        with self._lock:
            at = self._blocks.allocate(nbytes) if self._ours else None
            if at is None or self._ours is None:
                return None
            self._ours.populate_in_background(most_bytes=PREFAULT_BYTES)
            block = self._ours.view[at : at + nbytes]
        copy_bytes(pointer_to(block), pointer_to(source), nbytes)
        return block, at

    def free(self, at: int) -> None:
        with self._lock:
            self._blocks.free(at)

    def get(self, at: int, nbytes: int) -> memoryview:
        with self._lock:
            if self._theirs is None:
                raise ProtocolError("a place in memory that is not shared")
            if at < 0 or at + nbytes > self._theirs.nbytes:
                raise ProtocolError("a place outside of the memory that is shared")
            self._theirs.populate_in_background(most_bytes=PREFAULT_BYTES)
            return self._theirs.view[at : at + nbytes]

    def close(self) -> None:
        with self._lock:
            ours, theirs = self._ours, self._theirs
            self._ours = self._theirs = None
        if ours is not None:
            ours.close()
        if theirs is not None:
            theirs.close()
