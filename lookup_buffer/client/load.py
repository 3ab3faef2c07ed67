"""A client's loads: the bytes and the pin of an order, and the client's part in a device pool.

`Loads` copies the bytes of an order and releases its pin; any thread may call it. `PoolMembership`
forwards requests and events between the client's session and the device pool of its process, if it
has one. Events arrive on the client's listening thread. The program creates and closes the pool
(see `device.lane`), because that needs torch and a device, which this module must not import.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lookup_buffer import codec
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.protocol.fields import KEYS_MAX
from lookup_buffer.protocol.messages import Done, Release, Request

if TYPE_CHECKING:
    import torch


class SessionPool(Protocol):
    """The methods of a device pool that a client calls; see `device.lane.DeviceLane`. No method
    raises or waits, except `tensor`, which raises NodeUnavailable."""

    def attached(self, to_node: Callable[[Request], None]) -> None: ...

    def lost(self) -> None: ...

    def on_event(self, message: dict[str, Any]) -> None: ...

    def tensor(self, ticket: int) -> "torch.Tensor": ...


class Loads:
    def __init__(self, session: ClientSession, pool: "PoolMembership") -> None:
        self._session = session
        self._pool = pool

    def load(self, order: LoadOrder, out: Tensor | None = None) -> Value:
        """See `LookupBuffer.load`."""
        header = order.header
        if order.lane:
            return self._pool.load(order, out)
        if header.kind == "none":
            return None
        tensor = codec.destination(out, header)
        with self._session.memory(order.boot) as memory:
            codec.copy_into(tensor, memory.arena.address + order.offset, order.nbytes)
        return tensor

    def load_copy(self, order: LoadOrder, out: Tensor | None = None) -> Value:
        """As `load`; also of a tensor that a lane received a copy in this process's memory."""
        loaded = self.load(order, out)
        if not order.lane or loaded is None or out is not None:
            return loaded
        return loaded.to("cpu", copy=True)

    def arena(self, boot: str) -> memoryview:
        """See `LookupBuffer.arena`."""
        with self._session.memory(boot) as memory:
            return memory.arena.view[:]

    def release(self, *orders: LoadOrder) -> None:
        """Release their pins. One-way; idempotent; never raises."""
        boot = self._session.boot
        tickets = [order.ticket for order in orders if order.boot == boot]
        for start in range(0, len(tickets), KEYS_MAX):  # others: that node is lost, with its pins
            try:
                self._session.post(Release(next_request_id(), tickets[start : start + KEYS_MAX]))
            except LookupBufferError:
                pass  # as above

    def done(self, orders: Sequence[LoadOrder], rank: int) -> None:
        """See `LookupBuffer.done`."""
        boot = self._session.boot
        tickets = [order.ticket for order in orders if order.boot == boot]
        for start in range(0, len(tickets), KEYS_MAX):
            part = tickets[start : start + KEYS_MAX]
            try:
                self._session.post(Done(next_request_id(), part, rank))
            except LookupBufferError:
                pass  # the node is lost, and the pins with it


class PoolMembership:
    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._pool: SessionPool | None = None

    def join(self, pool: SessionPool) -> None:
        self._pool = pool
        if self._session.is_connected:
            pool.attached(self._post)

    def load(self, order: LoadOrder, out: "torch.Tensor | None") -> "torch.Tensor":
        """The tensor that a lane received: the pool's own, which callers must not write to, or a
        copy in `out`."""
        if self._pool is None:
            raise NodeUnavailable(
                "the bytes arrived by a lane, and this process has no device pool; call join_lane "
                "in each process that loads them"
            )
        tensor = self._pool.tensor(order.ticket)
        if out is None:
            return tensor
        codec.check_out(out, order.header)
        return out.copy_(tensor)

    def on_connected(self) -> None:
        if self._pool is not None:
            self._pool.attached(self._post)

    def on_lost(self) -> None:
        if self._pool is not None:
            self._pool.lost()

    def on_event(self, message: dict[str, Any]) -> None:
        if self._pool is not None:
            self._pool.on_event(message)

    def _post(self, request: Request) -> None:
        try:
            self._session.post(request)
        except LookupBufferError:
            pass  # the node is lost; the pool sends its state again to the next one
