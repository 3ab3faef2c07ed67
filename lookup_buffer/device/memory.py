"""LaneMemory: the memory of a lane's pipe. What a pool holds never changes, so nobody copies it.

A pipe copies what it sends, for its sender may change it then. An entry of a pool is the same as
long as anybody has it, and the view that goes out keeps it: 32 MiB took 95 ms with a copy into
memory that was new each time, and 20 without.
"""

from lookup_buffer.codec import Tensor, Value
from lookup_buffer.pipes.inbox import Offer
from lookup_buffer.pipes.outbox import INLINE_BYTES, Bytes
from lookup_buffer.pipes.stream import Memory


class LaneMemory:
    """See `Memory`; all but what is sent is `inner`'s."""

    def __init__(self, inner: Memory) -> None:
        self._inner = inner

    def outward(self, value: Value) -> Bytes:
        bytes_of = self._inner.outward(value)
        few = value is None or value.nbytes <= INLINE_BYTES
        return bytes_of if few else _Unchanging(bytes_of)

    def check(self, out: Tensor, offer: Offer) -> None:
        self._inner.check(out, offer)

    def place(self, offer: Offer, out: Tensor | None) -> Tensor:
        return self._inner.place(offer, out)

    def writable(self, value: Tensor) -> memoryview:
        return self._inner.writable(value)

    def done(self, value: Tensor, out: Tensor | None) -> Value:
        return self._inner.done(value, out)

    def rest(self) -> None:
        self._inner.rest()

    def end(self) -> None:
        self._inner.end()


class _Unchanging:
    """The bytes of something large that stays as it is."""

    def __init__(self, bytes_of: Bytes) -> None:
        self._bytes_of = bytes_of

    def lent(self) -> memoryview:
        return self._bytes_of.lent()

    def copied(self) -> memoryview:
        return self._bytes_of.lent()
