"""The engine's own encodes, from vLLM's allocation until the encoding step has certainly run.

Scheduling passes renew the claims of these items, and nothing else does: an engine that hangs loses
them. Pure bookkeeping; `EcClaims` uses it on vLLM's scheduler thread.
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
    planned_by: str = ""
    """The running request that encodes the item in a later step; "" once vLLM allocated the
    item."""
    step: int | None = None
    renewed_at: float = -math.inf


class EngineEncodes:
    """Items that vLLM allocated for an encode, or that a running request will encode.

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
        """Longest of the last `OBSERVATIONS` encodes, from allocation to the end of the step; 0
        without any."""
        return max(self._seconds, default=0.0)

    def begin(self, identifier: str, key: TensorKey) -> None:
        """vLLM allocated the item."""
        self._encodes[identifier] = _Encode(key, self._clock())

    def plan(self, request_id: str, identifier: str, key: TensorKey) -> None:
        """This running request will encode the item in a later step."""
        if identifier not in self._encodes:
            self._encodes[identifier] = _Encode(key, self._clock(), request_id)

    def cancel_plan(self, request_id: str, identifier: str) -> None:
        """The request will not encode the item."""
        encode = self._encodes.get(identifier)
        if encode is not None and encode.planned_by == request_id:
            del self._encodes[identifier]

    def drop(self, identifier: str) -> TensorKey | None:
        """The step does not encode the item. Returns its key, or None where no encode was
        tracked."""
        encode = self._encodes.pop(identifier, None)
        return None if encode is None else encode.key

    def end_pass(self, step: int, *, dispatched: bool) -> list[TensorKey]:
        """A step was built. `dispatched`: it carries all allocations that no step carried before.

        Returns the keys whose claims are due for renewal.
        """
        if not self._encodes:
            return []
        now = self._clock()
        due: list[TensorKey] = []
        for identifier, encode in list(self._encodes.items()):
            if encode.step is None:
                encode.step = step if dispatched and not encode.planned_by else None
            elif encode.step + self._steps_in_flight <= step:
                del self._encodes[identifier]
                self._seconds.append(now - encode.allocated_at)
                continue
            if now - encode.renewed_at >= self._renew_seconds:
                encode.renewed_at = now
                due.append(encode.key)
        return due
