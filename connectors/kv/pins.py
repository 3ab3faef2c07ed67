"""Chunks that were asked for and are held on this host: for which requests, within one budget.

Owned by the scheduler's thread. As `ec.pins` is for encoder outputs; but what is held is one run of
chunks, from the first that vLLM lacks.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from connectors.counters import Counters
from connectors.kv.chunks import key_of
from connectors.kv.requests import ChunkPin, KvRequest
from connectors.pass_time import PassTimes
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from connectors.kv.shape import KvShape
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import Prefetched


class KvPins:
    """All pins of one engine.

    Args:
        budget_bytes: bound on the bytes of all pins together.
        times: what a pass may wait for answers.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        budget_bytes: int,
        shape: "KvShape",
        times: PassTimes,
        counters: Counters,
    ) -> None:
        self._buffer = buffer
        self._budget_bytes = budget_bytes
        self._shape = shape
        self._times = times
        self._counters = counters
        self._held_bytes = 0

    def ask(self, state: KvRequest, names: Sequence[str]) -> bool:
        """Ask for these chunks, as many as there is room for; False if there is none."""
        room = (self._budget_bytes - self._held_bytes) // self._shape.chunk_bytes
        if names and room < 1:
            return False
        if len(names) > room:
            self._counters.add("over_budget")
        state.asked = True
        if names:
            self._prefetch(state, names[:room])
        return True

    def _prefetch(self, state: KvRequest, names: Sequence[str]) -> None:
        ranks = self._shape.ranks
        keys = [key_of(name, rank) for name in names for rank in range(ranks)]
        handles = self._times.first_sights.spend_on(
            lambda seconds: self._buffer.prefetch(keys, timeout=seconds)
        )
        state.pins = [
            ChunkPin(name, handles[index * ranks : (index + 1) * ranks])
            for index, name in enumerate(names)
        ]
        self._held_bytes += len(names) * self._shape.chunk_bytes

    def present(self, state: KvRequest) -> tuple[int, bool]:
        """How many chunks are here in one run, and whether it is known that there are no more."""
        for pin in state.pins[state.present :]:
            found = pin.state
            if found is not PrefetchState.RESIDENT:
                return state.present, found is not PrefetchState.PENDING
            state.present += 1
        return state.present, True

    def rest(self, pin: ChunkPin) -> None:
        """The pass before found nothing to run, and vLLM would ask again at once, keeping Python's
        lock from the thread that hears the node's answers."""
        for handle in pin.handles:
            if handle.state is PrefetchState.PENDING and not self._times.idle.is_over:
                self._times.idle.spend_on(partial(_wait, handle))

    def keep_only(self, state: KvRequest, count: int) -> None:
        """Let go of what comes after the first gap, and say once why there is one."""
        beyond = state.pins[count:]
        if not beyond:
            return
        reason = (
            beyond[0].reason if beyond[0].state is not PrefetchState.PENDING else MissReason.TIMEOUT
        )
        self._counters.add(f"miss:{reason}")
        del state.pins[count:]
        self._release(beyond)

    def forget(self, state: KvRequest) -> None:
        """Nothing is asked for, held or loaded for the request any more."""
        pins, state.pins, state.present = state.pins, [], 0
        state.asked = state.loading = False
        state.deadline = 0.0
        self._release(pins)

    def _release(self, pins: list[ChunkPin]) -> None:
        self._held_bytes -= len(pins) * self._shape.chunk_bytes
        for pin in pins:
            for handle in pin.handles:
                self._buffer.release(handle)


def _wait(handle: "Prefetched", seconds: float) -> bool:
    return handle.wait(seconds) is not PrefetchState.PENDING
