"""A dictionary whose entries end, for the store in memory."""

from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Expiring(Generic[_Key, _Value]):
    """A dictionary whose entries end. Ended ones are swept out before they outnumber the rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[_Key, tuple[_Value, float]] = {}
        self._sweep_at = 1024
        self._swept_at_seconds = clock()

    def get(self, key: _Key) -> _Value | None:
        entry = self._entries.get(key)
        if entry is None or entry[1] <= self._clock():
            return None
        return entry[0]

    def remaining_seconds(self, key: _Key) -> float:
        entry = self._entries.get(key)
        return max(0.0, entry[1] - self._clock()) if entry else 0.0

    def put(self, key: _Key, value: _Value, seconds: float) -> None:
        self._entries[key] = (value, self._clock() + seconds)
        if len(self._entries) >= self._sweep_at:
            self._sweep()

    def has_room(self, entries_max: int) -> bool:
        """Whether one more fits. Looks for ended entries once a second at most: it looks at all."""
        if len(self._entries) >= entries_max and self._clock() >= self._swept_at_seconds + 1:
            self._sweep()
        return len(self._entries) < entries_max

    def replace(self, key: _Key, value: _Value) -> None:
        self._entries[key] = (value, self._entries[key][1])

    def drop(self, key: _Key) -> None:
        self._entries.pop(key, None)

    def items(self) -> list[tuple[_Key, _Value]]:
        now = self._clock()
        return [(key, value) for key, (value, end) in self._entries.items() if end > now]

    def _sweep(self) -> None:
        self._entries = {name: self._entries[name] for name, _ in self.items()}
        self._sweep_at = max(1024, 2 * len(self._entries))
        self._swept_at_seconds = self._clock()
