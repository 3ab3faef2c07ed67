"""Pooling: between a client's session and the pool that its process has on a device.

The pool itself is made and closed by the program (see `device.lane`), for it needs torch and a
device; a client without one has nothing to do here. Events come on the listening thread.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from lookup_buffer import codec
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.session import Attachment
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.request import Request

if TYPE_CHECKING:
    import torch


class JoinedPool(Protocol):
    """What a client wants of a pool; see `device.lane.DeviceLane`. None of these raises or waits,
    but `tensor`, which raises NodeUnavailable."""

    def attached(self, to_node: Callable[[Request], None]) -> None: ...

    def lost(self) -> None: ...

    def on_event(self, message: dict[str, Any]) -> None: ...

    def tensor(self, ticket: int) -> "torch.Tensor": ...


class Pooling:
    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._pool: JoinedPool | None = None

    def join(self, pool: JoinedPool) -> None:
        self._pool = pool
        if self._attachment.attached:
            pool.attached(self._post)

    def load(self, order: LoadOrder, out: "torch.Tensor | None") -> "torch.Tensor":
        """What came by a lane: the pool's own tensor, not to be written to; or a copy, in `out`."""
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
            pass  # the node is gone, and will be told anew what it has to know
