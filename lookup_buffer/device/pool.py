"""DevicePool: the tensors that a process keeps on its device, within a budget of bytes.

Pure bookkeeping under one lock; any thread may call it. `memory.PoolMemory` makes and reads the
values. At capacity, the least recently used entry without a pin is evicted.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.key import QualifiedKey


@dataclass(slots=True, eq=False)
class Entry:
    """One tensor. Each entry gets a new `mark`, so a request by mark finds exactly this entry."""

    key: QualifiedKey
    value: Any
    nbytes: int
    mark: int
    checksum: int | None
    """Checksum of the bytes. None: its producer put it here, and it is not stored yet."""
    is_own: bool = False
    """Whether its producer, in this process, put it here."""
    pins: int = 0
    removed: bool = False
    """The entry can no longer be found. Its bytes stay charged until the last pin is released."""


@dataclass(frozen=True, slots=True)
class PoolGauges:
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    items: int
    tickets: int


class DevicePool:
    """Thread-safe.

    Args:
        on_evicted: called, without the lock, with the keys evicted to make room.
    """

    def __init__(
        self,
        capacity_bytes: int,
        on_evicted: Callable[[list[QualifiedKey]], None] = lambda _keys: None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._entries: OrderedDict[QualifiedKey, Entry] = OrderedDict()
        self._tickets: dict[int, Entry] = {}
        self._used_bytes = 0
        self._last_mark = 0

    # -- adding

    def reserve(self, nbytes: int) -> None:
        """Reserve so many bytes, which `put` fills or `cancel` returns. Evicts entries where
        necessary.

        Raises:
            TensorTooLarge: more than the whole pool.
            BufferFull: the rest of the pool is pinned or reserved.
        """
        if nbytes > self._capacity_bytes:
            raise TensorTooLarge(f"{nbytes} bytes; the pool holds at most {self._capacity_bytes}")
        in_the_way: list[Entry] = []
        with self._lock:
            missing = nbytes - (self._capacity_bytes - self._used_bytes)
            for entry in self._entries.values():
                if missing <= 0:
                    break
                if not entry.pins:
                    missing -= entry.nbytes
                    in_the_way.append(entry)
            if missing > 0:
                raise BufferFull(f"no room for {nbytes} bytes: the rest of the pool is pinned")
            for entry in in_the_way:
                self._drop(entry)
            self._used_bytes += nbytes
        if in_the_way:
            self._on_evicted([entry.key for entry in in_the_way])

    def cancel(self, nbytes: int) -> None:
        with self._lock:
            self._used_bytes -= nbytes

    def put(self, key: QualifiedKey, value: Any, nbytes: int, checksum: int | None = None) -> Entry:
        """Add the entry for a reservation, pinned once for the caller. It replaces an earlier entry
        of that key."""
        with self._lock:
            former = self._entries.get(key)
            if former is not None:
                self._forget(former)
            self._last_mark += 1
            is_own = checksum is None
            entry = Entry(key, value, nbytes, self._last_mark, checksum, is_own, pins=1)
            self._entries[key] = entry
            return entry

    # -- finding

    def pin(
        self,
        key: QualifiedKey,
        *,
        mark: int | None = None,
        checksums: Collection[int] | None = None,
    ) -> Entry | None:
        """The entry, pinned until `unpin`. None: it is absent, or its mark or checksum differs."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or (mark is not None and entry.mark != mark):
                return None
            if checksums is not None and entry.checksum not in checksums:
                return None
            entry.pins += 1
            self._entries.move_to_end(key)
            return entry

    def has(self, key: QualifiedKey) -> bool:
        with self._lock:
            return key in self._entries

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            self._unpin(entry)

    def forget(self, keys: Iterable[QualifiedKey]) -> None:
        """Remove these entries from lookup. Their bytes stay until the last pin is released."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._forget(entry)

    def own_entries(self) -> list[Entry]:
        """The entries of this process's producers."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.is_own]

    # -- tickets: pins with a number

    def assign(self, ticket: int, entry: Entry) -> None:
        """Transfer the caller's pin to the ticket."""
        with self._lock:
            self._tickets[ticket] = entry

    def entry_of(self, ticket: int) -> Entry | None:
        with self._lock:
            return self._tickets.get(ticket)

    def release(self, tickets: Iterable[int]) -> None:
        """Release the pins of these tickets. Idempotent."""
        with self._lock:
            for ticket in tickets:
                entry = self._tickets.pop(ticket, None)
                if entry is not None:
                    self._unpin(entry)

    def tickets(self) -> list[int]:
        with self._lock:
            return list(self._tickets)

    def gauges(self) -> PoolGauges:
        with self._lock:
            held = {id(e): e.nbytes for e in self._entries.values() if e.pins}
            held |= {id(e): e.nbytes for e in self._tickets.values()}
            return PoolGauges(
                self._capacity_bytes,
                self._used_bytes,
                sum(held.values()),
                len(self._entries),
                len(self._tickets),
            )

    # -- under the lock

    def _unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.removed and not entry.pins:
            self._used_bytes -= entry.nbytes

    def _forget(self, entry: Entry) -> None:
        if entry.pins:
            del self._entries[entry.key]
            entry.removed = True
        else:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._used_bytes -= entry.nbytes
