"""The handles of a client's prefetches: registered, settled by events, released.

Any thread may prefetch and release; events come on the attachment's listening thread.
"""

import threading
from collections.abc import Sequence
from typing import Any

from lookup_buffer.channel import next_request_id
from lookup_buffer.client.handles import LoadOrder, Prefetched, PrefetchState
from lookup_buffer.client.load import Loading
from lookup_buffer.client.session import Attachment
from lookup_buffer.errors import LookupBufferError, MissReason
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import Prefetch, split


class Prefetching:
    def __init__(self, attachment: Attachment, loading: Loading) -> None:
        self._attachment = attachment
        self._loading = loading
        self._settled = threading.Condition()
        self._waiting: dict[tuple[int, int], Prefetched] = {}
        """(request id, index) → handle that has not settled."""

    def prefetch(
        self, keys: Sequence[TensorKey], timeout: float, claimer: int = 0, wait_seconds: float = 0.0
    ) -> list[Prefetched]:
        """See `LookupBuffer.prefetch`; `claimer` as in `Prefetch`, for what one message takes, and
        then it is the claims that wait for `wait_seconds`."""
        handles = [Prefetched(key, self._settled) for key in keys]
        left = iter(handles)
        for part in split([key.text for key in keys]):
            request = Prefetch(
                next_request_id(), self._attachment.namespace, list(part), claimer, wait_seconds
            )
            entries = [(request.id, index) for index in range(len(part))]
            with self._settled:
                self._waiting.update(zip(entries, left, strict=False))
            try:
                self._attachment.post(request)
            except LookupBufferError:
                self._fail(entries)
        if timeout > 0:
            with self._settled:
                self._settled.wait_for(lambda: _all_settled(handles), timeout)
        return handles

    def release(self, handle: Prefetched) -> None:
        with self._settled:
            if handle.released:
                return
            handle.released = True
            order = handle.order
        if order is not None:
            self._loading.release(order)

    def on_event(self, message: dict[str, Any]) -> None:
        """A `settled` event of the node."""
        unwanted = []
        with self._settled:
            for index, entry in message["entries"]:
                handle = self._waiting.pop((message["id"], index), None)
                order = LoadOrder.of(entry) if entry["state"] == "resident" else None
                if handle is None or handle.released:
                    unwanted.append(order)
                else:
                    _settle(handle, entry, order)
            self._settled.notify_all()
        for order in unwanted:
            if order is not None:
                self._loading.release(order)

    def on_lost(self) -> None:
        """The node is gone: nothing that was asked of it will be answered."""
        with self._settled:
            waiting = list(self._waiting)
        self._fail(waiting)

    def _fail(self, entries: Sequence[tuple[int, int]]) -> None:
        with self._settled:
            for entry in entries:
                handle = self._waiting.pop(entry, None)
                if handle is not None:
                    handle.reason = MissReason.NODE_DOWN
                    handle.state = PrefetchState.FAILED
            self._settled.notify_all()


def _all_settled(handles: Sequence[Prefetched]) -> bool:
    return all(handle.state is not PrefetchState.PENDING for handle in handles)


def _settle(handle: Prefetched, entry: dict[str, Any], order: LoadOrder | None) -> None:
    handle.order = order
    handle.reason = MissReason.of(entry["reason"]) if "reason" in entry else ""
    handle.source = entry.get("source", "")
    handle.state = PrefetchState(entry["state"])  # last: readers look at it first
