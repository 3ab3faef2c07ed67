"""A client's selects of what the board does not list: the node locates, fetches and pins it.

Any thread. What the board lists is read without the node: see `local_reads`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lookup_buffer import codec
from lookup_buffer.channel import next_request_id
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.load import Loading
from lookup_buffer.client.session import Attachment
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import LookupTimeout, MissingTensor
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import Select, waiting
from lookup_buffer.times import CALL_SECONDS


class Selecting:
    def __init__(self, attachment: Attachment, loading: Loading) -> None:
        self._attachment = attachment
        self._loading = loading

    def select(self, key: TensorKey, timeout: float, out: Tensor | None) -> Value:
        """See `LookupBuffer.select`."""
        with self._pinned(key, timeout) as order:
            return self._loading.load(order, out)

    @contextmanager
    def view(self, key: TensorKey, timeout: float) -> Iterator[Value]:
        """See `LookupBuffer.view`."""
        with self._pinned(key, timeout) as order:
            if order.header.kind == "none":
                yield None
            else:
                end = order.offset + order.nbytes
                window = self._loading.arena(order.boot)[order.offset : end]
                yield codec.tensor_over(window, order.header)

    @contextmanager
    def _pinned(self, key: TensorKey, timeout: float) -> Iterator[LoadOrder]:
        """Where the bytes of `key` lie on this host, pinned meanwhile."""
        wait = waiting(timeout)
        request = Select(next_request_id(), self._attachment.namespace, key.text, wait)
        reply = self._attachment.call(request, wait + CALL_SECONDS)
        if reply["state"] != "resident":
            if timeout:
                raise LookupTimeout(f"{key} did not appear within {timeout} s ({reply['reason']})")
            raise MissingTensor(f"{key}: {reply['reason']}")
        order = LoadOrder.of(reply)
        try:
            yield order
        finally:
            self._loading.release(order)
