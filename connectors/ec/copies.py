"""Copies between the arena and the memory in which the model keeps its tensors.

`Copies` is the interface, with two implementations. `HostCopies` copies at once. `DeviceCopies`
enqueues copies on a stream of its own, in order with the model's later work, and a background
thread releases pins when the device has finished. `Device` holds the operations of a device, so
that tests run the rest without one. `EcWorker` calls this on the model runner's thread, and
`to_host` on the thread of its save queue.
"""

import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from connectors.counters import Counters, RateLimitedLog
from connectors.pinned import PinnedArena
from lookup_buffer import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import LoadOrder


class Copies(ABC):
    """Called on the model runner's thread; `to_host` and `on_device` on the thread that stores."""

    @abstractmethod
    def load(self, order: "LoadOrder") -> "torch.Tensor | None":
        """Return a new tensor with the bytes of `order`, valid for all later work of the model.

        Raises:
            LookupBufferError: the bytes are not available here.
            RuntimeError: the device has no memory, or the copy failed.
        """

    @abstractmethod
    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """As `load`, from a tensor in host memory. The caller must not change that tensor
        afterwards."""

    @abstractmethod
    def done(self, orders: "Sequence[LoadOrder]") -> None:
        """All `load` and `place` calls of this step were made. Release these pins once, and only
        once, the bytes have been copied."""

    @abstractmethod
    def keep(self, tensor: "torch.Tensor") -> Any:
        """Keep a fresh output as it is when the model has computed it. The result has `nbytes`, is
        an argument for `to_host`, and keeps the model's memory until it is dropped."""

    @abstractmethod
    def to_host(self, output: Any) -> "torch.Tensor":
        """Return the kept output in host memory. Waits for the model and for the copy."""

    @abstractmethod
    def on_device(self, output: Any) -> "torch.Tensor":
        """Return the kept tensor itself. Valid after `to_host` has returned."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for copies in flight. Idempotent."""


class HostCopies(Copies):
    """For models on the CPU, and for devices without a `Device` implementation."""

    def __init__(self, buffer: "LookupBuffer", device: str) -> None:
        self._buffer = buffer
        self._device = device

    def load(self, order: "LoadOrder") -> "torch.Tensor | None":
        tensor = self._buffer.load(order)
        return tensor if tensor is None or self._device == "cpu" else self.place(tensor)

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor if self._device == "cpu" else tensor.to(self._device)

    def done(self, orders: "Sequence[LoadOrder]") -> None:
        if orders:
            self._buffer.done(orders)

    def keep(self, tensor: "torch.Tensor") -> Any:
        return tensor if self._device == "cpu" else tensor.detach().cpu()

    def to_host(self, output: Any) -> "torch.Tensor":
        tensor: torch.Tensor = output
        return tensor.detach()

    def on_device(self, output: Any) -> "torch.Tensor":
        return self.to_host(output)

    def close(self, timeout: float) -> None:
        pass


class Event(Protocol):
    """A point in a device's queue of work."""

    def synchronize(self) -> Any:
        """Wait until the device has reached this point."""


class Device(ABC):
    """A device with streams. Only `download` waits for it."""

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Register this memory so that the device copies from it directly. Slow. False where the
        device refuses."""

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`. No copy from `memory` may be in flight."""

    @abstractmethod
    def upload(self, source: "torch.Tensor") -> "torch.Tensor":
        """Enqueue a copy. Work that the model enqueues later runs after it. `source` must not
        change until an event of a later `uploaded` call is reached."""

    @abstractmethod
    def uploaded(self) -> Event:
        """An event after all uploads so far."""

    @abstractmethod
    def mark(self) -> Event:
        """An event after all work that the model has enqueued so far."""

    @abstractmethod
    def download(self, tensor: "torch.Tensor", after: Event) -> "torch.Tensor":
        """Copy `tensor` to host memory, as it is at `after`. Waits, so it must not run on the model
        runner's thread."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """An output that may not have been computed yet."""

    tensor: "torch.Tensor"
    encoded: Event
    nbytes: int


class DeviceCopies(Copies):
    """See the module. The arena is pinned for the device in the background, once per start of the
    node. Until then, and where pinning fails, the device copies through memory of its driver."""

    def __init__(
        self, buffer: "LookupBuffer", device: Device, counters: Counters, log: RateLimitedLog
    ) -> None:
        self._buffer = buffer
        self._device = device
        self._counters = counters
        self._log = log
        self._boot = ""
        self._arena = PinnedArena(device.pin, self._unpin, buffer.arena, counters, log)
        self._sources: list[torch.Tensor] = []
        """Tensors that this step uploads. They must stay alive until the copies end."""
        self._uploading = threading.Lock()
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lb-copies", daemon=True)
        self._thread.start()
        self._pin_soon(buffer.boot)

    def load(self, order: "LoadOrder") -> "torch.Tensor | None":
        if order.header.kind == "none":
            return None
        arena = self._buffer.arena(order.boot)
        self._pin_soon(order.boot)
        # This view keeps the arena mapped while it is alive.
        window = arena[order.offset : order.offset + order.nbytes]
        return self.place(codec.tensor_over(window, order.header))

    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        with self._uploading:
            placed = self._device.upload(tensor)
        self._sources.append(tensor)
        return placed

    def done(self, orders: "Sequence[LoadOrder]") -> None:
        if self._sources:
            copied = self._device.uploaded()
            sources, self._sources = self._sources, []
            self._jobs.put(partial(self._give_back, copied, sources, orders))
        elif orders:  # vLLM already had every item
            self._buffer.done(orders)

    def keep(self, tensor: "torch.Tensor") -> Any:
        return _Marked(tensor.detach(), self._device.mark(), tensor.nbytes)

    def to_host(self, output: Any) -> "torch.Tensor":
        marked: _Marked = output
        return self._device.download(marked.tensor, marked.encoded)

    def on_device(self, output: Any) -> "torch.Tensor":
        marked: _Marked = output
        return marked.tensor

    def close(self, timeout: float) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(self._arena.release)
            self._jobs.put(None)
        # A device that hangs keeps its thread and the pinned arena: the process is about to end.
        self._thread.join(timeout)

    # -- the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 -- top of a thread; scheduler releases pins
                self._counters.add("copy_failed")
                self._log.report("copy_failed", "a copy on the device failed: %s", error)
            del job  # it keeps the arena mapped

    def _give_back(
        self, copied: Event, sources: "list[torch.Tensor]", orders: "Sequence[LoadOrder]"
    ) -> None:
        copied.synchronize()
        sources.clear()
        if orders:
            self._buffer.done(orders)

    def _pin_soon(self, boot: str) -> None:
        if boot and boot != self._boot:
            self._boot = boot
            self._jobs.put(partial(self._arena.follow, boot))

    def _unpin(self, memory: memoryview) -> None:
        with self._uploading:  # a step may still load from a lost node's arena
            self._device.uploaded().synchronize()
            self._device.unpin(memory)
