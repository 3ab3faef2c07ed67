"""A client's prefetches and sets of claims: requests whose answers arrive later, as events.

`PendingPrefetches` and `PendingClaims` send the requests, keep the handles that have not settled,
and settle them by events of the node. Any thread may call; events arrive on the session's listening
thread. When the session is lost, all pending sets fail, and all handles that are not released.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from lookup_buffer.client.handles import ClaimHandle, LoadOrder, PrefetchHandle, PrefetchState
from lookup_buffer.client.load import Loads
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.errors import LookupBufferError, MissReason
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.fields import checked_seconds, clamped_seconds, split
from lookup_buffer.protocol.messages import (
    ClaimAll,
    ClaimOutcome,
    Encoding,
    EndPrefetch,
    Prefetch,
    Request,
    Unclaim,
)
from lookup_buffer.times import CALL_SECONDS

BATCH_MAX = 64
"""Keys of one request of `in_turn`: their tensors are pinned together."""
SPENT_SECONDS = 1e-3
"""For a request whose caller's time is over: 0 would mean that it had none."""
AHEAD = 2
"""Requests of `in_turn` at a time: one is brought while another is read."""

Entry = tuple[int, int]
"""A request's id, and the index of a key in it."""


class _Unsettled:
    """The handles that have neither settled nor been released, by their entries."""

    def __init__(self) -> None:
        self._handles: dict[Entry, PrefetchHandle] = {}
        self._entries: dict[PrefetchHandle, Entry] = {}

    def update(self, handles: Iterable[tuple[Entry, PrefetchHandle]]) -> None:
        for entry, handle in handles:
            self._handles[entry], self._entries[handle] = handle, entry

    def pop(self, entry: Entry) -> PrefetchHandle | None:
        handle = self._handles.pop(entry, None)
        if handle is not None:
            del self._entries[handle]
        return handle

    def release(self, handle: PrefetchHandle) -> Entry | None:
        """Its entry, if it was one of them."""
        entry = self._entries.pop(handle, None)
        if entry is not None:
            del self._handles[entry]
        return entry

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._handles)


class PendingPrefetches:
    def __init__(self, session: ClientSession, loads: Loads) -> None:
        self._session = session
        self._loads = loads
        self._settled = threading.Condition()
        self._pending = _Unsettled()
        self._held: set[PrefetchHandle] = set()
        """Those that are resident and not released."""

    def start(
        self, keys: Sequence[TensorKey], timeout: float, claimer: int = 0, wait_seconds: float = 0.0
    ) -> list[PrefetchHandle]:
        """See `LookupBuffer.prefetch`. `claimer` is as in the request `Prefetch`, and needs keys
        that fit one message. If it is not 0, `wait_seconds` bounds the wait of the claims, not of
        the prefetch."""
        handles = [PrefetchHandle(key, self._settled) for key in keys]
        left = iter(handles)
        for part in split([key.text for key in keys]):
            request = Prefetch(
                next_request_id(), self._session.namespace, list(part), claimer, wait_seconds
            )
            entries = [(request.id, index) for index in range(len(part))]
            with self._settled:
                self._pending.update(zip(entries, left, strict=False))
            try:
                self._session.post(request)
            except LookupBufferError:
                self._fail(entries)
        if timeout > 0:
            with self._settled:
                self._settled.wait_for(lambda: _all_settled(handles), timeout)
        return handles

    def in_turn(
        self, keys: Sequence[TensorKey], wait_seconds: float
    ) -> Generator[PrefetchHandle, None, None]:
        """Prefetch `keys` in batches, of which at most AHEAD are not read yet; yields each handle
        once it has settled. Its pin may end when the next one is requested.

        With `wait_seconds` shared keys that no node holds are waited for, and until then tensors of
        other nodes wait for their turn to be transferred.

        Raises:
            NodeUnavailable: the node does not answer.
        """
        until = time.monotonic() + wait_seconds
        batches = [keys[start : start + BATCH_MAX] for start in range(0, len(keys), BATCH_MAX)]
        started: deque[PrefetchHandle] = deque()
        read: list[PrefetchHandle] = []
        try:
            for batch in batches:
                left = max(SPENT_SECONDS, until - time.monotonic()) if wait_seconds else 0.0
                started += self.start(batch, 0.0, wait_seconds=left)
                most = 0 if batch is batches[-1] else (AHEAD - 1) * BATCH_MAX
                while len(started) > most:
                    is_pending = started[0].state is PrefetchState.PENDING
                    if is_pending or len(read) == BATCH_MAX:
                        self._release_all(read)  # before a wait: it may be for room
                    self._wait(started[0])
                    read.append(started.popleft())
                    yield read[-1]
        finally:
            self._release_all([*read, *started])

    def _wait(self, handle: PrefetchHandle) -> None:
        """Until it settles. The node bounds its transfers, so only its own end is looked for.

        Raises:
            NodeUnavailable: the node does not answer.
        """
        while handle.wait(CALL_SECONDS) is PrefetchState.PENDING:
            self._session.probe(CALL_SECONDS)

    def _release_all(self, handles: list[PrefetchHandle]) -> None:
        """Release these and forget them."""
        self._loads.release(*self.end(handles))
        handles.clear()

    def end(self, handles: Sequence[PrefetchHandle]) -> list[LoadOrder]:
        """Mark these as released, and end their waits; returns the orders whose pins are to be
        released."""
        ended: defaultdict[int, list[int]] = defaultdict(list)
        with self._settled:
            orders = [one.order for one in handles if one.order is not None and not one.released]
            for handle in handles:
                handle.released = True
                if (entry := self._pending.release(handle)) is not None:
                    ended[entry[0]].append(entry[1])
            self._held.difference_update(handles)
        for prefetch, indexes in ended.items():
            with suppress(LookupBufferError):  # the session has ended, and with it the prefetch
                self._session.post(EndPrefetch(next_request_id(), prefetch, indexes))
        return orders

    def on_event(self, message: dict[str, Any]) -> None:
        """A `settled` event of the node."""
        unwanted = []
        with self._settled:
            for index, entry in message["entries"]:
                handle = self._pending.pop((message["id"], index))
                order = LoadOrder.of(entry) if entry["state"] == "resident" else None
                if handle is None:  # it was released before
                    unwanted.append(order)
                else:
                    _settle(handle, entry, order)
                    if order is not None:
                        self._held.add(handle)
            self._settled.notify_all()
        for order in unwanted:
            if order is not None:
                self._loads.release(order)

    def on_lost(self) -> None:
        """The session has ended, and soon its pins: fail all handles. What a resident one has
        ordered can be loaded for a while."""
        with self._settled:
            pending = list(self._pending)
            for handle in self._held:
                _lose(handle)
            self._held.clear()
        self._fail(pending)

    def _fail(self, entries: Sequence[tuple[int, int]]) -> None:
        with self._settled:
            for entry in entries:
                handle = self._pending.pop(entry)
                if handle is not None:
                    _lose(handle)
            self._settled.notify_all()


def _lose(handle: PrefetchHandle) -> None:
    handle.reason = MissReason.NODE_DOWN
    handle.state = PrefetchState.FAILED


def _all_settled(handles: Sequence[PrefetchHandle]) -> bool:
    return all(handle.state is not PrefetchState.PENDING for handle in handles)


def _settle(handle: PrefetchHandle, entry: dict[str, Any], order: LoadOrder | None) -> None:
    handle.order = order
    handle.reason = MissReason.of(entry["reason"]) if "reason" in entry else ""
    handle.source = entry.get("source", "")
    handle.state = PrefetchState(entry["state"])  # last: readers read it first


class PendingClaims:
    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._settled = threading.Condition()
        self._pending: dict[int, ClaimHandle] = {}

    def claim_all(
        self, keys: Sequence[TensorKey], wait_seconds: float, timeout: float, keeps: bool
    ) -> ClaimHandle:
        """See `LookupBuffer.claim_all`."""
        wait, timeout = clamped_seconds(wait_seconds), clamped_seconds(timeout)
        handle = self.register(keys, keeps)
        texts = sorted(key.text for key in keys)
        if handle.state is not ClaimOutcome.PENDING:
            return handle
        if self._post(ClaimAll(handle.request_id, self._session.namespace, texts, wait)):
            handle.wait_for_answer(timeout)
        else:
            self.fail([handle.request_id])
        return handle

    def register(self, keys: Sequence[TensorKey], keeps: bool) -> ClaimHandle:
        """A new handle, which the events of its request id settle. GRANTED if there are no keys.
        FAILED if they do not fit one message: they could then not be claimed all or none."""
        if not keys:
            return ClaimHandle(keys, self._settled, ClaimOutcome.GRANTED)
        if len(list(split([key.text for key in keys]))) > 1:
            return ClaimHandle(keys, self._settled, ClaimOutcome.FAILED)
        handle = ClaimHandle(keys, self._settled, request_id=next_request_id(), keeps=keeps)
        with self._settled:
            self._pending[handle.request_id] = handle
        return handle

    def encoding(self, keys: Sequence[TensorKey], lease_seconds: float) -> None:
        """See `LookupBuffer.encoding`."""
        lease = checked_seconds("lease_seconds", lease_seconds)
        for part in split([key.text for key in keys]):
            self._post(Encoding(next_request_id(), self._session.namespace, list(part), lease))

    def unclaim(self, keys: Sequence[TensorKey], waiter: ClaimHandle | None) -> None:
        """See `LookupBuffer.unclaim`."""
        waiter_id = 0
        if waiter is not None:
            with self._settled:
                if self._pending.pop(waiter.request_id, None) is not None:
                    waiter_id = waiter.request_id
        parts = list(split([key.text for key in keys])) or ([[]] if waiter_id else [])
        for part in parts:
            self._post(Unclaim(next_request_id(), self._session.namespace, list(part), waiter_id))

    def on_event(self, message: dict[str, Any]) -> None:
        """A `claimed` event of the node."""
        with self._settled:
            handle = self._pending.get(message["id"])
            if handle is None:
                return  # `unclaim` has removed it, and sent that to the node
            handle.key = message["key"]
            handle.holder = message["holder"]
            handle.state = ClaimOutcome(message["outcome"])
            if handle.state is not ClaimOutcome.PENDING:
                del self._pending[handle.request_id]
            self._settled.notify_all()
        if handle.state is ClaimOutcome.GRANTED and not handle.keeps:
            self.unclaim(handle.keys, None)

    def on_lost(self) -> None:
        """The node is lost, and its claims with it: fail all pending sets."""
        with self._settled:
            pending = list(self._pending)
        self.fail(pending)

    def fail(self, request_ids: Sequence[int]) -> None:
        """Settle these sets as FAILED."""
        with self._settled:
            for request_id in request_ids:
                handle = self._pending.pop(request_id, None)
                if handle is not None:
                    handle.state = ClaimOutcome.FAILED
            self._settled.notify_all()

    def _post(self, request: Request) -> bool:
        """Send the request. Returns False if no node is connected."""
        try:
            self._session.post(request)
        except LookupBufferError:
            return False
        return True
