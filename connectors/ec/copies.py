"""Copies between the arena and the place where the model keeps its tensors.

One contract, two ways. On the host a copy is made when it is asked for. For a device that copies by
itself it is only enqueued, on a stream of its own, in order with what the model does next; a thread
here gives pins back once the device is through. What such a device has to do is `Device`, so that
all but the copies themselves runs without one.
"""

import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from connectors.counters import Counters, RateLimitedLog
from lookup_buffer import codec
from lookup_buffer.errors import LookupBufferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import LoadOrder


class Copies(ABC):
    """In the model's thread, but for `to_host`, which runs on the thread that stores."""

    @abstractmethod
    def load(self, order: "LoadOrder") -> "torch.Tensor | None":
        """A new tensor that holds the bytes of `order` for whatever the model does from now on.

        Raises:
            LookupBufferError: the bytes are not to be had here.
            RuntimeError: the device has no memory for them, or does not copy.
        """

    @abstractmethod
    def place(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """As `load`, from a tensor of the host, which the caller gives away."""

    @abstractmethod
    def done(self, orders: "Sequence[LoadOrder]") -> None:
        """Every `load` and `place` of this step was called: give these pins back when, and not
        before, the bytes have been copied."""

    @abstractmethod
    def keep(self, tensor: "torch.Tensor") -> Any:
        """A fresh output, as it is once the model has come so far; has `nbytes`. Goes to `to_host`,
        and takes memory where the model does until it is dropped."""

    @abstractmethod
    def to_host(self, output: Any) -> "torch.Tensor":
        """What was kept, as a tensor of the host. Waits for model and copy."""

    @abstractmethod
    def on_device(self, output: Any) -> "torch.Tensor":
        """The tensor that was kept, after `to_host` has returned."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Wait for what is on its way, at most `timeout` seconds. Idempotent."""


class HostCopies(Copies):
    """For models on the CPU, and for devices that nobody taught us to copy to in the background."""

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
    """A point in what a device was told to do."""

    def synchronize(self) -> Any:
        """Wait until it has come there."""


class Device(ABC):
    """A device with streams. Nothing here waits for it, but `download`."""

    @abstractmethod
    def pin(self, memory: memoryview) -> bool:
        """Let the device copy out of this memory by itself; False where it cannot. Slow."""

    @abstractmethod
    def unpin(self, memory: memoryview) -> None:
        """`memory` was pinned, and nothing is being copied out of it."""

    @abstractmethod
    def upload(self, source: "torch.Tensor") -> "torch.Tensor":
        """Enqueue a copy; what the model enqueues from now on comes after it. `source` has to stay
        as it is until an event of `uploaded` after this call."""

    @abstractmethod
    def uploaded(self) -> Event:
        """All uploads until now."""

    @abstractmethod
    def mark(self) -> Event:
        """All that the model has enqueued until now."""

    @abstractmethod
    def download(self, tensor: "torch.Tensor", after: Event) -> "torch.Tensor":
        """A copy on the host, of what `tensor` is at `after`. Waits; not in the model's thread."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """An output that may not have been computed yet."""

    tensor: "torch.Tensor"
    encoded: Event
    nbytes: int


class DeviceCopies(Copies):
    """See the module. The arena is pinned for the device in the background, each time that the node
    starts; until then, and where that fails, the device copies through memory of its driver's."""

    def __init__(
        self, buffer: "LookupBuffer", device: Device, counters: Counters, log: RateLimitedLog
    ) -> None:
        self._buffer = buffer
        self._device = device
        self._counters = counters
        self._log = log
        self._boot = ""
        self._pinned: memoryview | None = None
        self._sources: list[torch.Tensor] = []
        """What this step uploads: memory that has to stay."""
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
        # Keeps the arena mapped as long as it lives.
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
        elif orders:  # vLLM had them all
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
            self._jobs.put(self._unpin)
            self._jobs.put(None)
        # A device that hangs keeps its thread, and the arena pinned: the process is about to end.
        self._thread.join(timeout)

    # -- the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 -- top of a thread; pins end with the step too
                self._counters.add("copy_failed")
                self._log.report("copy_failed", "the device did not copy: %s", error)
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
            self._jobs.put(partial(self._pin, boot))

    def _pin(self, boot: str) -> None:
        self._unpin()
        try:
            memory = self._buffer.arena(boot)
        except LookupBufferError:
            return  # lost again; the next one will do
        if self._device.pin(memory):
            self._pinned = memory
            return
        memory.release()
        self._counters.add("arena_not_pinned")
        self._log.report("arena_not_pinned", "the arena cannot be pinned; loads are slower for it")

    def _unpin(self) -> None:
        memory, self._pinned = self._pinned, None
        if memory is not None:
            with self._uploading:  # a step may be loading from the arena of a node that was lost
                self._device.uploaded().synchronize()
                self._device.unpin(memory)
            memory.release()
