"""A client's inserts: bytes into the staging area, and the node is asked to take them.

Any thread; each insert has a channel of its own meanwhile.
"""

import time
from collections.abc import Callable

from lookup_buffer import codec
from lookup_buffer.channel import Channel, next_request_id
from lookup_buffer.client.session import Attachment
from lookup_buffer.codec import Tensor, Value
from lookup_buffer.errors import TensorTooLarge
from lookup_buffer.inserted import InsertOutcome
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Insert, lasting, waiting
from lookup_buffer.shm.memory import copy_bytes
from lookup_buffer.times import CALL_SECONDS


class Inserting:
    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def insert(
        self,
        key: TensorKey,
        tensor: Value,
        ttl_seconds: float | None,
        timeout: float,
        on_stored: Callable[[int], None] | None = None,
    ) -> InsertOutcome:
        """See `LookupBuffer.insert`."""
        if ttl_seconds is not None:
            ttl_seconds = lasting("ttl_seconds", ttl_seconds)
        header = codec.header_of(tensor)
        self._check_fits(header)
        deadline = time.monotonic() + timeout
        with self._attachment.channel(timeout) as channel:
            if tensor is not None and header.nbytes:
                _fill(channel, tensor, header, deadline - time.monotonic())
            left = deadline - time.monotonic()
            request = Insert(
                next_request_id(),
                self._attachment.namespace,
                key.text,
                header.to_fields(),
                ttl_seconds,
                0.0 if key.is_shared else waiting(left),
            )
            reply = channel.call(request, left if key.is_shared else waiting(left) + CALL_SECONDS)
        outcome = InsertOutcome(reply["outcome"])
        if on_stored is not None and outcome is InsertOutcome.STORED:
            on_stored(reply["checksum"])
        return outcome

    def _check_fits(self, header: TensorHeader) -> None:
        with self._attachment.memory() as memory:
            capacity_bytes = memory.arena.nbytes
        if header.nbytes > capacity_bytes:
            raise TensorTooLarge(
                f"a tensor of {header.nbytes} bytes exceeds the arena of "
                f"{capacity_bytes} bytes; raise capacity_bytes"
            )


def _fill(channel: Channel, tensor: Tensor, header: TensorHeader, timeout: float) -> None:
    staging = channel.stage(header.nbytes, timeout)
    source, address, nbytes = codec.contiguous_bytes(tensor)
    copy_bytes(staging.address, address, nbytes)
    del source  # kept the memory at `address` alive until here
