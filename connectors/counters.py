"""Counters and limits that both connectors use: event counts, a rate-limited log, metrics, pass
time.

A counter is named by an event and, after a colon, its reason. `Counters` and `RateLimitedLog` may
be used from any thread of one process. `EventCounts` carries counts since the last report through
vLLM's own statistics; it is pure. `CountedFamilies` runs in the API server and is made once there.
It puts the counts of scheduler and workers on vLLM's own `/metrics`; each family takes one or a few
events, and its one label tells them apart.

Pass time is what a scheduling pass may spend on waiting for the node. vLLM schedules nothing else
meanwhile, so each kind of wait has a budget that all requests of a pass share. It belongs to vLLM's
scheduler thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from prometheus_client import Counter

# A child of vLLM's own logger: vLLM configures handlers for `vllm` and for nothing else. Under a
# name of our own, warnings would have no format, and lower levels would not be logged at all.
logger = logging.getLogger("vllm.lookup_buffer")

LOG_INTERVAL_SECONDS = 30.0


class Counters:
    """Named counts since the start. A name is an event and, after a colon, its reason."""

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
    """Logs at most one line per reason and interval. The next line says how many were left out.

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
        self._spoken: dict[str, float] = {}
        self._silent: dict[str, int] = {}

    def report(self, reason: str, message: str, *args: object) -> None:
        now = self._clock()
        with self._lock:
            last = self._spoken.get(reason)
            if last is not None and now - last < self._interval_seconds:
                self._silent[reason] = self._silent.get(reason, 0) + 1
                return
            self._spoken[reason] = now
            silent = self._silent.pop(reason, 0)
        more = f" ({silent} more since the last such line)" if silent else ""
        logger.warning("lookup buffer: " + message + "%s", *args, more)  # noqa: G003


REASONS_MAX: Final = 64
"""Values of one label; more are counted as `other`. Reasons are a small fixed set."""
OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `events` maps an event to the value of `label`; "" means the reason that the
    counter's name contains."""

    name: str
    text: str
    label: str = ""
    events: Mapping[str, str] = field(default_factory=dict)


class CountedFamilies:
    """Families of counters, with the labels of each engine. Arguments as vLLM gives them."""

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
            self._begin_at_zero(family, metric)

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

    def _begin_at_zero(self, family: Family, metric: Any) -> None:
        """Create the series whose labels are known, at 0, so that a rate includes the first
        event."""
        for labels in self._engines.values():
            if not family.label:
                metric.labels(*labels)
            for value in filter(None, family.events.values()):
                metric.labels(*labels, value)


def _bounded(value: str, values: set[str]) -> str:
    if value not in values and len(values) >= REASONS_MAX:
        return OTHER
    values.add(value)
    return value


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


Answer = TypeVar("Answer")


class PassTime:
    """A budget of seconds for each pass.

    Args:
        seconds: of one pass, for all its requests together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = self._left = seconds
        self._clock = clock

    def begin_pass(self) -> None:
        self._left = self._seconds

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def spend_on(self, ask: Callable[[float], Answer]) -> Answer:
        """Call `ask` with the seconds that are left (0 where the budget is used up) and return its
        result."""
        started = self._clock()
        answer = ask(max(self._left, 0.0))
        self._left -= self._clock() - started
        return answer


class IdleTime:
    """A budget of seconds for each pass that follows an idle one, in which nothing ran.

    vLLM asks again at once whether a request may be scheduled. Where none may, it sleeps for a
    millisecond and asks again. That keeps a core busy that node and store could use, so such a pass
    waits for the answer instead.

    Args:
        seconds: of one idle pass, for all its requests together.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._left = 0.0

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the previous pass found nothing to run."""
        self._left = self._seconds if is_idle else 0.0

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def spend_on(self, wait: Callable[[float], bool]) -> bool:
        """Call `wait` with the seconds that are left and return its result: whether it was
        satisfied. An unsuccessful wait uses up the budget."""
        if self.is_over:
            return wait(0.0)
        started = self._clock()
        has_come = wait(self._left)
        # An unsuccessful wait uses up the budget, even by a clock that stands still.
        self._left = self._left - (self._clock() - started) if has_come else 0.0
        return has_come


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Both budgets of one pass."""

    first_sights: PassTime
    """For answers to the first question of a request, or to one that it repeats anew."""
    idle: IdleTime

    def begin_pass(self, *, is_idle: bool) -> None:
        """`is_idle`: the previous pass found nothing to run."""
        self.first_sights.begin_pass()
        self.idle.begin_pass(is_idle=is_idle)
