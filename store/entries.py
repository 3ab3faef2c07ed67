"""The mirror's cache: entries by namespace and key, bounded in number and in age."""

import math
from collections import ChainMap, OrderedDict
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

from store.base import Entry, Forgotten
from store.record import Record
from store.tracking import TrackedConnection

ABSENT_SECONDS_MAX = 1.0
"""An absent key is cached no longer than this, which bounds the cost of a lost push."""
KEY_CHARACTERS: Final = 512
"""An entry counts 1, and 1 more for each so many characters of its key."""
_AGING = 1000
"""Entries dropped in one step: one or two milliseconds on the shared thread."""
_NONE: Mapping[str, "Entry"] = MappingProxyType({})


class Entries:
    """At most `most` entries, fewer if their keys are long; above that, those read longest ago are
    dropped. Not thread-safe."""

    def __init__(self, most: int, forgotten: Forgotten = lambda _: None) -> None:
        self._most = most
        self._forgotten = forgotten
        self._by_connection: dict[TrackedConnection, _ConnectionEntries] = {}
        self._lost: list[_ConnectionEntries] = []
        """Entries of lost connections: no longer readable, and freed in steps."""
        self.absent_seconds_max = ABSENT_SECONDS_MAX

    def __len__(self) -> int:
        return sum(len(subset.order) for subset in self._by_connection.values())

    def of(self, namespace: str) -> Mapping[str, Entry]:
        every = (subset.by_namespace.get(namespace) for subset in self._by_connection.values())
        found = [entries for entries in every if entries]
        if len(found) > 1:
            return _MergedEntries(*found)
        return found[0] if found else _NONE

    def put(
        self,
        name: bytes,
        namespace: str,
        key: str,
        connection: TrackedConnection,
        record: Record | None,
        now: float,
    ) -> None:
        """Cache `record`, or that there is none, as read on `connection` at `now`."""
        self.drop(name)  # also another connection's entry, if the key has moved
        subset = self._by_connection.get(connection)
        if subset is None:
            subset = self._by_connection[connection] = _ConnectionEntries(self._forgotten)
        until = now + self.absent_seconds_max if record is None else math.inf
        subset.put(name, namespace, key, Entry(record, now, until))
        while sum(each.size for each in self._by_connection.values()) > self._most:
            oldest = min(self._by_connection.values(), key=_ConnectionEntries.oldest)
            oldest.drop(next(iter(oldest.order)))

    def names(self, connection: TrackedConnection) -> list[bytes]:
        """Redis keys of all that was read on that connection."""
        subset = self._by_connection.get(connection)
        return [] if subset is None else list(subset.order)

    def drop(self, name: bytes) -> None:
        for subset in self._by_connection.values():
            if name in subset.order:
                subset.drop(name)

    def drop_all(self, connection: TrackedConnection) -> None:
        """Drop all that was read on that connection, in constant time."""
        subset = self._by_connection.pop(connection, None)
        if subset is not None:
            self._forgotten(None)
            subset.forgotten = lambda _: None
            self._lost.append(subset)

    def drop_older(self, bound: float) -> bool:
        """Drop some of those read before `bound`, or lost; return whether more may remain."""
        if self._lost:
            if not self._lost[-1].drop_older(math.inf):
                self._lost.pop()
            return True
        return any(subset.drop_older(bound) for subset in self._by_connection.values())


class _ConnectionEntries:
    """What was read on one connection."""

    def __init__(self, forgotten: Forgotten) -> None:
        self.forgotten = forgotten
        self.by_namespace: dict[str, dict[str, Entry]] = {}
        # By the key's name in Redis, read longest ago first. An OrderedDict, because removing the
        # first key of a dict again and again walks over all the gaps.
        self.order: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self.size = 0
        """What the entries count together."""

    def put(self, name: bytes, namespace: str, key: str, entry: Entry) -> None:
        """Add an entry; its key must not be present."""
        self.order[name] = (namespace, key)
        self.by_namespace.setdefault(namespace, {})[key] = entry
        self.size += _size_of(key)

    def drop(self, name: bytes) -> None:
        """Drop an entry, which must be present."""
        namespace, key = self.order.pop(name)
        self.size -= _size_of(key)
        entries = self.by_namespace[namespace]
        entry = entries.pop(key)
        if not entries:
            del self.by_namespace[namespace]
        if entry.verdict:
            self.forgotten((namespace, key))

    def drop_older(self, bound: float) -> bool:
        """Drop some of those read before `bound`; return whether more may remain."""
        for name, (namespace, key) in list(islice(self.order.items(), _AGING)):
            if self.by_namespace[namespace][key].read_at > bound:
                return False
            self.drop(name)
        return bool(self.order)

    def oldest(self) -> float:
        """When the oldest entry was read; infinity if there is none."""
        for namespace, key in self.order.values():
            return self.by_namespace[namespace][key].read_at
        return math.inf


def _size_of(key: str) -> int:
    return 1 + len(key) // KEY_CHARACTERS


class _MergedEntries(ChainMap[str, Entry]):
    """The entries of a namespace whose keys are on several servers. A key is in one of the maps."""

    def get(self, key: str, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        for entries in self.maps:  # four times as fast as ChainMap.get
            if (entry := entries.get(key)) is not None:
                return entry
        return default
