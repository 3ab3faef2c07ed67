"""Entries: what a mirror has read and may still believe, by namespace and key and by age."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from store.lane import Lane
from store.record import Record

_AGING = 1000
"""Entries looked at in one go: a millisecond or two, for whoever shares the thread."""
_NONE: Mapping[str, "Entry"] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Entry:
    """What the store says of one key, until the mirror drops this object.

    `verdict` belongs to whoever judges the record, at `verdict_epoch` of his own counting.
    """

    record: Record | None
    read_at: float
    verdict: bool = False
    verdict_epoch: int = -1


class Entries:
    """At most `most`: past it those that were read longest ago are dropped. One thread's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_namespace: dict[str, dict[str, Entry]] = {}
        # By the name of the key in Redis, the longest unread first. An OrderedDict, for a dict
        # that loses its first again and again walks over all the gaps to find the next.
        self._order: OrderedDict[bytes, tuple[str, str, Lane]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def of(self, namespace: str) -> Mapping[str, Entry]:
        return self._by_namespace.get(namespace, _NONE)

    def put(
        self, name: bytes, namespace: str, key: str, lane: Lane, record: Record | None, now: float
    ) -> None:
        """`record`, or that there is none, was read on `lane` now."""
        self._order.pop(name, None)
        self._order[name] = (namespace, key, lane)
        self._by_namespace.setdefault(namespace, {})[key] = Entry(record, now)
        while len(self._order) > self._most:
            self.drop(next(iter(self._order)))

    def drop(self, name: bytes) -> None:
        item = self._order.pop(name, None)
        if item is not None:
            namespace, key, _ = item
            entries = self._by_namespace[namespace]
            entries.pop(key, None)
            if not entries:
                del self._by_namespace[namespace]

    def drop_all(self, lane: Lane) -> None:
        """All that was read on that lane."""
        names = [name for name, (_, _, of) in self._order.items() if of is lane]
        if len(names) == len(self._order):
            self._order.clear()
            self._by_namespace.clear()
        else:
            for name in names:
                self.drop(name)

    def drop_older(self, bound: float) -> bool:
        """Some of those read before `bound`; whether there may be more of them."""
        for name, (namespace, key, _) in list(islice(self._order.items(), _AGING)):
            if self._by_namespace[namespace][key].read_at > bound:
                return False
            self.drop(name)
        return bool(self._order)
