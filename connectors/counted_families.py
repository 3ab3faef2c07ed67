"""Counters of ours on vLLM's own `/metrics`.

Made once in the API server; `observe` gets what scheduler and workers counted since the last time.
A counter of ours is an event and, behind a colon, its reason; a family here takes one event or a
few, and its one label tells them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter

REASONS_MAX: Final = 64
"""Values of one label; more are counted as `other`. Reasons are words of ours, and few."""
OTHER: Final = "other"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `events` maps an event to its value of `label`; "" stands for the event's own
    reason."""

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
        """What is known to come is there from the start, so that a rate sees the first one."""
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
