"""DeviceBuffer: a `LookupBuffer` whose tensors also stay on this process's device.

An insert writes to the host buffer as usual and keeps a copy in the device pool. A select reads
from another process's pool where a lane connects the two. Otherwise the bytes travel over the hosts
and are copied onto the device.

All methods run on the caller's thread.
"""

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import PrefetchHandle, PrefetchState
from lookup_buffer.codec import check_out, header_of
from lookup_buffer.config import BufferConfig
from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.errors import MissingTensor
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.fields import clamped_seconds
from lookup_buffer.protocol.messages import InsertOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLE_SECONDS: Final = 30.0
"""Upper bound on a read beyond its timeout. A transfer in flight has its own deadline, by its
size."""


class DeviceBuffer:
    """Thread-safe. `close` also closes the lane.

    Raises:
        As `LookupBuffer`.
    """

    def __init__(
        self,
        lane: DeviceLane,
        config: BufferConfig | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        self.lane = lane
        self._namespace = namespace or Namespace.named("default")
        self.host = LookupBuffer(config, self._namespace)
        """The host's buffer, for all other operations."""
        self.host.join_lane(lane)

    def insert(
        self,
        key: TensorKey,
        tensor: "torch.Tensor | None",
        *,
        ttl_seconds: float | None = None,
        timeout: float = 10.0,
    ) -> InsertOutcome:
        """See `LookupBuffer.insert`. A new tensor without a request id is also kept on the
        device."""
        kept, stored = None, list[int]()
        if tensor is not None and key.request_id is None:
            of = self._namespace.fingerprint
            kept = self.lane.prepare(of, key.text, tensor, immutable=False)
        try:
            return self.host.insert(
                key, tensor, ttl_seconds=ttl_seconds, timeout=timeout, on_stored=stored.append
            )
        finally:
            self.lane.settle(kept, stored[0] if stored else None)

    def select(
        self, key: TensorKey, *, timeout: float = 0.0, out: "torch.Tensor | None" = None
    ) -> "torch.Tensor | None":
        """See `LookupBuffer.select`. The tensor is on the lane's device. A tensor that is inserted
        only during the wait comes over the hosts."""
        with self.view(key, timeout=timeout) as tensor:
            if tensor is None:
                return None
            if out is None:
                # As bytes: there are dtypes that torch cannot copy.
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
                return raw.view(tensor.dtype).view(tensor.shape)
            check_out(out, header_of(tensor))
            return out.copy_(tensor)

    @contextmanager
    def view(self, key: TensorKey, *, timeout: float = 0.0) -> "Iterator[torch.Tensor | None]":
        """The tensor on the device; the caller must not write to it.

        A tensor that came over a lane is the pool's own, and is pinned inside the `with`.

        Raises:
            As `LookupBuffer.select`.
        """
        timeout = clamped_seconds(timeout)
        deadline = time.monotonic() + timeout
        (handle,) = self.host.prefetch([key])
        try:
            if handle.wait(timeout + SETTLE_SECONDS) is not PrefetchState.RESIDENT:
                yield self._wait_and_select(key, handle, max(0.0, deadline - time.monotonic()))
                return
            assert handle.order is not None, "it is resident"
            tensor = self.host.load(handle.order)
            yield tensor if tensor is None or handle.order.lane else self.lane.onto_device(tensor)
        finally:
            self.host.release(handle)

    def _wait_and_select(
        self, key: TensorKey, handle: PrefetchHandle, timeout: float
    ) -> "torch.Tensor | None":
        if timeout <= 0:
            raise MissingTensor(f"{key}: {handle.reason or 'it did not come in time'}")
        tensor = self.host.select(key, timeout=timeout)
        return tensor if tensor is None else self.lane.onto_device(tensor)

    def close(self) -> None:
        """Idempotent and bounded."""
        self.host.close()
        self.lane.close()

    def __enter__(self) -> "DeviceBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
