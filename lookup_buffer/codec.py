"""The codec: torch tensors as (header, bytes) and back, bit for bit.

Contains the mapping of dtype names to torch's, access to a tensor's bytes without a copy, and the
construction of tensors from bytes. Pure functions; any thread; large copies run without the GIL.
The node must not import it: outside of `device`, `pipes` and `cli.speeds`, no other module imports
torch at run time.

A value is encoded in row-major order. Strides, gradients, device, and the lazy conjugate and
negative bits are not encoded. Sparse, nested, quantized and storage-less (meta, fake) tensors are
not supported, because bytes, dtype and shape do not describe them.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Final

import torch

from lookup_buffer.errors import CodecError, ProtocolError
from lookup_buffer.protocol.framing import pack, unpack
from lookup_buffer.protocol.header import DTYPES, MAX_DIMENSIONS, TensorHeader
from lookup_buffer.shm.memory import array_at, bytes_at, pointer_to, prefer_huge_pages

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: found for name in DTYPES if isinstance(found := getattr(torch, name, None), torch.dtype)
}
_NAMES: Final = {dtype: name for name, dtype in _TORCH_DTYPES.items()}

Tensor = torch.Tensor
Value = Tensor | None
"""A value to store or send; None is a value too."""

_LENGTH: Final = struct.Struct(">I")
_ALIGNMENT: Final = 64
"""Alignment in bytes of each value in `packed`: torch needs elements aligned to their width."""

# Integer dtypes of the same width, for dtypes that torch cannot copy or copies with a warning.
_COPY_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_version() -> str:
    return str(torch.__version__)


def header_of(tensor: torch.Tensor | None) -> TensorHeader:
    """The header that describes this value.

    Raises:
        CodecError: a tensor of an unsupported kind.
    """
    if tensor is None:
        return TensorHeader.of_none()
    return _header_of(_strided(tensor))


def copy_of(value: Value, out: torch.Tensor | None = None) -> Value:
    """The value as a receiver gets it: a new contiguous CPU tensor, or a copy in `out`.

    Raises:
        CodecError: a tensor of an unsupported kind.
    """
    if value is None:
        return None
    owner, address, nbytes = contiguous_bytes(value)
    copy = empty_tensor(header_of(value)) if out is None else out
    copy_into(copy, address, nbytes)
    del owner  # kept until here: it owns the address
    return copy


def contiguous_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The value's bytes in row-major order, as (owner, address, nbytes).

    The address is valid while the caller keeps the owner. For a contiguous CPU tensor nothing is
    copied and the owner shares its memory: a later write by the caller changes the bytes. A tensor
    on another device is copied with `.cpu()`, which waits for the device.

    Raises:
        CodecError: a tensor of an unsupported kind.
    """
    plain = _strided(tensor)
    nbytes = _header_of(plain).nbytes
    plain = plain.resolve_conj().resolve_neg().cpu()
    if not plain.is_contiguous():
        copy_dtype = _COPY_DTYPES.get(plain.itemsize)
        plain = (plain if copy_dtype is None else plain.view(copy_dtype)).contiguous()
    return plain, plain.data_ptr(), nbytes


def writable_bytes(tensor: torch.Tensor) -> memoryview:
    """A view of the memory of a contiguous CPU tensor; the view keeps the tensor alive."""
    return bytes_at(tensor.data_ptr(), tensor.nbytes, keep=tensor)


def empty_tensor(header: TensorHeader) -> torch.Tensor:
    """A new CPU tensor of this dtype and shape, with unspecified content.

    Raises:
        CodecError: the header is of a None, this torch lacks its dtype, or memory is exhausted.
    """
    dtype = _torch_dtype(header)
    try:
        return _empty(header.shape, dtype)
    except RuntimeError as error:  # torch's error when the system refuses memory
        raise CodecError(f"no memory for a tensor of {header.nbytes} bytes") from error


def tensor_over(buffer: bytes | bytearray | memoryview, header: TensorHeader) -> torch.Tensor:
    """A tensor that shares the memory of `buffer`, which may be read-only.

    The buffer stays exported while the tensor or a view of it lives; until then its owner (an mmap,
    a bytearray) cannot be closed or resized. torch has no read-only tensors: a write to a tensor
    over read-only memory kills the process. The caller must prevent such writes.

    Raises:
        CodecError: the buffer is not exactly `header.nbytes` long, or see `empty_tensor`.
    """
    dtype = _torch_dtype(header)
    exported = memoryview(buffer)
    if exported.nbytes != header.nbytes:
        raise CodecError(
            f"a buffer of {exported.nbytes} bytes for a value of {header.nbytes} bytes"
        )
    if header.nbytes == 0:
        return _empty(header.shape, dtype)
    try:
        address = pointer_to(exported)
    except BufferError as error:
        raise CodecError("the buffer is not contiguous") from error
    return _tensor_at(address, header.nbytes, dtype, header.shape, keep=exported)


def check_out(out: torch.Tensor, header: TensorHeader) -> None:
    """Check that a value of `header` can be copied into `out`.

    Raises:
        CodecError: another dtype or shape, overlapping elements, or an unsupported kind.
    """
    dtype = _torch_dtype(header)
    if out.dtype is not dtype or tuple(out.shape) != header.shape:
        raise CodecError(
            f"out is {_dtype_name(out)} {tuple(out.shape)}, but the value is {header.dtype} "
            f"{header.shape}"
        )
    strided = zip(_strided(out).shape, out.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in strided):
        raise CodecError("out is an expanded tensor, whose elements share memory; pass a dense one")


def check_receivable(out: torch.Tensor, header: TensorHeader, device: str | torch.device) -> None:
    """Check that a value of `header` can be received directly into the memory of `out`.

    Raises:
        CodecError: see `check_out`; also if it is not contiguous, or on another device.
    """
    check_out(out, header)
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise CodecError(f"out has strides {out.stride()}; it must be contiguous")
    if out.device != torch.device(device):
        raise CodecError(f"out is on {out.device}; it must be on {device}")


def destination(out: torch.Tensor | None, header: TensorHeader) -> torch.Tensor:
    """The destination for a value of `header`: `out`, if it fits, or a new tensor.

    Raises:
        CodecError: see `check_out`.
    """
    if out is None:
        return empty_tensor(header)
    check_out(out, header)
    return out


def copy_into(out: torch.Tensor, address: int, nbytes: int) -> None:
    """Copy the row-major bytes at `address` into a destination that `check_out` accepts.

    A contiguous CPU destination is filled by one memmove, without the GIL. Gradients are not
    recorded. The caller keeps the memory at `address` readable until this returns.

    Raises:
        CodecError: the destination does not have exactly `nbytes` bytes.
    """
    target = _strided(out)
    if _header_of(target).nbytes != nbytes:
        raise CodecError(f"out has {_header_of(target).nbytes} bytes, but the value has {nbytes}")
    if nbytes == 0:
        return
    lazy = target.is_conj() or target.is_neg()
    if target.device.type == "cpu" and target.is_contiguous() and not lazy:
        ctypes.memmove(target.data_ptr(), address, nbytes)
        return
    copy_dtype = None if lazy else _COPY_DTYPES.get(target.itemsize)
    if copy_dtype is not None:
        target = target.view(copy_dtype)
    source = _tensor_at(address, nbytes, target.dtype, tuple(target.shape), keep=None)
    target.copy_(source)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient, if it is of a supported kind."""
    if not isinstance(tensor, torch.Tensor):
        raise CodecError(f"a {type(tensor).__name__} is neither a tensor nor None")
    # `detach` releases the GIL, and acquiring it again can take long while other threads run.
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
    plain = tensor if is_plain else tensor.detach()
    # A subclass that `detach` preserves wraps its memory (fake, distributed, masked).
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_nested:
        raise CodecError(
            f"a {type(plain).__name__} of layout {plain.layout} is not supported; pass a dense one"
        )
    if plain.is_meta:
        raise CodecError("a meta tensor has no bytes")
    if plain.untyped_storage().nbytes() < _reach(plain):  # a read would kill the process
        raise CodecError("a tensor whose storage was freed has no bytes")
    return plain


def _reach(plain: torch.Tensor) -> int:
    """The end of the tensor's elements within its storage, in bytes from the start."""
    count = plain.numel()
    if count and not plain.is_contiguous():
        strided = zip(plain.shape, plain.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in strided)
    return (int(plain.storage_offset()) + count) * plain.itemsize if count else 0


def _header_of(plain: torch.Tensor) -> TensorHeader:
    if plain.dtype not in _NAMES:
        raise CodecError(f"dtype {_dtype_name(plain)} is not supported")
    if plain.dim() > MAX_DIMENSIONS:
        raise CodecError(f"{plain.dim()} dimensions; at most {MAX_DIMENSIONS} are supported")
    return TensorHeader.for_tensor(_NAMES[plain.dtype], tuple(plain.shape))


def _torch_dtype(header: TensorHeader) -> torch.dtype:
    if header.kind != "tensor":
        raise CodecError("the value is None, not a tensor")
    dtype = _TORCH_DTYPES.get(header.dtype)
    if dtype is None:
        raise CodecError(f"torch {torch.__version__} has no dtype {header.dtype}")
    return dtype


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # Not torch.empty of the dtype itself: for complex32 that warns.
    copy_dtype = _COPY_DTYPES.get(dtype.itemsize)
    empty = torch.empty(shape, dtype=copy_dtype or dtype)
    prefer_huge_pages(empty.data_ptr(), empty.nbytes)
    return empty.view(dtype)


def _tensor_at(
    address: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], *, keep: object
) -> torch.Tensor:
    # torch.frombuffer warns about a read-only buffer, and silencing a warning is not thread-safe.
    # A ctypes array counts as writable, and torch keeps it alive.
    array = array_at(address, nbytes, keep=keep)
    return torch.frombuffer(array, dtype=torch.uint8).view(dtype).view(shape)


def packed(values: Sequence[Value]) -> torch.Tensor:
    """Several values as one uint8 tensor, to be sent as a whole. `unpacked` reverses it.

    Raises:
        CodecError: one of them is of an unsupported kind.
    """
    headers = [header_of(value) for value in values]
    head = pack([header.to_fields() for header in headers])
    nbytes = _aligned(_LENGTH.size + len(head)) + sum(_aligned(h.nbytes) for h in headers)
    whole = torch.empty(nbytes, dtype=torch.uint8)
    view = writable_bytes(whole)
    view[: _LENGTH.size] = _LENGTH.pack(len(head))
    view[_LENGTH.size : _LENGTH.size + len(head)] = head
    at = _aligned(_LENGTH.size + len(head))
    for value, header in zip(values, headers, strict=True):
        if value is not None:
            owner, address, _ = contiguous_bytes(value)
            ctypes.memmove(whole.data_ptr() + at, address, header.nbytes)
            del owner  # kept until here: it owns the address
        at += _aligned(header.nbytes)
    return whole


def unpacked(whole: torch.Tensor) -> list[Value]:
    """The values in a tensor made by `packed`; they share its memory.

    Raises:
        ProtocolError: the bytes are not those of a tensor made by `packed`.
    """
    view = writable_bytes(whole)
    if len(view) < _LENGTH.size:
        raise ProtocolError("too few bytes for the length of the headers")
    (length,) = _LENGTH.unpack(view[: _LENGTH.size])
    fields = unpack(view[_LENGTH.size : _LENGTH.size + length])
    if not isinstance(fields, list):
        raise ProtocolError("the headers are not a list")
    values: list[Value] = []
    at = _aligned(_LENGTH.size + length)
    for each in fields:
        header = TensorHeader.from_fields(each, max_nbytes=max(0, len(view) - at))
        values.append(
            None if header.kind == "none" else tensor_over(view[at : at + header.nbytes], header)
        )
        at += _aligned(header.nbytes)
    return values


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
