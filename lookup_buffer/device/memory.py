"""Device memory: where a pool's tensors lie, and how a lane's pipe reads and writes them.

`PoolMemory` keeps and allocates tensors, and orders them with the caller's computation. On the host
it copies at once. On a GPU it enqueues the copy on a stream of the pool, after an event of the
caller's stream. The caller's stream waits for that copy in turn; the caller's thread does not wait.
`CudaPoolMemory` was not run on a GPU.

`LaneMemory` is the memory of a lane's pipe. A pipe normally copies what it sends, because the
sender may change it afterwards. A pool entry never changes, and the view that is sent keeps it
alive, so no copy is made. Figures: 32 MiB took 95 ms with a copy into new memory, and 20 ms
without.

Any thread may call this module. It knows nothing of keys, tickets or pairs.
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


class LaneMemory:
    """See `Memory`. Everything but the memory of sent tensors is delegated to `inner`."""

    def __init__(self, inner: Memory) -> None:
        self._inner = inner

    def outward(self, value: Value) -> Bytes:
        bytes_of = self._inner.outward(value)
        few = value is None or value.nbytes <= INLINE_BYTES
        return bytes_of if few else _Unchanging(bytes_of)

    def check(self, out: Tensor, offer: Offer) -> None:
        self._inner.check(out, offer)

    def place(self, offer: Offer, out: Tensor | None) -> Tensor:
        return self._inner.place(offer, out)

    def writable(self, value: Tensor) -> memoryview:
        return self._inner.writable(value)

    def done(self, value: Tensor, out: Tensor | None) -> Value:
        return self._inner.done(value, out)

    def rest(self) -> None:
        self._inner.rest()

    def end(self) -> None:
        self._inner.end()


class _Unchanging:
    """The bytes of a large tensor that never changes."""

    def __init__(self, bytes_of: Bytes) -> None:
        self._bytes_of = bytes_of

    def lent(self) -> memoryview:
        return self._bytes_of.lent()

    def copied(self) -> memoryview:
        return self._bytes_of.lent()


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
    def hand_out(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
        """The same tensor, ready for any later work on the caller's stream."""

    @abstractmethod
    def wait(self, ready: Any) -> None:
        """Block until `ready` is reached. Not for a caller's thread."""

    @abstractmethod
    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the context, this thread enqueues its device work on the pool's stream."""
        yield


class HostPoolMemory(PoolMemory):
    """Host memory: the same interface in CI, and where models run on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def keep(self, tensor: torch.Tensor, *, immutable: bool) -> tuple[torch.Tensor, Any]:
        plain = tensor.detach()
        if immutable and _is_alone(plain):
            return plain, None
        copied = copy_of(plain)
        assert copied is not None
        return copied, None

    def empty(self, header: TensorHeader) -> torch.Tensor:
        return empty_tensor(header)

    def hand_out(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
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
        if immutable and plain.device == self.device and _is_alone(plain):
            return plain, caller.record_event()
        try:
            with _cuda.stream(self._stream):
                self._stream.wait_event(caller.record_event())
                copied = plain.resolve_conj().resolve_neg().to(self.device, copy=True)
                copied = copied.contiguous()
                ready = self._stream.record_event()
        except torch.OutOfMemoryError as error:
            raise BufferFull("the GPU has no memory for the pool") from error
        caller.wait_event(ready)  # so the caller may write to its tensor at once
        if plain.is_cuda:
            plain.record_stream(self._stream)
        return copied, ready

    def empty(self, header: TensorHeader) -> torch.Tensor:
        dtype = getattr(torch, header.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CodecError(f"torch {torch.__version__} has no dtype {header.dtype}")
        try:
            there = torch.empty(header.nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise BufferFull("the GPU has no memory for the pool") from error
        return there.view(dtype).view(header.shape)

    def hand_out(self, tensor: torch.Tensor, ready: Any) -> torch.Tensor:
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


def place_of(device: str) -> PoolMemory:
    return CudaPoolMemory(device) if device.startswith("cuda") else HostPoolMemory()


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its storage alone. A slice of a batch would keep the whole batch
    alive."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return (
        not lazy and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
