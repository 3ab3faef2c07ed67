"""What vLLM's own scheduler did, step by step, as JSON lines in a file.

The scheduler's process writes the file (`counting_scheduler.py`); the process that controls the
engine reads it. The log is independent of the connector: it counts what was scheduled.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One image of one request, by vLLM's identifiers of both."""

    request: str
    identifier: str


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduling pass that scheduled something."""

    number: int
    tokens: int
    requests: tuple[str, ...]
    encoded: tuple[Item, ...]
    """Images that were scheduled to be encoded by the vision tower in this step."""
    loaded: tuple[Item, ...]
    """Images that the connector loaded instead."""

    def to_line(self) -> str:
        fields = {
            "number": self.number,
            "tokens": self.tokens,
            "requests": list(self.requests),
            "encoded": [[item.request, item.identifier] for item in self.encoded],
            "loaded": [[item.request, item.identifier] for item in self.loaded],
        }
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Step":
        fields: dict[str, Any] = json.loads(line)
        return cls(
            number=fields["number"],
            tokens=fields["tokens"],
            requests=tuple(fields["requests"]),
            encoded=tuple(Item(*pair) for pair in fields["encoded"]),
            loaded=tuple(Item(*pair) for pair in fields["loaded"]),
        )


class ScheduleLog:
    """Reads the steps written so far; an incomplete last line is left for the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def steps(self) -> list[Step]:
        if not self._path.exists():
            return []
        text = self._path.read_text(encoding="utf-8")
        return [Step.from_line(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def encoder_runs(self) -> int:
        """Images encoded since the engine started."""
        return sum(len(step.encoded) for step in self.steps())

    def images(self, request: str) -> list[tuple[str, Item]]:
        """(origin, image) for each image of a request, in the order of the schedule.

        The origin is "encoded", or "loaded" through the connector. An image that vLLM's own encoder
        cache held, or that another request of the same step brought, is not in the log and not
        listed. `request` is the id of the engine's caller; vLLM adds a random suffix to it.
        """
        found = []
        for step in self.steps():
            found += [("encoded", item) for item in step.encoded if _same_request(item, request)]
            found += [("loaded", item) for item in step.loaded if _same_request(item, request)]
        return found


def _same_request(item: Item, request: str) -> bool:
    return item.request == request or item.request.rpartition("-")[0] == request
