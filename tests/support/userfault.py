"""A page of this process that is never there: a system call that touches it does not return.

By that a process holds the locks that such a call has. Needs root, or
`vm.unprivileged_userfaultfd`.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodes import wait_until

_NUMBERS = {"x86_64": 323, "aarch64": 282}
_API, _REGISTER, _MISSING = 0xC018AA3F, 0xC020AA00, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


@contextmanager
def unending_read(descriptor: int) -> Iterator[None]:
    """Until the end of this, a thread reads from the descriptor into such a page."""
    fault, page = _fault_descriptor(), mmap.mmap(-1, mmap.PAGESIZE)
    pointer = ctypes.c_char.from_buffer(page)
    address = ctypes.addressof(pointer)
    _control(fault, _REGISTER, address, mmap.PAGESIZE, _MISSING, 0)
    reader = threading.Thread(target=_libc.read, args=(descriptor, address, 1))
    reader.start()
    try:
        wait_until(lambda: _waits(reader), 10.0)
        yield
    finally:
        os.close(fault)  # the page is there
        reader.join()
        del pointer
        page.close()


def _fault_descriptor() -> int:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        pytest.skip("userfaultfd has an unknown number on this kind of machine")
    fault = _libc.syscall(number, os.O_CLOEXEC)
    if fault < 0:
        reason = ctypes.get_errno()
        assert reason in (errno.EPERM, errno.ENOSYS), os.strerror(reason)
        pytest.skip(f"userfaultfd: {os.strerror(reason)}")
    _control(fault, _API, 0xAA, 0, 0)
    return int(fault)


def _control(fault: int, request: int, *fields: int) -> None:
    structure = (ctypes.c_uint64 * len(fields))(*fields)
    if _libc.ioctl(fault, ctypes.c_ulong(request), structure):
        raise OSError(ctypes.get_errno(), "ioctl of userfaultfd")


def _waits(reader: threading.Thread) -> bool:
    assert reader.is_alive(), "the read has returned"
    return "userfault" in Path(f"/proc/self/task/{reader.native_id}/wchan").read_text()
