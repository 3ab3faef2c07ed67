"""Counts per event since the last report, as vLLM's own statistics carry them. Pure."""

from typing import Any, Self


class EventCounts:
    """What vLLM wants its connectors' statistics to be able to; `data` maps a counter's name to
    what it grew by."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> Self:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data
