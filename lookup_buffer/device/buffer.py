"""DeviceBuffer: a `LookupBuffer` whose tensors stay on this process's device as well.

What is inserted goes to the host, as ever, and is kept in the pool; what is read comes from another
process's pool where a lane joins the two, and else over the hosts and onto the device.
"""

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from lookup_buffer.client.buffer import InsertOutcome, LookupBuffer
from lookup_buffer.client.handles import Prefetched, PrefetchState
from lookup_buffer.codec import check_out, header_of
from lookup_buffer.config import BufferConfig
from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.errors import MissingTensor
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTLE_SECONDS: Final = 30.0
"""Bound on a read beyond its timeout: what is on its way has deadlines of its own, by its size."""


class DeviceBuffer:
    """Thread-safe. The lane is closed with it.

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
        """The buffer over the hosts, for all else."""
        self.host.join_lane(lane)

    def insert(
        self,
        key: TensorKey,
        tensor: "torch.Tensor | None",
        *,
        ttl_seconds: float | None = None,
        timeout: float = 10.0,
    ) -> InsertOutcome:
        """See `LookupBuffer.insert`. What is shared and new is kept on the device, too."""
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
        """See `LookupBuffer.select`; the tensor is on the lane's device. What appears only while it
        waits comes over the hosts."""
        with self.view(key, timeout=timeout) as there:
            if there is None:
                return None
            if out is None:
                # As bytes: there are dtypes that torch cannot copy.
                raw = there.contiguous().reshape(-1).view(torch.uint8).clone()
                return raw.view(there.dtype).view(there.shape)
            check_out(out, header_of(there))
            return out.copy_(there)

    @contextmanager
    def view(self, key: TensorKey, *, timeout: float = 0.0) -> "Iterator[torch.Tensor | None]":
        """The tensor on the device, not to be written to; the pool's own, held inside the `with`,
        where it came by a lane.

        Raises:
            As `LookupBuffer.select`.
        """
        deadline = time.monotonic() + timeout
        (handle,) = self.host.prefetch([key])
        try:
            if handle.wait(timeout + SETTLE_SECONDS) is not PrefetchState.RESIDENT:
                yield self._appearing(key, handle, max(0.0, deadline - time.monotonic()))
                return
            assert handle.order is not None, "it is resident"
            there = self.host.load(handle.order)
            yield there if there is None or handle.order.lane else self.lane.onto_device(there)
        finally:
            self.host.release(handle)

    def _appearing(
        self, key: TensorKey, handle: Prefetched, timeout: float
    ) -> "torch.Tensor | None":
        if timeout <= 0:
            raise MissingTensor(f"{key}: {handle.reason or 'it did not come in time'}")
        there = self.host.select(key, timeout=timeout)
        return there if there is None else self.lane.onto_device(there)

    def close(self) -> None:
        """Idempotent and bounded."""
        self.host.close()
        self.lane.close()

    def __enter__(self) -> "DeviceBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
