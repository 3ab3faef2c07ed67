"""The inbox: what the other ends have offered to one end and nobody has received yet."""

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
    """Where an offer came from."""

    def receive(self, offer: "Offer", memory: memoryview, spare: "Spare | None" = None) -> bool: ...

    def discard(self, offer: "Offer") -> None: ...


Spare = Callable[[], memoryview]
"""Makes memory for bytes that may still come after whoever waited for them has given up."""


@dataclass(slots=True, eq=False)
class Arrival:
    """The bytes of an offer on their way into memory that the receiver made."""

    memory: memoryview
    moving: bool = False
    """They are being written there now."""
    over: bool = False
    gone: bool = False
    """The sender gave up before it was asked."""
    payload: memoryview | None = None
    """Where they lie, if that is not `memory`."""


@dataclass(slots=True, eq=False)
class Offer:
    """A message that can be received."""

    source: Source
    number: int
    """The source's."""
    key: bytes | None
    header: TensorHeader
    payload: bytearray | memoryview | None
    """The bytes, where they came with it or lie in memory that both ends see; else they are to be
    asked for."""
    arrival: Arrival | None = None
    """Set once they were asked for."""
    value: Any = None
    """Whose memory that is, unless it is the caller's."""
    arrived: int = field(default_factory=itertools.count().__next__)
    """In the order in which offers came."""
    cost: int = 0
    """What it takes here: set when it is put into the inbox."""


@dataclass(slots=True)
class Inbox:
    """Thread-safe. Of each source it takes `most_bytes`."""

    most_bytes: int
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _offers: defaultdict[bytes | None, deque[Offer]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    _held_bytes: defaultdict[Source, int] = field(default_factory=lambda: defaultdict(int))
    _end: LookupBufferError | None = None

    def put(self, offer: Offer) -> None:
        """
        Raises:
            ProtocolError: its source has offered too much that nobody has received.
        """
        # What lies in memory that both ends see is its sender's.
        here = len(offer.payload) if type(offer.payload) is bytearray else 0
        offer.cost = max(here + len(offer.key or b""), MESSAGE_BYTES)
        with self._changed:
            held = self._held_bytes[offer.source] + offer.cost
            if held > self.most_bytes:
                most = f"inbox_bytes, {self.most_bytes}"
                raise ProtocolError(f"the other end sent more that nobody receives than {most}")
            self._held_bytes[offer.source] = held
            self._offers[offer.key].append(offer)
            self._changed.notify_all()

    def put_back(self, offer: Offer) -> None:
        """It was taken and not received: the next one gets it."""
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
        """The oldest under that key, or under any. It stays where `check` raises.

        Raises:
            LookupTimeout: there was none by the deadline, a monotonic time.
            LookupBufferError: see `end`.
        """
        with self._changed:
            while not (queue := self._queue_of(key)):
                if self._end is not None:
                    raise type(self._end)(str(self._end))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise LookupTimeout("nothing came through the pipe in the time given")
            offer = queue[0]
            if check is not None:
                check(offer)
            queue.popleft()
            self._forget(offer)
            if not queue:
                del self._offers[offer.key]
            return offer

    def remove(self, source: Source, number: int, key: bytes | None) -> None:
        """Its sender takes it back, if it is still there."""
        with self._changed:
            self._keep(key, lambda offer: (offer.source, offer.number) != (source, number))

    def lose(self, source: Source) -> None:
        """The source is gone; what has come with its offer, or lies here, stays."""
        with self._changed:
            for key in list(self._offers):
                self._keep(key, lambda o: o.source is not source or o.payload is not None)

    def settled(self, key: "bytes | AnyKey | None") -> bool:
        """Whether `take` has something to return or to raise at this moment."""
        with self._changed:
            return self._end is not None or bool(self._queue_of(key))

    @property
    def empty(self) -> bool:
        """At this moment; to be asked without its lock."""
        return not self._offers

    def end(self, error: LookupBufferError | None, *, clear: bool = False) -> None:
        """What those are told who find nothing; None: to wait again."""
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
