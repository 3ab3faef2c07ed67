"""Shared memory: the node's `Arena`, its read-only `Mapping` in clients, and a client's `Staging`.

All are memfds, passed over the unix socket by descriptor: there is nothing in /dev/shm to leak or
to name. The arena is sealed against shrinking, growing *and future writable mappings* once the
node has mapped it: only the node ever writes it, so bytes that were promised to an engine cannot
be changed or cut off by any client, whatever it does with the descriptor. Clients hand bytes in
through a staging area of their own, which the node maps read-only after it has checked its seals.

Nothing here knows what lies where; see `allocator` and `inventory`.

Advice: what the kernel is told of memory before it is used.

Without the interpreter lock, which mmap.madvise would hold for the whole call. Any thread; knows
addresses only. A kernel that does not know an advice ignores it, and so do we.

Pointers: where a buffer's bytes lie, also of read-only memory, and buffers of what lies there.

ctypes' own `from_buffer` refuses memory that is read-only. Pure; any thread.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from typing import Final

from lookup_buffer.errors import ProtocolError

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


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable ABI; only `buf` is read."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# A pair of functions of our own: the prototypes on ctypes.pythonapi are shared by the process.
_get_buffer: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer: Final = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)


def pointer_to(buffer: mmap.mmap | memoryview) -> int:
    """The address of the first byte; good as long as the caller keeps `buffer` open.

    Raises:
        BufferError: the bytes are not contiguous.
    """
    view = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(view), 0)  # PyBUF_SIMPLE: contiguous bytes
    address = int(view.buf or 0)
    _release_buffer(ctypes.byref(view))
    return address


def array_at(address: int, nbytes: int, *, keep: object) -> "ctypes.Array[ctypes.c_ubyte]":
    """A buffer of what lies there; `keep` is alive as long as the buffer or a view of it."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.__dict__["keep"] = keep
    return array


def bytes_at(address: int, nbytes: int, *, keep: object) -> memoryview:
    """A view of bytes over `array_at`; writable, whoever the memory belongs to."""
    return memoryview(array_at(address, nbytes, keep=keep)).cast("B")


POPULATE_STEP_BYTES = 16 << 20
F_SEAL_FUTURE_WRITE = 0x0010
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Mapping:
    """A memfd mapped into this process: `view` for Python, `address` for memmove.

    `close` unmaps it, or leaves that to the garbage collector while views are still held.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.nbytes = nbytes
        self.writable = writable
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection)
        self.view = memoryview(self._map)
        self.address = pointer_to(self._map)
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None

    def populate_in_background(self, *, skip_bytes: int = 0, most_bytes: int | None = None) -> None:
        """Fault the pages in from a thread of its own, so that no copy pays for it later.

        Once; further calls do nothing. `most_bytes`: only so far from the start.
        """
        if self._populating is not None:
            return
        stop = self.nbytes if most_bytes is None else min(most_bytes, self.nbytes)
        self._populating = threading.Thread(
            target=self.populate, args=(skip_bytes, stop), name="lb-populate", daemon=True
        )
        self._populating.start()

    def populate(self, start: int, stop: int) -> None:
        """Fault in the pages of [start, stop), in steps, without the GIL."""
        for offset in range(start, stop, POPULATE_STEP_BYTES):
            step = min(POPULATE_STEP_BYTES, stop - offset)
            if self._stop.is_set():
                return
            if not populate(self.address + offset, step, writable=self.writable):
                return  # the pages then fault in on first use

    def close(self) -> None:
        self._stop.set()
        if self._populating is not None:
            self._populating.join()
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a tensor over these bytes is still alive; the last one to go unmaps them


class _Memfd(Mapping):
    """A memfd of our own making, mapped writable and then sealed."""

    def __init__(self, name: str, nbytes: int, seals: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        super().__init__(self.fd, nbytes, writable=True)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SealedMemory(_Memfd):
    """Memory that only its maker writes: `fd` may be handed to anyone, it can only be read."""

    def __init__(self, name: str, nbytes: int) -> None:
        super().__init__(name, nbytes, _FIXED_SIZE | F_SEAL_FUTURE_WRITE)


class Arena(SealedMemory):
    """The node's memory for payload."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__("lookup-buffer-arena", capacity_bytes)


class Staging(_Memfd):
    """A client's area through which it hands bytes to the node; warm after its first use."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("lookup-buffer-staging", nbytes, _FIXED_SIZE)


def adopt_staging(fd: int, capacity_bytes: int) -> Mapping:
    """Map a staging descriptor that a client sent; the caller keeps owning `fd`.

    Raises:
        ProtocolError: when it is no memfd of fixed size (its owner could then truncate it and kill
            the node by SIGBUS), is empty, or is larger than the arena could ever take.
    """
    return adopt(fd, most_bytes=2 * capacity_bytes)


def adopt(fd: int, *, most_bytes: int) -> Mapping:
    """Map memory that another process sent, to be read; the caller keeps owning `fd`.

    Raises:
        ProtocolError: see `adopt_staging`.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the descriptor of shared memory is no memfd") from error
    nbytes = os.fstat(fd).st_size
    if seals & _FIXED_SIZE != _FIXED_SIZE or not 0 < nbytes <= most_bytes:
        raise ProtocolError(f"shared memory must be sealed in size and hold 1 to {most_bytes}")
    try:
        return Mapping(fd, nbytes, writable=False)
    except OSError as error:
        raise ProtocolError(f"shared memory that cannot be mapped: {error.strerror}") from error


def copy_bytes(target_address: int, source_address: int, nbytes: int) -> None:
    """memmove without the GIL."""
    ctypes.memmove(target_address, source_address, nbytes)
