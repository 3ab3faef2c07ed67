"""Pointers: where a buffer's bytes lie, also of read-only memory, and buffers of what lies there.

ctypes' own `from_buffer` refuses memory that is read-only. Pure; any thread.
"""

import ctypes
import mmap
from typing import Final


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
