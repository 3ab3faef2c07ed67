"""`CudaDevice`: streams, events and pinned memory of one GPU, as `ec.copies` needs them.

Workers on CUDA and ROCm import it at start; `DeviceCopies` calls it.
"""

from typing import Any

import torch

from connectors import pinned
from connectors.ec.copies import Device, Event

_cuda: Any = torch.cuda  # much of it has no types


class CudaDevice(Device):
    """One stream for each direction. `name` is torch's, such as `cuda:0`."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        self._loads = _cuda.Stream(self._device)
        self._saves = _cuda.Stream(self._device)

    def pin(self, memory: memoryview) -> bool:
        return pinned.pin(memory, self._device)

    def unpin(self, memory: memoryview) -> None:
        pinned.unpin(memory, self._device)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        model = _cuda.current_stream(self._device)
        with _cuda.stream(self._loads):
            # Allocated on this stream, so that the copy waits for no work of the model.
            tensor = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            tensor.copy_(source, non_blocking=True)
        model.wait_event(self._loads.record_event())
        tensor.record_stream(model)
        return tensor

    def uploaded(self) -> Event:
        event: Event = self._loads.record_event(_cuda.Event(blocking=True))
        return event

    def mark(self) -> Event:
        event: Event = _cuda.current_stream(self._device).record_event()
        return event

    def download(self, tensor: torch.Tensor, after: Event) -> torch.Tensor:
        with _cuda.stream(self._saves):
            self._saves.wait_event(after)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            copied = self._saves.record_event(_cuda.Event(blocking=True))
        copied.synchronize()  # the caller holds `tensor` until here, so its memory is not reused
        return host
