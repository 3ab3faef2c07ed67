"""Receiving: from another pool into this one, and what may go wrong on the way.

On the crew's threads. Whatever fails is a reason (see `lane.Fallback`): the bytes then come over
the hosts.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from lookup_buffer.codec import writable_bytes
from lookup_buffer.device.pairs import Pairs, Source
from lookup_buffer.device.place import Place
from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.device.stats import Notes
from lookup_buffer.errors import (
    BufferFull,
    CodecError,
    CorruptTensor,
    LookupBufferError,
    LookupTimeout,
    MissingTensor,
    PipeClosed,
    PipeTimeout,
    TensorTooLarge,
)
from lookup_buffer.item import Address
from lookup_buffer.lane import Fallback, MaybeFallback
from lookup_buffer.protocol.header import TensorHeader

if TYPE_CHECKING:
    import torch


class Receiving:
    def __init__(self, pool: DevicePool, place: Place, pairs: Pairs, notes: Notes) -> None:
        self._pool = pool
        self._place = place
        self._pairs = pairs
        self._notes = notes

    def bring(
        self,
        message: dict[str, Any],
        address: Address,
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> tuple[Entry | None, MaybeFallback, int]:
        """From the first that has it: the entry, or why there is none, and which source it was."""
        reason: MaybeFallback = Fallback.STALE
        header = TensorHeader.from_fields(message["header"])
        for number, fields in enumerate(message["sources"], start=1):
            source = Source(*fields)
            reason = self._pairs.why_not(source)
            if not reason:
                if not is_wanted():
                    return None, Fallback.TIMEOUT, 0
                entry, reason = self._from(source, header, address, deadline)
                if entry is not None:
                    return entry, "", number
            elif reason == Fallback.VERSION:
                what = f"{source.lane} of library {source.library}"
                self._notes.warn(reason, f"the pool at {source.host} speaks {what}, and not ours")
        return None, reason, 0

    def _from(
        self, source: Source, header: TensorHeader, address: Address, deadline: float
    ) -> tuple[Entry | None, MaybeFallback]:
        try:
            self._pool.reserve(header.nbytes)
        except (BufferFull, TensorTooLarge) as error:
            self._notes.warn(Fallback.NO_ROOM, error)
            return None, Fallback.NO_ROOM
        reason: MaybeFallback = ""
        try:
            with self._place.working():
                # Here, so that a GPU's memory comes from the pool's stream, and what the model
                # still has to do with what lay there before is waited for.
                tensor = self._place.empty(header)
                left = max(0.0, deadline - time.monotonic())
                self._pairs.receive(source, *address, tensor, left)
            self._check(tensor, source)
            return self._pool.put(address, (tensor, None), header.nbytes, source.checksum), ""
        except MissingTensor:
            reason = Fallback.STALE
        except PipeClosed:
            reason = Fallback.COLD
        except CorruptTensor as error:
            reason = Fallback.CHECKSUM
            self._notes.warn(reason, error)
        except (BufferFull, CodecError) as error:
            reason = Fallback.DEVICE
            self._notes.warn(reason, error)
        except (LookupTimeout, PipeTimeout) as error:
            reason = Fallback.TIMEOUT
            self._notes.warn(reason, error)
        except LookupBufferError as error:
            reason = Fallback.PEER_FAILED
            self._notes.warn(reason, error)
        except Exception as error:  # noqa: BLE001 -- a device that failed, as torch says it
            reason = Fallback.DEVICE
            self._pairs.fail(source.pool)
            self._notes.warn(reason, error)
        self._pool.cancel(header.nbytes)
        return None, reason

    def _check(self, tensor: "torch.Tensor", source: Source) -> None:
        """On the host; what is on a GPU is checked by nobody: it would have to leave it."""
        if tensor.device.type != "cpu":
            return
        if xxh3_64_intdigest(writable_bytes(tensor)) != source.checksum:
            raise CorruptTensor("a pool sent other bytes than its node published")
