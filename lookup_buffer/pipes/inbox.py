"""Inbox: what the remote ends have offered to this end and no caller has received yet.

Pure bookkeeping under one lock. The threads that read frames put offers in; callers take them out.
It bounds the memory of each source. The transfer of bytes is not its part.
"""

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lookup_buffer.errors import LookupBufferError, LookupTimeout, ProtocolError
from lookup_buffer.pipes.pipe import MESSAGE_BYTES
from lookup_buffer.pipes.pipe import Any as AnyKey
from lookup_buffer.protocol.header import TensorHeader


class Source(Protocol):
    """The origin of an offer: a `RemoteEnd`."""

    def receive(
        self, offer: "Offer", memory: memoryview, fresh_memory: "FreshMemory | None" = None
    ) -> bool: ...

    def discard(self, offer: "Offer") -> None: ...


FreshMemory = Callable[[], memoryview]
"""Allocates memory for bytes that may still arrive after their receiver has timed out."""


@dataclass(slots=True, eq=False)
class Arrival:
    """The requested bytes of an offer, on their way into the receiver's memory."""

    memory: memoryview
    moving: bool = False
    """The bytes are being written there now."""
    finished: bool = False
    abandoned: bool = False
    """The sender gave up before it got the request."""
    payload: memoryview | None = None
    """The bytes, if they are not in `memory` but in shared memory."""


@dataclass(slots=True, eq=False)
class Offer:
    """A message that can be received."""

    source: Source
    number: int
    """Its number at the source."""
    key: bytes | None
    header: TensorHeader
    payload: bytearray | memoryview | None
    """The bytes, if they came with the offer or are in shared memory; None if they must be
    requested."""
    arrival: Arrival | None = None
    """Set once the bytes were requested."""
    value: Any = None
    """The tensor that owns the arrival's memory; None if that is the caller's."""
    arrived: int = field(default_factory=itertools.count().__next__)
    """Numbers increase in the order in which offers arrived."""
    cost: int = 0
    """Its bytes charged to the source; set when it is put into the inbox."""


@dataclass(slots=True)
class Inbox:
    """Thread-safe. Accepts at most `most_bytes` from each source."""

    most_bytes: int
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _offers: defaultdict[bytes | None, deque[Offer]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    _held_bytes: defaultdict[Source, int] = field(default_factory=lambda: defaultdict(int))
    _end: LookupBufferError | None = None

    def put(self, offer: Offer) -> None:
        """Add an offer, and charge it to its source.

        Raises:
            ProtocolError: the source has more than `most_bytes` in unreceived offers.
        """
        # The sender pays for a payload in shared memory.
        here = len(offer.payload) if type(offer.payload) is bytearray else 0
        offer.cost = max(here + len(offer.key or b""), MESSAGE_BYTES)
        with self._changed:
            held = self._held_bytes[offer.source] + offer.cost
            if held > self.most_bytes:
                raise ProtocolError(
                    f"the other end sent {held} bytes that are not received, and inbox_bytes is "
                    f"{self.most_bytes}: receive them, or raise inbox_bytes"
                )
            self._held_bytes[offer.source] = held
            self._offers[offer.key].append(offer)
            self._changed.notify_all()

    def put_back(self, offer: Offer) -> None:
        """Put back an offer that was taken and not received; the next `take` of its key gets it."""
        with self._changed:
            self._held_bytes[offer.source] += offer.cost
            self._offers[offer.key].appendleft(offer)
            self._changed.notify_all()

    def take(
        self,
        key: "bytes | AnyKey | None",
        deadline: float,
        check: Callable[[Offer], None] | None = None,
    ) -> Offer:
        """Remove and return the oldest offer under that key, or under any key. If `check` raises,
        the offer stays.

        Raises:
            LookupTimeout: there was none by the deadline, a monotonic time.
            LookupBufferError: see `end`.
        """
        with self._changed:
            while not (queue := self._queue_of(key)):
                if self._end is not None:
                    raise type(self._end)(str(self._end))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LookupTimeout("no message arrived in time")
            offer = queue[0]
            if check is not None:
                check(offer)
            queue.popleft()
            self._forget(offer)
            if not queue:
                del self._offers[offer.key]
            return offer

    def remove(self, source: Source, number: int, key: bytes | None) -> None:
        """Remove an offer that its sender withdrew, if it is still there."""
        with self._changed:
            self._keep(key, lambda offer: (offer.source, offer.number) != (source, number))

    def remove_source(self, source: Source) -> None:
        """Remove the offers of a source that has ended, except those whose bytes are here."""
        with self._changed:
            for key in list(self._offers):
                self._keep(key, lambda o: o.source is not source or o.payload is not None)

    def is_ready(self, key: "bytes | AnyKey | None") -> bool:
        """Whether `take` would return or raise at once."""
        with self._changed:
            return self._end is not None or bool(self._queue_of(key))

    @property
    def is_empty(self) -> bool:
        """Whether there is no offer at this moment. Needs no lock."""
        return not self._offers

    def end(self, error: LookupBufferError | None, *, clear: bool = False) -> None:
        """Set the error that `take` raises when there is no offer; None: it waits. `clear` drops
        all offers."""
        with self._changed:
            self._end = error
            if clear:
                self._offers.clear()
                self._held_bytes.clear()
            self._changed.notify_all()

    def _queue_of(self, key: "bytes | AnyKey | None") -> "deque[Offer] | None":
        if not isinstance(key, AnyKey):
            return self._offers.get(key)
        keyed = [queue for name, queue in self._offers.items() if name is not None]
        return min(keyed, key=lambda queue: queue[0].arrived, default=None)

    def _keep(self, key: bytes | None, wanted: Callable[[Offer], bool]) -> None:
        kept: deque[Offer] = deque()
        for offer in self._offers.get(key, ()):
            if wanted(offer):
                kept.append(offer)
            else:
                self._forget(offer)
        if kept:
            self._offers[key] = kept
        else:
            self._offers.pop(key, None)

    def _forget(self, offer: Offer) -> None:
        left = self._held_bytes[offer.source] - offer.cost
        if left > 0:
            self._held_bytes[offer.source] = left
        else:
            del self._held_bytes[offer.source]
