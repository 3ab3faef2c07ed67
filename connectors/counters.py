"""Event counts, the rate-limited log and the metrics of both connectors.

A counter's name is an event and, after a colon, its reason. `Counters` and `RateLimitedLog` are
thread-safe. `EventCounts` carries the counts since the last report in vLLM's own statistics.
`CountedFamilies` runs in the API server, where vLLM makes it once. It adds the counts of scheduler
and workers to vLLM's `/metrics`. A family counts one or a few events; its one label distinguishes
them.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from prometheus_client import Counter

# A child of vLLM's own logger: vLLM configures handlers for `vllm` and for nothing else. Under a
# name of our own, warnings would have no format, and lower levels would not be logged at all.
logger = logging.getLogger("vllm.lookup_buffer")

LOG_INTERVAL_SECONDS: Final = 30.0
REASONS_MAX: Final = 64
"""Values of one label; more are counted as `other`. Reasons are a small fixed set."""
OTHER: Final = "other"


class Counters:
    """Named counts since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, int]:
        """What was added since the last `take`."""
        with self._lock:
            fresh = {
                name: count - self._taken.get(name, 0)
                for name, count in self._counts.items()
                if count != self._taken.get(name, 0)
            }
            self._taken.update(self._counts)
            return fresh


class RateLimitedLog:
    """Logs at most one line per reason and interval. The next line gives the number of suppressed
    lines.

    Reasons are few and fixed, so the memory is bounded.
    """

    def __init__(
        self,
        interval_seconds: float = LOG_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def report(self, reason: str, message: str, *args: object) -> None:
        now = self._clock()
        with self._lock:
            last = self._logged_at.get(reason)
            if last is not None and now - last < self._interval_seconds:
                self._suppressed[reason] = self._suppressed.get(reason, 0) + 1
                return
            self._logged_at[reason] = now
            suppressed = self._suppressed.pop(reason, 0)
        more = f" ({suppressed} more since the last such line)" if suppressed else ""
        logger.warning("lookup buffer: " + message + "%s", *args, more)  # noqa: G003


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str
    text: str
    label: str = ""
    events: Mapping[str, str] = field(default_factory=dict)
    """For each event the value of `label`; "" for the reason in the counter's name."""


class CountedFamilies:
    """Families of counters, with the labels of each engine. The last three arguments are vLLM's."""

    def __init__(
        self,
        families: Sequence[Family],
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._engines = per_engine_labelvalues
        counter = metric_types[Counter]
        self._by_event: dict[str, tuple[Family, Any, set[str]]] = {}
        for family in families:
            labels = [*labelnames, family.label] if family.label else list(labelnames)
            metric = counter(name=family.name, documentation=family.text, labelnames=labels)
            values: set[str] = set()
            for event in family.events:
                self._by_event[event] = (family, metric, values)
            self._create_at_zero(family, metric)

    def observe(self, counts: Mapping[str, int], engine: int) -> None:
        for name, count in counts.items():
            event, _, reason = name.partition(":")
            found = self._by_event.get(event)
            if found is None:
                continue
            family, metric, values = found
            labels = list(self._engines[engine])
            if family.label:
                labels.append(_bounded(family.events[event] or reason or OTHER, values))
            metric.labels(*labels).inc(count)

    def _create_at_zero(self, family: Family, metric: Any) -> None:
        """Create each series with known labels at 0, so that a rate includes the first event."""
        for labels in self._engines.values():
            if not family.label:
                metric.labels(*labels)
            for value in filter(None, family.events.values()):
                metric.labels(*labels, value)


class EventCounts:
    """The methods that vLLM requires of its connectors' statistics. `data` maps a counter's name to
    its growth."""

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


def _bounded(value: str, values: set[str]) -> str:
    if value not in values and len(values) >= REASONS_MAX:
        return OTHER
    values.add(value)
    return value
