"""The admission queue of hand-offs: inserts that wait for space in the arena.

Hand-offs are never evicted, so an insert beyond their share waits until others are taken. Meanwhile
it is offered: if its taker requests it, it may use the share of pins, because it will not stay. So
a full share blocks neither takers nor the writers they wait for. There is no order: whatever fits
is admitted. Called by `intake` on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import BufferFull, LookupBufferError
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.handoffs import TTL_SECONDS, Handoffs
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.waiting import Waiting
from lookup_buffer.protocol.header import TensorHeader


@dataclass(slots=True, eq=False)
class Arrival:
    """One insert of a hand-off. `admitted` or `refused` is called once, unless its client
    disconnects."""

    address: QualifiedKey
    header: TensorHeader
    ttl_seconds: float | None
    until: float
    """The insert's deadline, by the loop's clock."""
    connection: Connection
    admitted: Callable[[Item], None]
    refused: Callable[[LookupBufferError], None]
    on_wanted: Callable[[], None] = lambda: None
    end: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Arrivals:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    handoffs: Handoffs
    waiting: Waiting
    _queue: dict[Arrival, None] = field(default_factory=dict)
    _looking: bool = False
    """An attempt to admit queued inserts is scheduled."""

    def come(self, arrival: Arrival) -> None:
        """Admit it now, or queue it until its deadline. Call `landed` when it is settled."""
        try:
            item = self._reserve(arrival)
        except BufferFull as error:
            if self.loop.time() >= arrival.until:
                arrival.refused(error)
                return
            self._enqueue(arrival)
        except LookupBufferError as error:
            arrival.refused(error)
        else:
            arrival.admitted(item)

    def landed(self, arrival: Arrival) -> None:
        """The insert is settled, and its takers were served: end its offer."""
        self.handoffs.withdraw(arrival.address, arrival.on_wanted)

    def leave(self, connection: Connection) -> bool:
        """The client disconnected: drop its queued inserts. Returns whether there were any."""
        left = [one for one in self._queue if one.connection is connection]
        for arrival in left:
            self._dequeue(arrival)
            self.landed(arrival)
        return bool(left)

    def _reserve(self, arrival: Arrival) -> Item:
        ttl_seconds = TTL_SECONDS if arrival.ttl_seconds is None else arrival.ttl_seconds
        return self.shelf.reserve_handoff(
            arrival.address,
            arrival.header,
            ttl_seconds=ttl_seconds,
            wanted=self.handoffs.wanted(arrival.address),
        )

    def _enqueue(self, arrival: Arrival) -> None:
        arrival.on_wanted = partial(self._try, arrival)
        arrival.end = self.loop.call_at(arrival.until, self._too_late, arrival)
        self._queue[arrival] = None
        self.shelf.when_room(partial(call_from_thread, self.loop, self._room_came))
        self.handoffs.offer(arrival.address, arrival.header, arrival.on_wanted)
        self.waiting.arrived(arrival.address)  # waiters of this host now queue for it
        self._try(arrival)  # space that was freed before `when_room` caused no call

    def _room_came(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        for arrival in list(self._queue):
            self._try(arrival)

    def _try(self, arrival: Arrival, *, last: bool = False) -> None:
        if arrival not in self._queue:
            return  # admitted, or dropped
        try:
            item = self._reserve(arrival)
        except BufferFull as error:
            if last:
                self._dequeue(arrival)
                self.landed(arrival)
                arrival.refused(error)
            return
        self._dequeue(arrival)
        arrival.admitted(item)

    def _too_late(self, arrival: Arrival) -> None:
        self._try(arrival, last=True)

    def _dequeue(self, arrival: Arrival) -> None:
        del self._queue[arrival]
        if arrival.end is not None:
            arrival.end.cancel()
        if not self._queue:
            self.shelf.when_room(None)
