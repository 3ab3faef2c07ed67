"""Advice: what the kernel is told of memory before it is used.

Without the interpreter lock, which mmap.madvise would hold for the whole call. Any thread; knows
addresses only. A kernel that does not know an advice ignores it, and so do we.
"""

import ctypes
from typing import Final

PAGE_BYTES: Final = 4096
HUGE_BYTES: Final = 4 << 20
"""From this size on huge pages pay: two of the usual 2 MiB."""
_DONTNEED: Final = 4
_HUGEPAGE: Final = 14
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(address: int, nbytes: int, *, writable: bool) -> bool:
    """Fault the pages in; False where the kernel (before 5.14) cannot."""
    advice = _POPULATE_WRITE if writable else _POPULATE_READ
    return bool(_libc.madvise(address, nbytes, advice) == 0)


def discard(address: int, nbytes: int) -> None:
    """Give whole pages back to the system: to unmap them then takes no time."""
    _libc.madvise(address, nbytes, _DONTNEED)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """For large memory that was not touched yet: a first copy into it is up to four times as fast
    where the kernel gives huge pages to who asks for them, as most do.
    """
    if nbytes < HUGE_BYTES:
        return
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    stop = (address + nbytes) // PAGE_BYTES * PAGE_BYTES
    _libc.madvise(start, stop - start, _HUGEPAGE)
