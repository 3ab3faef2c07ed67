"""SharedRegion: memory that both ends of a pipe share, so that bytes need not go through a socket.

`SharedRegion` is the interface that the outbox and the remote end use. `SharedMemory` implements it
by two memfds, of which each end writes one and reads the other. They are passed by descriptor and
have no name, so the memory is freed once both processes have closed it.

Any thread may call this module.
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
"""Below this size the bytes go with their frame: that costs less than a block of shared memory."""
PREFAULT_BYTES: Final = 64 << 20
"""So many bytes are prefaulted with the first message. Later pages fault on their first use."""
MEMORY_BYTES_MAX: Final = 1 << 40


class SharedRegion(Protocol):
    """Thread-safe."""

    def put(self, source: memoryview) -> tuple[memoryview, int] | None:
        """Copy these bytes into the shared memory.

        Returns the copy and its offset. None: they are few and should go with their frame, or there
        is no room.
        """
        ...

    def free(self, at: int) -> None:
        """Free the block at this offset, which the other end has read."""
        ...

    def get(self, at: int, nbytes: int) -> memoryview:
        """The bytes that the other end has put at this offset. The view stays valid after `close`.

        Raises:
            ProtocolError: the range is not within the shared memory.
        """
        ...

    def close(self) -> None:
        """Release the memory once the last view is gone. Idempotent."""
        ...


class SharedMemory:
    """See `SharedRegion`. Send `descriptor` to the other end, and pass the other end's to `adopt`.

    Only this end writes its own memory: see `SealedMemory`. A malicious other end can change its
    memory during a read, but cannot unmap or shrink it. Its bytes are only copied, never parsed.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = min(-(-nbytes // PAGE_BYTES) * PAGE_BYTES, MEMORY_BYTES_MAX)
        self._lock = threading.Lock()
        self._ours: SealedMemory | None = SealedMemory("lookup-buffer-pipe", nbytes)
        self._theirs: Mapping | None = None
        self._blocks = Allocator(nbytes)
        self.descriptor = self._ours.fd

    def adopt(self, descriptor: int) -> None:
        """Map the other end's memory. The descriptor stays the caller's.

        Raises:
            ProtocolError: its owner could still shrink the memory, or its size is not allowed.
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
                raise ProtocolError("an offset into memory that is not shared")
            if at < 0 or at + nbytes > self._theirs.nbytes:
                raise ProtocolError("an offset outside of the shared memory")
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
