"""Entries: what a mirror has read and may still believe, by namespace and key and by age."""

import math
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from store.lane import Lane
from store.record import Record

ABSENT_SECONDS_MAX = 1.0
"""That there is no record is believed no longer: should its push be missed, it costs no more."""
_AGING = 1000
"""Entries dropped in one go: a millisecond or two, for whoever shares the thread."""
_NONE: Mapping[str, "Entry"] = MappingProxyType({})


Forgotten = Callable[[tuple[str, str] | None], None]
"""Told the namespace and key of an entry with the verdict True that is dropped; None: of many."""


@dataclass(slots=True, eq=False)
class Entry:
    """What the store says of one key, until the mirror drops this object, or until `until`.

    `verdict` belongs to whoever judges the record, at `verdict_epoch` of his own counting.
    """

    record: Record | None
    read_at: float
    until: float
    verdict: bool = False
    verdict_epoch: int = -1


class _Heard:
    """What was read on one lane."""

    def __init__(self, forgotten: Forgotten) -> None:
        self.forgotten = forgotten
        self.by_namespace: dict[str, dict[str, Entry]] = {}
        # By the name of the key in Redis, the longest unread first. An OrderedDict, for a dict
        # that loses its first again and again walks over all the gaps to find the next.
        self.order: OrderedDict[bytes, tuple[str, str]] = OrderedDict()

    def put(self, name: bytes, namespace: str, key: str, entry: Entry) -> None:
        """One that is not here."""
        self.order[name] = (namespace, key)
        self.by_namespace.setdefault(namespace, {})[key] = entry

    def drop(self, name: bytes) -> None:
        item = self.order.pop(name, None)
        if item is not None:
            namespace, key = item
            entries = self.by_namespace[namespace]
            entry = entries.pop(key)
            if not entries:
                del self.by_namespace[namespace]
            if entry.verdict:
                self.forgotten((namespace, key))

    def drop_older(self, bound: float) -> bool:
        """Some of those read before `bound`; whether there may be more of them."""
        for name, (namespace, key) in list(islice(self.order.items(), _AGING)):
            if self.by_namespace[namespace][key].read_at > bound:
                return False
            self.drop(name)
        return bool(self.order)

    def oldest(self) -> float:
        """When the longest unread was read; later than any other where there is none."""
        for namespace, key in self.order.values():
            return self.by_namespace[namespace][key].read_at
        return math.inf


class _Together(ChainMap[str, Entry]):
    """The entries of a namespace that several servers share. A key is in one of them."""

    def get(self, key: str, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        for entries in self.maps:  # ChainMap's own is four times as slow
            if (entry := entries.get(key)) is not None:
                return entry
        return default


class Entries:
    """At most `most`: past it those that were read longest ago are dropped. One thread's."""

    def __init__(self, most: int, forgotten: Forgotten = lambda _: None) -> None:
        self._most = most
        self._forgotten = forgotten
        self._heard: dict[Lane, _Heard] = {}
        self._lost: list[_Heard] = []
        """Of lanes that are gone: found by nobody, and freed piece by piece."""
        self.absent_seconds_max = ABSENT_SECONDS_MAX

    def __len__(self) -> int:
        return sum(len(heard.order) for heard in self._heard.values())

    def of(self, namespace: str) -> Mapping[str, Entry]:
        every = (heard.by_namespace.get(namespace) for heard in self._heard.values())
        found = [entries for entries in every if entries]
        if len(found) > 1:
            return _Together(*found)
        return found[0] if found else _NONE

    def put(
        self, name: bytes, namespace: str, key: str, lane: Lane, record: Record | None, now: float
    ) -> None:
        """`record`, or that there is none, was read on `lane` now."""
        self.drop(name)  # also what another lane had read, where the key has moved
        heard = self._heard.get(lane)
        if heard is None:
            heard = self._heard[lane] = _Heard(self._forgotten)
        until = now + self.absent_seconds_max if record is None else math.inf
        heard.put(name, namespace, key, Entry(record, now, until))
        while len(self) > self._most:
            oldest = min(self._heard.values(), key=_Heard.oldest)
            oldest.drop(next(iter(oldest.order)))

    def drop(self, name: bytes) -> None:
        for heard in self._heard.values():
            heard.drop(name)

    def drop_all(self, lane: Lane) -> None:
        """All that was read on that lane, at once, however much it is."""
        heard = self._heard.pop(lane, None)
        if heard is not None:
            self._forgotten(None)
            heard.forgotten = lambda _: None
            self._lost.append(heard)

    def drop_older(self, bound: float) -> bool:
        """Some of those read before `bound`, or lost; whether there may be more of them."""
        if self._lost:
            if not self._lost[-1].drop_older(math.inf):
                self._lost.pop()
            return True
        return any(heard.drop_older(bound) for heard in self._heard.values())
