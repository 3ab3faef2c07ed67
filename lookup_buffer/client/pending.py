"""A client's prefetches and claims: requests whose answers arrive later, as events.

This module owns the handles and claim sets that have not settled, and settles them by events of
the node. A claim of one key is a plain request with a reply. Any thread may call; events arrive on
the session's listening thread. When the node is lost, all pending handles and sets fail. The module
must not know how the node locates, fetches or decides.
"""

import threading
from collections.abc import Sequence
from typing import Any

from lookup_buffer.client.handles import (
    ClaimAnswer,
    ClaimHandle,
    LoadOrder,
    PrefetchHandle,
    PrefetchState,
)
from lookup_buffer.client.load import Loading
from lookup_buffer.client.session import ClientSession, next_request_id
from lookup_buffer.errors import LookupBufferError, MissReason
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Encoding,
    Prefetch,
    ReleaseClaim,
    Request,
    Unclaim,
    lasting,
    split,
    waiting,
)
from lookup_buffer.times import CALL_SECONDS
from store import ClaimState


class Prefetching:
    def __init__(self, attachment: ClientSession, loading: Loading) -> None:
        self._attachment = attachment
        self._loading = loading
        self._settled = threading.Condition()
        self._waiting: dict[tuple[int, int], PrefetchHandle] = {}
        """(request id, index) → handle that has not settled."""

    def prefetch(
        self, keys: Sequence[TensorKey], timeout: float, claimer: int = 0, wait_seconds: float = 0.0
    ) -> list[PrefetchHandle]:
        """See `LookupBuffer.prefetch`. `claimer` is as in `Prefetch`: only for keys that fit one
        message; if it is not 0, the claims wait for `wait_seconds`, not the prefetch."""
        handles = [PrefetchHandle(key, self._settled) for key in keys]
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

    def release(self, handle: PrefetchHandle) -> None:
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
        """The node is gone: fail all pending handles, which it will not answer."""
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


def _all_settled(handles: Sequence[PrefetchHandle]) -> bool:
    return all(handle.state is not PrefetchState.PENDING for handle in handles)


def _settle(handle: PrefetchHandle, entry: dict[str, Any], order: LoadOrder | None) -> None:
    handle.order = order
    handle.reason = MissReason.of(entry["reason"]) if "reason" in entry else ""
    handle.source = entry.get("source", "")
    handle.state = PrefetchState(entry["state"])  # last: readers read it first


class Claiming:
    def __init__(self, attachment: ClientSession) -> None:
        self._attachment = attachment
        self._settled = threading.Condition()
        self._pending: dict[int, ClaimHandle] = {}

    def claim(
        self, key: TensorKey, lease_seconds: float, state: ClaimState, timeout: float
    ) -> ClaimAnswer:
        """See `LookupBuffer.claim`."""
        lease, wait = lasting("lease_seconds", lease_seconds), waiting(timeout)
        namespace = self._attachment.namespace
        request = Claim(next_request_id(), namespace, key.text, lease, state.value, wait)
        return ClaimAnswer.of(self._attachment.call(request, wait + CALL_SECONDS))

    def release(self, key: TensorKey) -> bool:
        """See `LookupBuffer.release_claim`."""
        request = ReleaseClaim(next_request_id(), self._attachment.namespace, key.text)
        return bool(self._attachment.call(request, CALL_SECONDS)["released"])

    def claim_all(
        self, keys: Sequence[TensorKey], wait_seconds: float, timeout: float
    ) -> ClaimHandle:
        """See `LookupBuffer.claim_all`."""
        one = self.begin(keys)
        texts, wait = sorted(key.text for key in keys), waiting(wait_seconds)
        if one.state is not ClaimOutcome.PENDING:
            return one
        if self._post(ClaimAll(one.request_id, self._attachment.namespace, texts, wait)):
            one.hear(timeout)
        else:
            self.fail([one.request_id])
        return one

    def begin(self, keys: Sequence[TensorKey]) -> ClaimHandle:
        """A set that waits for its events. FAILED if one message cannot carry all keys, because
        they could then not be claimed all or none."""
        if len(list(split([key.text for key in keys]))) > 1:
            return ClaimHandle(keys, self._settled, ClaimOutcome.FAILED)
        one = ClaimHandle(keys, self._settled, request_id=next_request_id())
        with self._settled:
            self._pending[one.request_id] = one
        return one

    def encoding(self, keys: Sequence[TensorKey], lease_seconds: float) -> None:
        """See `LookupBuffer.encoding`."""
        lease = lasting("lease_seconds", lease_seconds)
        for part in split([key.text for key in keys]):
            self._post(Encoding(next_request_id(), self._attachment.namespace, list(part), lease))

    def unclaim(self, keys: Sequence[TensorKey], waiter: ClaimHandle | None) -> None:
        """See `LookupBuffer.unclaim`."""
        awaited = 0
        if waiter is not None:
            with self._settled:
                if self._pending.pop(waiter.request_id, None) is not None:
                    awaited = waiter.request_id
        parts = list(split([key.text for key in keys])) or ([[]] if awaited else [])
        for part in parts:
            self._post(Unclaim(next_request_id(), self._attachment.namespace, list(part), awaited))

    def on_event(self, message: dict[str, Any]) -> None:
        """A `claimed` event of the node."""
        with self._settled:
            one = self._pending.get(message["id"])
            if one is None:
                return  # abandoned; its `unclaim` tells the node
            one.key = message["key"]
            one.holder = message["holder"]
            one.state = ClaimOutcome(message["outcome"])
            if one.state is not ClaimOutcome.PENDING:
                del self._pending[one.request_id]
            self._settled.notify_all()

    def on_lost(self) -> None:
        """The node is gone, and with it its claims: fail all pending sets."""
        with self._settled:
            pending = list(self._pending)
        self.fail(pending)

    def fail(self, request_ids: Sequence[int]) -> None:
        """Settle these sets as FAILED: no answer will come."""
        with self._settled:
            for request_id in request_ids:
                one = self._pending.pop(request_id, None)
                if one is not None:
                    one.state = ClaimOutcome.FAILED
            self._settled.notify_all()

    def _post(self, request: Request) -> bool:
        """Whether the request could be sent to a node."""
        try:
            self._attachment.post(request)
        except LookupBufferError:
            return False
        return True
