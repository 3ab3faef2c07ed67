"""The staging areas of clients: memory that they write, and from which inserts are read.

An area is read by `pread`, not mapped. To touch a page of a mapping that nobody has written, or
that the kernel has dropped, would allocate it on the node's account, whatever the seals are. Nor
does a `pread` wait for a lock of the file or its inode, which the client can hold for as long as it
likes. It takes twice the time of a memcpy, so two threads share large items.

Called by `insert`, on any thread.
"""

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64

STEP_BYTES: Final = 256 << 10
"""What is copied, and then read once more for the checksum: it fits the cache of a core."""
SPLIT_BYTES: Final = 4 << 20
"""From this size on a second thread copies half of an item."""


class StagingArea(NamedTuple):
    """Memory of one client. It is for the inserts of one connection."""

    fd: int
    """A memfd that was checked (`check_memfd`)."""
    nbytes: int


def fill(target: memoryview, source: int, offset: int, pool: Executor) -> int:
    """Copy the bytes from `offset` in the memfd `source`; returns the checksum of the copy. A
    thread of `pool`, if one is idle, copies the second half of a large item.

    The checksum is of the copy: whatever a client does to its area meanwhile, readers get the bytes
    that were checked. Nothing writes `target` any more once this returns or raises.

    Raises:
        OSError: the system fails to read, as from a broken swap device.
    """
    hasher = xxh3_64()
    middle = len(target) if len(target) < SPLIT_BYTES else len(target) // 2
    rest = (target[middle:], source, offset + middle)
    reading = _submitted(pool, _read, *rest) if middle < len(target) else None
    try:
        _read_hashed(target[:middle], source, offset, hasher)
    finally:
        is_read = reading is not None and not reading.cancel() and not reading.exception()
    if is_read:
        hasher.update(rest[0])
    else:
        _read_hashed(*rest, hasher)
    return int(hasher.intdigest())


def _submitted(pool: Executor, call: Callable[..., None], *arguments: Any) -> "Future[None] | None":
    try:
        return pool.submit(call, *arguments)
    except RuntimeError:  # it is closed: the node ends
        return None


def _read_hashed(target: memoryview, source: int, offset: int, hasher: xxh3_64) -> None:
    """As `_read`. Adds the bytes to the checksum while they are in the processor's cache."""
    for start in range(0, len(target), STEP_BYTES):
        step = target[start : start + STEP_BYTES]
        _read(step, source, offset + start)
        hasher.update(step)


def _read(target: memoryview, source: int, offset: int) -> None:
    """Without the GIL. What nobody has written is 0."""
    while target:
        count = os.preadv(source, [target], offset)
        if not count:
            raise OSError("a memfd of a sealed size has ended")
        target, offset = target[count:], offset + count
