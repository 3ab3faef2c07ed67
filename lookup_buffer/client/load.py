"""A client's loads: the bytes and the pin of an order, and the link to the process's device pool.

`Loading` copies the bytes of an order and releases its pin; any thread may call it. `Pooling`
forwards requests and events between the client's session and the device pool of its process, if it
has one. Events arrive on the client's listening thread. The program creates and closes the pool
(see `device.lane`), because that needs torch and a device: this module must not.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lookup_buffer import codec
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.protocol.messages import KEYS_MAX, Done, Release, Request

if TYPE_CHECKING:
    import torch


class JoinedPool(Protocol):
    """What a client needs of a device pool; see `device.lane.DeviceLane`. No method raises or
    waits, except `tensor`, which raises NodeUnavailable."""

    def attached(self, to_node: Callable[[Request], None]) -> None: ...

    def lost(self) -> None: ...

    def on_event(self, message: dict[str, Any]) -> None: ...

    def tensor(self, ticket: int) -> "torch.Tensor": ...


class Pooling:
    def __init__(self, attachment: ClientSession) -> None:
        self._attachment = attachment
        self._pool: JoinedPool | None = None

    def join(self, pool: JoinedPool) -> None:
        self._pool = pool
        if self._attachment.attached:
            pool.attached(self._post)

    def load(self, order: LoadOrder, out: "torch.Tensor | None") -> "torch.Tensor":
        """The tensor that a lane received: the pool's own, which callers must not write to, or a
        copy in `out`."""
        if self._pool is None:
            raise NodeUnavailable("this process has no pool, and the bytes came to one by a lane")
        tensor = self._pool.tensor(order.ticket)
        if out is None:
            return tensor
        codec.check_out(out, order.header)
        return out.copy_(tensor)

    def on_attached(self) -> None:
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
            self._attachment.post(request)
        except LookupBufferError:
            pass  # the node is gone; the pool sends its state again to the next one


class Loading:
    def __init__(self, attachment: ClientSession, pooling: Pooling) -> None:
        self._attachment = attachment
        self._pooling = pooling

    def load(self, order: LoadOrder, out: Tensor | None = None) -> Value:
        """See `LookupBuffer.load`."""
        header = order.header
        if order.lane:
            return self._pooling.load(order, out)
        if header.kind == "none":
            return None
        tensor = codec.destination(out, header)
        with self._attachment.memory(order.boot) as memory:
            codec.copy_into(tensor, memory.arena.address + order.offset, order.nbytes)
        return tensor

    def arena(self, boot: str) -> memoryview:
        """See `LookupBuffer.arena`."""
        with self._attachment.memory(boot) as memory:
            return memory.arena.view[:]

    def release(self, order: LoadOrder) -> None:
        """Release its pin. One-way; idempotent; never raises."""
        if order.boot != self._attachment.boot:
            return  # that node is gone, and its pins with it
        try:
            self._attachment.post(Release(next_request_id(), [order.ticket]))
        except LookupBufferError:
            pass  # as above

    def done(self, orders: Sequence[LoadOrder], rank: int) -> None:
        """See `LookupBuffer.done`."""
        boot = self._attachment.boot
        tickets = [order.ticket for order in orders if order.boot == boot]
        for start in range(0, len(tickets), KEYS_MAX):
            part = tickets[start : start + KEYS_MAX]
            try:
                self._attachment.post(Done(next_request_id(), part, rank))
            except LookupBufferError:
                pass  # the node is gone, and the pins with it
