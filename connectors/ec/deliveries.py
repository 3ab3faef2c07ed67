"""Waits of requests that carry only an item's metadata and need it from another engine.

The node gets one prefetch with a wait and reports when the item is published and on this host.
Until then a pass costs a dictionary lookup. An item that is there, and waits for space in the
budget of pins, is charged to it before it is prefetched: all that wait pin no more than the budget.
After `metadata_wait_seconds` the request waits on only while another engine holds the claim for an
item. `EcGate` calls this on vLLM's scheduler thread; only `wait` waits.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.ec.claims import EcClaims, RequestClaims
from connectors.ec.items import Pin, PinTable
from connectors.ec.watch import RequestItem, RequestState
from connectors.identifiers import ItemPayload
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.protocol.messages import ClaimOutcome

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

WAIT_SECONDS_MAX = 600.0
"""Limit for all waits of one request, however long others hold claims for its items."""
NODE_WAIT_SECONDS = 10.0
"""Wait of one prefetch at the node, and so the longest that the node waits for an aborted
request."""
LOOKUP_INTERVAL_SECONDS = 0.1
"""Pause before a prefetch is repeated that the node ended at once: it was lost, or had no
memory."""
ANSWER_SECONDS = 2.0
"""Limit for the node to report the holder of a claim, and for an item that is reported as stored to
arrive."""
STORED_MAX = 3
"""An item that is reported as stored, and did not arrive after so many attempts in succession, is
lost."""
MISFITS = (MissReason.SHAPE, MissReason.DTYPE)
PERMANENT = (
    MissReason.OVER_BUDGET,
    *MISFITS,
    MissReason.NAMESPACE_UNKNOWN,
    MissReason.WEIGHTS_CHANGED,
)
"""Reasons that no wait can change."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a request fails."""

    reason: MissReason
    """For the counter."""
    text: str
    """For the log."""


@dataclass(slots=True, eq=False)
class _Wait:
    """The waits of one request, kept until it finishes."""

    since: float | None = None
    """Start of the current wait; None while the request lacks nothing."""
    waited_seconds: float = 0.0
    """Total of earlier waits."""
    deadline: float = 0.0
    limit: float = 0.0
    """The deadline while another engine holds a claim."""
    next_check_at: float = 0.0
    """No check is needed before, unless an answer arrives."""
    next_prefetch_at: float = 0.0
    items: dict[str, RequestItem] = field(default_factory=dict)
    in_flight: dict[str, Pin] = field(default_factory=dict)
    """Prefetches for `items`, by identifier."""
    reason: MaybeMissed = ""
    """Why the last item did not arrive."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of items that are here and wait for space, by identifier. While there are any, the
    request holds none of its items."""
    estimated: set[str] = field(default_factory=set)
    """Those of them whose size is an estimate."""
    claims: RequestClaims | None = None
    """Query for the holders of the items' claims, made when the deadline passes."""
    answer_deadline: float = 0.0
    stored: int = 0
    failed: Unavailable | None = None


class MetadataWaits:
    """See the module."""

    def __init__(
        self,
        buffer: "LookupBuffer",
        pins: PinTable,
        claims: EcClaims,
        *,
        wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._pins = pins
        self._claims = claims
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        """Requests that wait, or have waited and are not finished."""
        return len(self._waits)

    def still_waits(self, request_id: str) -> bool:
        """Whether `check` would keep the request waiting. Much cheaper, for every pass."""
        wait = self._waits.get(request_id)
        if wait is None or wait.since is None or self._clock() >= wait.next_check_at:
            return False
        handle = wait.claims.handle if wait.claims is not None else None
        if handle is not None and handle.state is not ClaimOutcome.PENDING:
            return False
        return all(pin.handle.state is PrefetchState.PENDING for pin in wait.in_flight.values())

    def wait(self, request_id: str, timeout: float) -> bool:
        """Wait for the node, at most `timeout` seconds. Returns whether `check` has something new
        to look at."""
        wait = self._waits[request_id]
        awaited = wait.claims.handle if wait.claims is not None else None
        for handle in (awaited, *(pin.handle for pin in wait.in_flight.values())):
            if handle is not None:
                handle.wait(timeout)
                break
        return not self.still_waits(request_id)

    def collect(self, state: RequestState) -> None:
        """Assign the pins of items that arrived to the request."""
        wait = self._waits.get(state.request_id)
        if wait is None:
            return
        settled = [
            pin for pin in wait.in_flight.values() if pin.handle.state is not PrefetchState.PENDING
        ]
        if settled:
            wait.next_check_at = 0.0  # `EcGate` may return before it calls `check`
        for pin in settled:
            del wait.in_flight[pin.identifier]
            item = wait.items.get(pin.identifier)
            if item is None:  # it arrived by another prefetch
                self._pins.release(pin)
                continue
            wait.reason = self._pin(state, item, pin)
            wait.sizes.pop(pin.identifier, None)
            wait.estimated.discard(pin.identifier)
            if not wait.reason:
                wait.stored = 0
            elif wait.reason in PERMANENT:
                wait.failed = _unavailable([item], wait.reason)
            elif wait.reason == MissReason.NO_ROOM and pin.nbytes:
                wait.sizes[pin.identifier] = pin.nbytes
            elif wait.reason == MissReason.NO_ROOM:
                self._estimate(wait, [item])
        if settled and wait.sizes.keys() & wait.items.keys() - wait.in_flight.keys():
            self._drop_partial_pins(state, wait)

    def check(self, state: RequestState, lacking: Sequence[RequestItem]) -> Unavailable | None:
        """Return why a request that lacks these items fails, or None while it waits."""
        wait, now = self._waits.setdefault(state.request_id, _Wait()), self._clock()
        if wait.since is None:
            if state.over_budget:
                self._estimate(wait, lacking)
            left = max(0.0, self._wait_seconds - wait.waited_seconds)
            wait.since, wait.deadline = now, now + left
            wait.limit = max(wait.deadline, now + WAIT_SECONDS_MAX - wait.waited_seconds)
        wait.items = {item.identifier: item for item in lacking}
        if wait.failed is None:
            wait.next_check_at = wait.deadline
            if now >= wait.deadline:
                self._check_holders(state.request_id, wait, now)
        if wait.failed is None:
            self._prefetch(wait, now)
        if wait.failed is not None:
            self._give_up(state.request_id, wait)
        return wait.failed

    def end_wait(self, request_id: str) -> None:
        """The request has all items that it needs now."""
        wait = self._waits.get(request_id)
        if wait is not None and wait.since is not None:
            wait.waited_seconds += self._clock() - wait.since
            wait.since = None
            self._give_up(request_id, wait)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._give_up(request_id, wait)

    # -- the bytes

    def _prefetch(self, wait: _Wait, now: float) -> None:
        """Prefetch lacking items that are not in flight."""
        new = [item for name, item in wait.items.items() if name not in wait.in_flight]
        if new and now >= wait.next_prefetch_at:
            wait.next_prefetch_at = now + LOOKUP_INTERVAL_SECONDS
            absent = [item for item in new if item.identifier not in wait.sizes]
            self._start(wait, absent, NODE_WAIT_SECONDS)
            new = self._start_for_space(wait, [one for one in new if one.identifier in wait.sizes])
        if new:
            wait.next_check_at = min(wait.next_check_at, wait.next_prefetch_at)

    def _start_for_space(self, wait: _Wait, items: list[RequestItem]) -> list[RequestItem]:
        """Prefetch all of these that wait for space, once there is space for all. Returns those
        that still wait. If they may need more than the budget, one is prefetched, for its size."""
        nbytes = sum(wait.sizes[item.identifier] for item in items)
        most = self._pins.budget_bytes
        first = items
        if nbytes > most:
            first = [item for item in items if item.identifier in wait.estimated][:1]
            nbytes = min(most, sum(wait.sizes[item.identifier] for item in first))
            if not first:
                wait.failed = _unavailable(items, MissReason.OVER_BUDGET)
        if not self._pins.has_space(nbytes):
            return items
        self._start(wait, first, wait_seconds=0.0)
        return [] if first is items else items

    def _start(self, wait: _Wait, items: Sequence[RequestItem], wait_seconds: float) -> None:
        """Prefetch these items. What waits for space is charged to the budget until it is settled;
        what may never be stored is charged when it has arrived."""
        keys = [item.key for item in items]
        handles = self._buffer.prefetch(keys, wait_seconds=wait_seconds) if keys else []
        for item, handle in zip(items, handles, strict=True):
            nbytes = min(self._pins.budget_bytes, wait.sizes.get(item.identifier, 0))
            pin = wait.in_flight[item.identifier] = Pin(item.identifier, handle, nbytes)
            self._pins.charge(pin)

    def _estimate(self, wait: _Wait, items: Iterable[RequestItem]) -> None:
        """These are here, or may be, and there was no space for them."""
        for item in items:
            wait.sizes[item.identifier] = self._pins.estimated_bytes(item.num_embeds)
            wait.estimated.add(item.identifier)

    def _pin(self, state: RequestState, item: RequestItem, pin: Pin) -> MaybeMissed:
        """Pin what arrived for the request, or return the reason why it cannot be used."""
        order, name = pin.handle.order, item.identifier
        self._pins.discard_other(name, item.key)
        self._pins.discharge(pin)
        pin.nbytes = 0 if order is None else order.nbytes
        pin.modalities.add(item.modality)
        shared = self._pins.get(name)
        reason = self._pins.misfit_reason(pin, item.num_embeds, any_float=True)
        if not reason and shared is not None and self._pins.is_resident(shared):
            self._buffer.release(pin.handle)
            pin = shared
        elif not reason and self._pins.has_space(pin.nbytes - (shared.nbytes if shared else 0)):
            self._pins.add(pin)
        else:
            self._buffer.release(pin.handle)
            fits = pin.nbytes <= self._pins.budget_bytes
            return reason or (MissReason.NO_ROOM if fits else MissReason.OVER_BUDGET)
        pin.wanted_by.add(state.request_id)
        pin.modalities.add(item.modality)
        state.wanted[name] = item
        state.absent.discard(name)
        return ""

    def _drop_partial_pins(self, state: RequestState, wait: _Wait) -> None:
        """Release the request's pins: all of its items wait for space together. Requests that each
        hold a part of them could fill the budget, and none of them could complete."""
        bare = [name for name, item in state.wanted.items() if item.payload is ItemPayload.METADATA]
        for name in bare:
            pin = self._pins.get(name)
            if pin is not None:
                wait.sizes[name] = pin.nbytes
                wait.estimated.discard(name)
            state.absent.add(name)  # prefetched again by `_prefetch`
            del state.wanted[name]
            self._pins.drop(name, state.request_id)

    # -- the claims

    def _check_holders(self, request_id: str, wait: _Wait, now: float) -> None:
        """After the deadline: wait on only while another engine holds a claim for one of the
        items."""
        if wait.claims is None:
            keys = {name: item.key for name, item in wait.items.items()}
            wait.claims = self._claims.query_holders(request_id, keys, until=wait.limit)
            wait.answer_deadline = now + ANSWER_SECONDS
        handle = wait.claims.handle
        assert handle is not None, "set until `_end_query`"
        match handle.state:
            case ClaimOutcome.PENDING:
                wait.next_check_at = wait.limit if handle.holder else wait.answer_deadline
                if now < wait.next_check_at:
                    return
                reason = MissReason.CLAIMED if handle.holder else MissReason.NO_ANSWER
                wait.failed = _unavailable(wait.items.values(), reason, handle.holder)
            case ClaimOutcome.STORED if wait.stored < STORED_MAX:
                wait.stored += 1
                wait.next_check_at = wait.deadline = now + ANSWER_SECONDS
                self._end_query(request_id, wait)
            case ClaimOutcome.HELD:
                wait.failed = _unavailable(wait.items.values(), MissReason.CLAIMED, handle.holder)
            case _:
                reason = MissReason.NO_ROOM if wait.sizes else wait.reason or MissReason.ABSENT
                wait.failed = _unavailable(wait.items.values(), reason)

    def _end_query(self, request_id: str, wait: _Wait) -> None:
        claims, wait.claims = wait.claims, None
        if claims is not None:
            self._claims.end_query(request_id, claims)

    def _give_up(self, request_id: str, wait: _Wait) -> None:
        for pin in wait.in_flight.values():
            self._pins.release(pin)
        wait.in_flight.clear()
        self._end_query(request_id, wait)


def _unavailable(items: Iterable[RequestItem], reason: MissReason, holder: str = "") -> Unavailable:
    names = ", ".join(item.key.text for item in items)
    match reason:
        case MissReason.ABSENT:
            text = f"no node has {names}, and no engine has claimed it"
        case MissReason.CLAIMED:
            text = f"{holder} holds the claim for {names} and has not published it"
        case _ if reason in MISFITS:
            text = f"{names} is stored but is no output of this model's encoder ({reason})"
        case _:
            text = f"{names} is not available: {reason}"
    return Unavailable(reason, text)
