"""Reads of what this host holds, through the local index: no round trip, no pin.

A read copies the bytes and then checks the index entry again. If the item was removed during the
copy, the copy is invalid and the caller asks the node instead. The module counts its reads and
reports them to the node from time to time: the node then counts hits and does not evict items in
use. Any thread. It must not know how the node locates or fetches.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lookup_buffer import codec
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import COUNT_MAX, Contains, Touch, split, waiting
from lookup_buffer.shm.index import digest_of
from lookup_buffer.times import NODE_SHARE

if TYPE_CHECKING:
    import torch

TOLD_BYTES_MAX: Final = 32 << 10
"""Bound on the keys of one report: it fits into a socket buffer that has any room."""


class NotListed(Exception):
    """The local index does not list the key, or no longer does."""


class LocalReads:
    def __init__(self, attachment: ClientSession) -> None:
        self._attachment = attachment
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._read: Counter[str] = Counter()

    def select(self, key: TensorKey, out: "torch.Tensor | None") -> "torch.Tensor | None":
        """A copy of the tensor under `key`, in `out` if given.

        Raises:
            NotHere: ask the node. `out` may have been written to.
            CodecError: `out` does not fit.
            NodeUnavailable: no node is connected now.
        """
        with self._attachment.memory() as memory:
            entry = memory.local_index.find(digest_of(self._attachment.namespace, key.text))
            if entry is None:
                raise NotListed
            header = entry.header
            if header.kind == "none":
                tensor = None
            else:
                tensor = codec.destination(out, header)
                codec.copy_into(tensor, memory.arena.address + entry.offset, header.nbytes)
            if not memory.local_index.stands(entry):
                raise NotListed
        with self._lock:
            self._read[key.text] += 1
        return tensor

    def holds(self, keys: Sequence[TensorKey], *, elsewhere: bool) -> list[bool]:
        """For each key, whether the local index lists it or, with `elsewhere`, the remote index;
        False if the node must be asked."""
        digests = [digest_of(self._attachment.namespace, key.text) for key in keys]
        try:
            with self._attachment.memory() as memory:
                here, there = memory.local_index.lists, memory.remote_index.lists
                if elsewhere and memory.remote_index.is_current():
                    return [there(digest) or here(digest) for digest in digests]
                return [here(digest) for digest in digests]
        except NodeUnavailable:
            return [False] * len(keys)

    def present(self, keys: Sequence[TensorKey], timeout: float) -> list[bool]:
        """See `LookupBuffer.has_caches`: by the indexes, and for the rest by a request."""
        deadline = time.monotonic() + waiting(timeout)
        present = self.holds(keys, elsewhere=timeout > 0)
        unknown = [index for index, known in enumerate(present) if not known and timeout > 0]
        left, of = iter(unknown), self._attachment.namespace
        for part in split([keys[index].text for index in unknown]):
            budget = waiting(deadline - time.monotonic())
            request = Contains(next_request_id(), of, list(part), NODE_SHARE * budget)
            try:
                found = self._attachment.call(request, budget)["present"]
            except NodeUnavailable:
                break
            for there in found:
                present[next(left)] = there
        return present

    def tell(self) -> None:
        """Report to the node the reads since the last report. Never raises, never waits.

        Reads for which the socket has no room are reported the next time.
        """
        with self._telling:  # `close` waits for a report in progress on another thread
            if not self._read:
                return
            with self._lock:
                read, self._read = self._read, Counter()
            try:
                for keys in split(list(read), TOLD_BYTES_MAX):
                    reads = {key: min(read[key], COUNT_MAX) for key in keys}
                    touch = Touch(next_request_id(), self._attachment.namespace, reads)
                    if not self._attachment.mention(touch):
                        break
                    for key in keys:
                        del read[key]
            except LookupBufferError:
                return  # the node is gone, and with it its counts
            with self._lock:
                self._read.update(read)
