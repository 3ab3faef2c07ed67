"""Arenas as memory that a GPU copies from directly, without a copy of its driver's in between.

32 MiB from a pinned arena into an H200 took a fifth of the time of 32 MiB from one that is not, and
a chunk of KV of that size a sixth. Pinning takes 0.06 s a GiB (`benchmarks/gpu_copies.py`).
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from connectors.counters import Counters, RateLimitedLog
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.shm.memory import pointer_to

READ_ONLY: Final = 0x08
"""cudaHostRegisterReadOnly. Without it CUDA refuses memory that is mapped read-only, as arenas
are."""

BOOTS_MAX: Final = 8
"""Former starts of the node that are remembered: a load that was ordered before may still come."""
_cuda: Any = torch.cuda  # much of it has no types


def pin(memory: memoryview, device: torch.device) -> bool:
    """Register this memory with CUDA. Slow. False where the driver refuses."""
    with _cuda.device(device):
        failed = _cuda.cudart().cudaHostRegister(pointer_to(memory), memory.nbytes, READ_ONLY)
        if int(failed) == 0:
            return True
        _take_last_error(device)
        return False


def unpin(memory: memoryview, device: torch.device) -> None:
    """Undo `pin`. No copy from `memory` may be in flight."""
    with _cuda.device(device):
        _cuda.cudart().cudaHostUnregister(pointer_to(memory))


def _take_last_error(device: torch.device) -> None:
    """CUDA keeps each thread's last error. torch takes it for that of this thread's next kernel,
    and has no call that only resets it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        pass


class PinnedArena:
    """The arena of the running node, pinned. Its methods are called on one thread.

    Args:
        pin, unpin: of the device.
        arena: `LookupBuffer.arena`.
    """

    def __init__(
        self,
        pin: Callable[[memoryview], bool],
        unpin: Callable[[memoryview], None],
        arena: Callable[[str], memoryview],
        counters: Counters,
        log: RateLimitedLog,
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._arena = arena
        self._counters = counters
        self._log = log
        self._boots: list[str] = []
        """Those that were followed, the last one last."""
        self._address = 0
        """Of the last mapping that was tried. A client that connects again maps the same arena
        elsewhere."""
        self._pinned: memoryview | None = None

    def follow(self, boot: str) -> None:
        """Pin the arena of this start of the node as it is mapped now, unless that was tried, and
        unpin the former. An earlier start is ignored. Never raises."""
        if not boot or boot in self._boots[:-1]:
            return
        try:
            memory = self._arena(boot)
        except LookupBufferError:
            return  # the node was lost again
        if boot not in self._boots:
            self._boots = [*self._boots[-BOOTS_MAX:], boot]
        elif pointer_to(memory) == self._address:
            memory.release()
            return
        self.release()
        self._address = pointer_to(memory)
        if self._is_pinned(memory):
            self._pinned = memory
            return
        memory.release()
        self._counters.add("arena_not_pinned")
        self._log.report("arena_not_pinned", "the arena cannot be pinned; loads are slower")

    def _is_pinned(self, memory: memoryview) -> bool:
        try:
            return self._pin(memory)
        except RuntimeError:  # torch's, of a GPU that fails; copies will say so
            return False

    def release(self) -> None:
        """Idempotent."""
        memory, self._pinned = self._pinned, None
        if memory is not None:
            self._unpin(memory)
            memory.release()
