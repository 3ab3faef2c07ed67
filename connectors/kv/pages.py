"""The paged KV cache of one worker, as chunks see it: copied out, and copied into.

On the host copies happen where they are asked for. A device's are enqueued on streams of their
own, behind what the model was told to do before `mark`; whoever asks waits for them, and that is
never the model's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from connectors.paged import gather_blocks, pages_of, scatter_blocks

_cuda: Any = torch.cuda  # much of it has no types


class Pages(ABC):
    """All layers of a rank.

    Args:
        layers: by name, as vLLM registers them; one that shares another's memory counts once.
        num_blocks: of vLLM's block manager.

    Raises:
        ValueError: layers that differ in shape or dtype have no one tensor for a chunk.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        distinct = {layer.data_ptr(): layer for layer in layers.values()}
        self.layers = [pages_of(layer, num_blocks) for layer in distinct.values()]
        if len({(layer.dtype, layer.shape[1:]) for layer in self.layers}) != 1:
            raise ValueError("the layers of this model differ in the size of their KV")

    def chunk_bytes(self, blocks: int) -> int:
        page = self.layers[0][0]
        return len(self.layers) * blocks * page.numel() * page.itemsize

    @abstractmethod
    def mark(self) -> Any:
        """In the model's thread: all that the model was told to do until now."""

    @abstractmethod
    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        """The chunk in these blocks as it is after `after`, on the host. Waits for the copy."""

    @abstractmethod
    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        """Put the blocks `first` and following of a host's chunk there. Waits for the copy."""


class HostPages(Pages):
    """For models on the CPU."""

    def mark(self) -> Any:
        return None

    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        return gather_blocks(self.layers, blocks)

    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        scatter_blocks(self.layers, blocks, chunk, first)


class CudaPages(Pages):
    """For CUDA and ROCm. Not yet run on a GPU."""

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        super().__init__(layers, num_blocks)
        self._device: Final = self.layers[0].device
        self._saves = _cuda.Stream(self._device)
        self._loads = _cuda.Stream(self._device)

    def mark(self) -> Any:
        return _cuda.current_stream(self._device).record_event()

    def gather(self, blocks: Sequence[int], after: Any) -> torch.Tensor:
        with _cuda.stream(self._saves):
            self._saves.wait_event(after)
            chunk = gather_blocks(self.layers, blocks)
            host = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True)
            host.copy_(chunk, non_blocking=True)
            copied = self._saves.record_event(_cuda.Event(blocking=True))
        copied.synchronize()
        return host

    def scatter(self, blocks: Sequence[int], chunk: torch.Tensor, first: int, after: Any) -> None:
        part = chunk[:, first : first + len(blocks)]
        with _cuda.stream(self._loads):
            self._loads.wait_event(after)
            scatter_blocks(self.layers, blocks, part.to(self._device, non_blocking=True))
            copied = self._loads.record_event(_cuda.Event(blocking=True))
        copied.synchronize()
