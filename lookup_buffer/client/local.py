"""Reads of what this host holds, through the local index: no round trip, no pin.

A read copies the bytes and then checks the index entry again. If the item was removed during the
copy, the copy is invalid and the caller sends a request to the node instead. The module counts its
reads and reports them to the node from time to time: the node counts them as hits, and as uses in
the order of eviction. Any thread.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lookup_buffer import codec
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.errors import LookupBufferError, NodeUnavailable
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.fields import COUNT_MAX, split
from lookup_buffer.protocol.messages import Touch
from lookup_buffer.shm.index import digest_of

if TYPE_CHECKING:
    import torch

REPORT_BYTES_MAX: Final = 32 << 10
"""Bound on the keys of one report: a writable socket can take it without a wait."""


class LocalReads:
    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._reads: Counter[str] = Counter()

    def select(self, key: TensorKey, out: "torch.Tensor | None") -> "torch.Tensor | None":
        """A copy of the tensor under `key`, in `out` if given.

        Raises:
            NotListed: a request to the node is needed. `out` may have been written to.
            CodecError: `out` does not fit.
            NodeUnavailable: no node is connected now.
        """
        with self._session.memory() as memory:
            entry = memory.local_index.find(digest_of(self._session.namespace, key.text))
            if entry is None:
                raise NotListed
            header = entry.header
            if header.kind == "none":
                tensor = None
            else:
                tensor = codec.destination(out, header)
                codec.copy_into(tensor, memory.arena.address + entry.offset, header.nbytes)
            if not memory.local_index.is_unchanged(entry):
                raise NotListed
        with self._lock:
            self._reads[key.text] += 1
        return tensor

    def listed(self, keys: Sequence[TensorKey], *, remote: bool) -> list[bool]:
        """For each key, whether the local index lists it or, with `remote`, the remote index; False
        if a request to the node is needed."""
        digests = [digest_of(self._session.namespace, key.text) for key in keys]
        try:
            with self._session.memory() as memory:
                in_local, in_remote = memory.local_index.contains, memory.remote_index.contains
                if remote and memory.remote_index.is_current():
                    return [in_remote(digest) or in_local(digest) for digest in digests]
                return [in_local(digest) for digest in digests]
        except NodeUnavailable:
            return [False] * len(keys)

    def report(self) -> None:
        """Report to the node the reads since the last report. Never raises, never waits.

        While the socket is full, reads are kept for the next report.
        """
        with self._reporting:  # `close` waits for a report in progress on another thread
            if not self._reads:
                return
            with self._lock:
                unsent, self._reads = self._reads, Counter()
            try:
                for keys in split(list(unsent), REPORT_BYTES_MAX):
                    reads = {key: min(unsent[key], COUNT_MAX) for key in keys}
                    touch = Touch(next_request_id(), self._session.namespace, reads)
                    if not self._session.post_if_writable(touch):
                        break
                    for key in keys:
                        del unsent[key]
            except LookupBufferError:
                return  # the node is lost, and its counts with it
            with self._lock:
                self._reads.update(unsent)


class NotListed(Exception):
    """The local index does not list the key, or no longer does."""
