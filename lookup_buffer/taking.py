"""A client's takes: a hand-off is had, copied, acknowledged, and only then returned.

Any thread. What fails before the acknowledgement gives the hand-off back.
"""

import time

from lookup_buffer.channel import Channel, next_request_id
from lookup_buffer.client.handles import LoadOrder
from lookup_buffer.client.load import Loading
from lookup_buffer.client.session import Attachment
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import (
    BufferFull,
    InvalidKey,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    MissReason,
    NodeUnavailable,
)
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Take, waiting
from lookup_buffer.times import CALL_SECONDS, LEASE_ANSWER_SECONDS


class Taking:
    def __init__(self, attachment: Attachment, loading: Loading) -> None:
        self._attachment = attachment
        self._loading = loading

    def drop_select(self, key: TensorKey, timeout: float, out: Tensor | None) -> Value:
        """See `LookupBuffer.drop_select`."""
        if key.is_shared:
            raise InvalidKey(
                f"{key} is shared: content for many readers, which nobody takes away. Use select, "
                "or give the key a request_id, which makes it a hand-off"
            )
        deadline = time.monotonic() + timeout
        while True:
            # The same connection for all of it: who has taken must not stand in line for another
            # behind those who wait, while his lease runs.
            bound = waiting(deadline - time.monotonic()) + CALL_SECONDS
            with self._attachment.channel(bound) as channel:
                wait = waiting(deadline - time.monotonic())
                request = Take(next_request_id(), self._attachment.namespace, key.text, wait)
                reply = channel.call(request, wait + CALL_SECONDS)
                if reply["state"] != "resident":
                    raise _miss(key, timeout, reply["reason"])
                order, token = LoadOrder.of(reply), reply["token"]
                try:
                    tensor = self._loaded(order, token, out)
                    if self._won(channel, token, reply["lease_seconds"]):
                        return tensor
                finally:
                    self._loading.release(order)
            # The lease was over before the node heard of it: it is another's, or to be had again.

    def _loaded(self, order: LoadOrder, token: int, out: Tensor | None) -> Value:
        try:
            return self._loading.load(order, out)
        except BaseException:
            try:
                self._attachment.post(GiveBack(next_request_id(), token))
            except LookupBufferError:
                pass  # the session is over, and the lease with it
            raise

    def _won(self, channel: Channel, token: int, lease_seconds: float) -> bool:
        request = Acknowledge(next_request_id(), token)
        try:
            bound = lease_seconds + LEASE_ANSWER_SECONDS + CALL_SECONDS
            return bool(channel.call(request, bound)["won"])
        except NodeUnavailable:
            # That connection broke, perhaps not the session: the answer is the same as it was.
            return bool(self._attachment.call(request, CALL_SECONDS)["won"])


def _miss(key: TensorKey, timeout: float, reason: str) -> LookupBufferError:
    if reason == MissReason.NO_ROOM:
        return BufferFull(f"{key}: no room on this host for what lies on another")
    if timeout and reason != MissReason.OWNER_DEAD:
        return LookupTimeout(f"{key} was not to be had within {timeout} s ({reason})")
    return MissingTensor(f"{key}: {reason}")
