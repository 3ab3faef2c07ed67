"""The admission queue of hand-offs: inserts that wait for space in the arena.

Hand-offs are never evicted, so an insert beyond their share waits until others are taken. Meanwhile
it is offered: if its taker requests it, it may use the share of pins, because it will not stay. So
a full share blocks neither takers nor the writers they wait for. There is no order: whatever fits
is admitted. Called by `intake` on the loop's thread.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import BufferFull
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.handoffs import TTL_SECONDS, Handoffs
from lookup_buffer.node.inventory import Item
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.waiting import Waiting
from lookup_buffer.protocol.header import TensorHeader


@dataclass(slots=True, eq=False)
class Arrival:
    """One insert of a hand-off."""

    address: QualifiedKey
    header: TensorHeader
    ttl_seconds: float | None
    until: float
    """The insert's deadline, by the loop's clock."""
    on_wanted: "partial[bool] | None" = None
    """Called when a taker requests it, while it is offered."""


@dataclass(slots=True)
class Arrivals:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    handoffs: Handoffs
    waiting: Waiting
    _queue: dict[Arrival, "asyncio.Future[Item]"] = field(default_factory=dict)
    _looking: bool = False
    """An attempt to admit queued inserts is scheduled."""

    async def admit(self, arrival: Arrival) -> Item:
        """Memory for the hand-off, as soon as there is room, until the insert's deadline. Call
        `landed` once the insert is settled, and its takers are served.

        Raises:
            TensorTooLarge, BufferFull: see `Inventory.reserve_handoff`.
        """
        try:
            return self._reserve(arrival)
        except BufferFull:
            if self.loop.time() >= arrival.until:
                raise
        arrival.on_wanted = partial(self._try, arrival)
        return await self._queued(arrival)

    def landed(self, arrival: Arrival) -> None:
        """End its offer, if there was one. Idempotent."""
        if arrival.on_wanted is not None:
            self.handoffs.withdraw(arrival.address, arrival.on_wanted)
            arrival.on_wanted = None

    async def _queued(self, arrival: Arrival) -> Item:
        admitted: asyncio.Future[Item] = self.loop.create_future()
        self._queue[arrival] = admitted
        self.shelf.when_room(partial(call_from_thread, self.loop, self._room_came))
        assert arrival.on_wanted is not None
        try:
            self.handoffs.offer(arrival.address, arrival.header, arrival.on_wanted)
            self.waiting.arrived(arrival.address)  # waiters of this host now queue for it
            self._try(arrival)  # space that was freed before `when_room` caused no call
            async with asyncio.timeout_at(arrival.until):
                return await admitted
        except TimeoutError:
            return admitted.result() if not admitted.cancelled() else self._reserve(arrival)
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.shelf.abandon(admitted.result())
            raise
        finally:
            del self._queue[arrival]
            if not self._queue:
                self.shelf.when_room(None)

    def _reserve(self, arrival: Arrival) -> Item:
        ttl_seconds = TTL_SECONDS if arrival.ttl_seconds is None else arrival.ttl_seconds
        return self.shelf.reserve_handoff(
            arrival.address,
            arrival.header,
            ttl_seconds=ttl_seconds,
            wanted=self.handoffs.wanted(arrival.address),
        )

    def _room_came(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        refused_bytes: int | None = None
        for arrival in list(self._queue):
            nbytes = arrival.header.nbytes
            is_wanted = self.handoffs.wanted(arrival.address)
            if not is_wanted and refused_bytes is not None and nbytes >= refused_bytes:
                continue  # there was no room for a smaller one
            if not self._try(arrival) and not is_wanted:
                refused_bytes = nbytes

    def _try(self, arrival: Arrival) -> bool:
        """Returns whether it waits no longer."""
        admitted = self._queue.get(arrival)
        if admitted is None or admitted.done():
            return True  # admitted, or dropped
        try:
            admitted.set_result(self._reserve(arrival))
        except BufferFull:
            return False
        return True
