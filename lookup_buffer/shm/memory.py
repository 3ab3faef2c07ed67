"""Shared memory: what one process writes and others map read-only, and a client's `Staging`.

All are memfds, passed over the unix socket by descriptor, so no file in /dev/shm can leak or have
the name of another. Once the node has mapped the arena, it is sealed against shrinking, growing
*and future writable mappings*. Only the node can write it: no client can change or truncate bytes
that an engine relies on, whatever it does with the descriptor. A client passes bytes through its
own staging area, which `node.staging` reads.

The module also calls madvise and gives the addresses of buffers. Its madvise runs without the GIL,
which mmap.madvise holds for the whole call; an advice that the kernel does not know has no effect.
`pointer_to` exists because ctypes' own `from_buffer` refuses read-only memory. Any thread. What the
memory contains is up to `allocator` and `node.arena`.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from contextlib import suppress
from typing import Final

from lookup_buffer.errors import ProtocolError

PAGE_BYTES: Final = 4096
HUGE_BYTES: Final = 4 << 20
"""From this size on, huge pages are worth their cost: two of the usual 2 MiB."""
POPULATE_STEP_BYTES = 16 << 20
F_SEAL_FUTURE_WRITE = 0x0010
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
"""Of all memory that processes share: its size is fixed, nobody else writes it, and nobody can
punch a hole into it."""
_TMPFS: Final = 0x01021994
_STATFS_WORDS: Final = 32
"""More than `struct statfs` has, whose first word is the kind of file system."""
_DONTNEED: Final = 4
_HUGEPAGE: Final = 14
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


class Mapping:
    """A memfd mapped into this process: `view` for Python, `address` for memmove.

    `close` unmaps it; while views are still held, the garbage collector unmaps it later.
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
        """Fault the pages in on a separate thread, so that later copies have no page faults.

        Runs once; further calls do nothing. `most_bytes` limits it to that many bytes from the
        start. If the system grants no thread, nothing is done.
        """
        if self._populating is not None:
            return
        stop = self.nbytes if most_bytes is None else min(most_bytes, self.nbytes)
        thread = threading.Thread(
            target=self.populate, args=(skip_bytes, stop), name="lb-populate", daemon=True
        )
        with suppress(RuntimeError):
            thread.start()
            self._populating = thread

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
            pass  # a tensor over these bytes is still alive; the last one unmaps them


class SealedMemory(Mapping):
    """A memfd that only its creator can write. Any process may get `fd`; it can only read."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        super().__init__(self.fd, nbytes, writable=True)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Staging(SealedMemory):
    """A client's area for passing bytes to the node; its pages stay mapped after first use."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("lookup-buffer-staging", nbytes)


def adopt(fd: int, *, most_bytes: int) -> Mapping:
    """Map memory from another process, read-only. The caller keeps ownership of `fd`.

    Raises:
        ProtocolError: see `check_memfd`; or the system does not map it.
    """
    nbytes = check_memfd(fd, most_bytes=most_bytes)
    try:
        return Mapping(fd, nbytes, writable=False)
    except OSError as error:
        raise ProtocolError(f"the shared memory cannot be mapped: {error.strerror}") from error


def check_memfd(fd: int, *, most_bytes: int) -> int:
    """The size of a memfd with SEALS. Does not wait, whatever `fd` is.

    Raises:
        ProtocolError: it is something else; lacks a seal, without which its owner could truncate
            it, and an access would end this process by SIGBUS; is empty, or has more than
            `most_bytes`; is of huge pages; or cannot be read by this descriptor.
    """
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError as error:
        raise ProtocolError("the descriptor for shared memory is not a memfd") from error
    nbytes = os.fstat(fd).st_size
    if not is_sealed or not 0 < nbytes <= most_bytes:
        raise ProtocolError(
            f"shared memory of {nbytes} bytes; allowed: 1 to {most_bytes} bytes, sealed in size "
            "and against other writers"
        )
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE not in (os.O_RDONLY, os.O_RDWR):
        raise ProtocolError("shared memory that cannot be read")
    if _file_system(fd) != _TMPFS:
        raise ProtocolError("shared memory of huge pages; allowed: a memfd of ordinary pages")
    return nbytes


def _file_system(fd: int) -> int:
    """The kernel's number of its kind."""
    found = (ctypes.c_ulong * _STATFS_WORDS)()
    if _libc.fstatfs(fd, found):
        return 0
    return int(found[0])


def copy_bytes(target_address: int, source_address: int, nbytes: int) -> None:
    """memmove without the GIL."""
    ctypes.memmove(target_address, source_address, nbytes)


def populate(address: int, nbytes: int, *, writable: bool) -> bool:
    """Fault the pages in; False if the kernel (before 5.14) cannot."""
    advice = _POPULATE_WRITE if writable else _POPULATE_READ
    return bool(_libc.madvise(address, nbytes, advice) == 0)


def discard(address: int, nbytes: int) -> None:
    """Return whole pages to the system; unmapping them later then takes no time."""
    _libc.madvise(address, nbytes, _DONTNEED)


def prefer_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for large memory before its first use. The first copy into it is then up
    to four times as fast, if the kernel grants huge pages on request, as most do.
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


# Separate function objects: the prototypes on ctypes.pythonapi are shared by the whole process.
_get_buffer: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer: Final = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)


def pointer_to(buffer: mmap.mmap | memoryview) -> int:
    """The address of the first byte; valid while the caller keeps `buffer` open.

    Raises:
        BufferError: the bytes are not contiguous.
    """
    view = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(view), 0)  # PyBUF_SIMPLE: contiguous bytes
    address = int(view.buf or 0)
    _release_buffer(ctypes.byref(view))
    return address


def array_at(address: int, nbytes: int, *, keep: object) -> "ctypes.Array[ctypes.c_ubyte]":
    """A buffer over the memory at `address`. The buffer and its views keep `keep` alive."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.__dict__["keep"] = keep
    return array


def bytes_at(address: int, nbytes: int, *, keep: object) -> memoryview:
    """A view of bytes over `array_at`; always writable, also over read-only memory."""
    return memoryview(array_at(address, nbytes, keep=keep)).cast("B")
