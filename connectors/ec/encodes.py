"""The engine's own encodes: what vLLM made room for, until the step that encodes it has surely run.

Their claims are renewed by scheduling passes while they last, and by nothing else: an engine that
hangs loses them. Pure bookkeeping, of the scheduler's thread.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lookup_buffer.key import TensorKey

OBSERVATIONS = 16


@dataclass(slots=True)
class _Encode:
    key: TensorKey
    allocated_at: float
    pledged_by: str = ""
    """The request that runs and has it still ahead; "" once vLLM made room for the item."""
    step: int | None = None
    told_at: float = -math.inf


class EngineEncodes:
    """Items that vLLM made room for to encode them, or that a request which runs will come to.

    Args:
        steps_in_flight: how many steps vLLM may have scheduled and not finished.
        renew_seconds: how often a claim is renewed.
    """

    def __init__(
        self, steps_in_flight: int, renew_seconds: float, *, clock: Callable[[], float]
    ) -> None:
        self._steps_in_flight = steps_in_flight
        self._renew_seconds = renew_seconds
        self._clock = clock
        self._encodes: dict[str, _Encode] = {}
        self._seconds: deque[float] = deque(maxlen=OBSERVATIONS)

    def __len__(self) -> int:
        return len(self._encodes)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._encodes

    @property
    def longest_seconds(self) -> float:
        """Of the last few, from room to the end of the step; 0 where there was none."""
        return max(self._seconds, default=0.0)

    def begin(self, identifier: str, key: TensorKey) -> None:
        """vLLM made room for the item."""
        self._encodes[identifier] = _Encode(key, self._clock())

    def pledge(self, request_id: str, identifier: str, key: TensorKey) -> None:
        """This request, which runs, will come to the item."""
        if identifier not in self._encodes:
            self._encodes[identifier] = _Encode(key, self._clock(), request_id)

    def withdraw(self, request_id: str, identifier: str) -> None:
        """It will not."""
        encode = self._encodes.get(identifier)
        if encode is not None and encode.pledged_by == request_id:
            del self._encodes[identifier]

    def drop(self, identifier: str) -> TensorKey | None:
        """It does not come about. Its key, where it was to."""
        encode = self._encodes.pop(identifier, None)
        return None if encode is None else encode.key

    def end_pass(self, step: int, *, dispatched: bool) -> list[TensorKey]:
        """A step was built; `dispatched`: with all that was allocated and not dispatched before.

        Returns the keys whose claims are to be renewed.
        """
        if not self._encodes:
            return []
        now = self._clock()
        due: list[TensorKey] = []
        for identifier, encode in list(self._encodes.items()):
            if encode.step is None:
                encode.step = step if dispatched and not encode.pledged_by else None
            elif encode.step + self._steps_in_flight <= step:
                del self._encodes[identifier]
                self._seconds.append(now - encode.allocated_at)
                continue
            if now - encode.told_at >= self._renew_seconds:
                encode.told_at = now
                due.append(encode.key)
        return due
