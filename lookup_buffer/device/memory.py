"""Device memory: the memory of a pool's tensors, and how a lane's pipe reads and writes it.

`PoolMemory` keeps and allocates tensors, and orders them with the caller's computation. On the host
it copies at once. On a GPU it enqueues the copy on a stream of the pool, after an event of the
caller's stream. The caller's stream waits for that copy in turn; the caller's thread does not wait.

`LaneMemory` is the memory of a lane's pipe. A pipe normally copies what it sends, because the
sender may change it afterwards. A pool entry never changes, and the view that is sent keeps it
alive, so no copy is made. Figures: 32 MiB took 95 ms with a copy into new memory, and 20 ms
without.

Any thread may call this module.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lookup_buffer.codec import Tensor, Value, copy_of, empty_tensor
from lookup_buffer.errors import BufferFull, CodecError
from lookup_buffer.pipes.inbox import Offer
from lookup_buffer.pipes.outbox import INLINE_BYTES, Bytes
from lookup_buffer.pipes.stream import Memory
from lookup_buffer.protocol.header import TensorHeader

_cuda: Any = torch.cuda  # torch has no types for its streams and events


class PoolMemory(ABC):
    """Any thread. `ready` is a point in the work enqueued on the device (an event), or None."""

    device: torch.device

    @abstractmethod
    def keep(self, tensor: torch.Tensor, *, immutable: bool) -> tuple[torch.Tensor, Any]:
        """The pool's copy of a tensor, and the `ready` point at which it is complete.

        The copy has the content that the tensor has when the caller's stream reaches this point. An
        `immutable` tensor that shares its memory with no other is kept without a copy.
        """

    @abstractmethod
    def empty(self, header: TensorHeader) -> torch.Tensor:
        """Memory to receive into.

        Raises:
            BufferFull: the device has no memory.
            CodecError: torch has no such dtype.
        """

    @abstractmethod
    def on_caller_stream(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
        """The same tensor, ready for any later work on the caller's stream."""

    @abstractmethod
    def wait(self, ready: Any) -> None:
        """Block until `ready` is reached. Do not call it on a caller's thread."""

    @abstractmethod
    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the context, this thread enqueues its device work on the pool's stream."""
        yield


class HostPoolMemory(PoolMemory):
    """Host memory: for tests, and for models on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def keep(self, tensor: torch.Tensor, *, immutable: bool) -> tuple[torch.Tensor, Any]:
        plain = tensor.detach()
        if immutable and _fills_storage(plain):
            return plain, None
        copied = copy_of(plain)
        assert copied is not None
        return copied, None

    def empty(self, header: TensorHeader) -> torch.Tensor:
        return empty_tensor(header)

    def on_caller_stream(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
        return tensor

    def wait(self, ready: Any) -> None:
        pass

    @contextmanager
    def working(self) -> Iterator[None]:
        yield


class CudaPoolMemory(PoolMemory):
    """One GPU."""

    def __init__(self, name: str) -> None:
        index = torch.device(name).index if ":" in name else _cuda.current_device()
        self.device = torch.device("cuda", index)  # the form in which tensors name their device
        self._stream = _cuda.Stream(self.device)

    def keep(self, tensor: torch.Tensor, *, immutable: bool) -> tuple[torch.Tensor, Any]:
        caller = _cuda.current_stream(self.device)
        plain = tensor.detach()
        if immutable and plain.device == self.device and _fills_storage(plain):
            return plain, caller.record_event()
        try:
            with _cuda.stream(self._stream):
                self._stream.wait_event(caller.record_event())
                copied = plain.resolve_conj().resolve_neg().to(self.device, copy=True)
                copied = copied.contiguous()
                ready = self._stream.record_event()
        except torch.OutOfMemoryError as error:
            raise BufferFull("the GPU has no memory for the pool") from error
        caller.wait_event(ready)  # so that the caller may write to its tensor at once
        if plain.is_cuda:
            plain.record_stream(self._stream)
        return copied, ready

    def empty(self, header: TensorHeader) -> torch.Tensor:
        dtype = getattr(torch, header.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CodecError(f"torch {torch.__version__} has no dtype {header.dtype}")
        try:
            raw = torch.empty(header.nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise BufferFull("the GPU has no memory for the pool") from error
        return raw.view(dtype).view(header.shape)

    def on_caller_stream(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
        caller = _cuda.current_stream(self.device)
        if ready is not None:
            caller.wait_event(ready)
        tensor.record_stream(caller)
        return tensor

    def wait(self, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()

    @contextmanager
    def working(self) -> Iterator[None]:
        with _cuda.device(self.device), _cuda.stream(self._stream):
            yield


def memory_for(device: str) -> PoolMemory:
    return CudaPoolMemory(device) if device.startswith("cuda") else HostPoolMemory()


class LaneMemory:
    """See `Memory`. Everything but the memory of sent tensors is delegated to `inner`."""

    def __init__(self, inner: Memory) -> None:
        self._inner = inner

    def outgoing(self, value: Value) -> Bytes:
        bytes_of = self._inner.outgoing(value)
        few = value is None or value.nbytes <= INLINE_BYTES
        return bytes_of if few else _ImmutableBytes(bytes_of)

    def check_out(self, out: Tensor, offer: Offer) -> None:
        self._inner.check_out(out, offer)

    def allocate(self, offer: Offer, out: Tensor | None) -> Tensor:
        return self._inner.allocate(offer, out)

    def writable(self, value: Tensor) -> memoryview:
        return self._inner.writable(value)

    def result(self, value: Tensor, out: Tensor | None) -> Value:
        return self._inner.result(value, out)

    def trim(self) -> None:
        self._inner.trim()

    def close(self) -> None:
        self._inner.close()


class _ImmutableBytes:
    """The bytes of a large tensor that never changes."""

    def __init__(self, bytes_of: Bytes) -> None:
        self._bytes_of = bytes_of

    def view(self) -> memoryview:
        return self._bytes_of.view()

    def copy(self) -> memoryview:
        return self._bytes_of.view()


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its storage. A slice of a batch would keep the whole batch alive."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return (
        not lazy and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
