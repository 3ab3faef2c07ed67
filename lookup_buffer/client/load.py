"""A client's loads: what an order stands for, its bytes and its pin. Any thread."""

from collections.abc import Sequence

from lookup_buffer import codec
from lookup_buffer.channel import next_request_id
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.session import Attachment
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import LookupBufferError
from lookup_buffer.fields import KEYS_MAX
from lookup_buffer.pooling import Pooling
from lookup_buffer.protocol.messages import Done, Release


class Loading:
    def __init__(self, attachment: Attachment, pooling: Pooling) -> None:
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
        """Let go of its pin. One-way; idempotent; never raises."""
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
