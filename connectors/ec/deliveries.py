"""Deliveries: requests that carry an item's metadata alone wait for whoever publishes it.

The node is asked once and tells when the item is published and here; a pass meanwhile costs a
dictionary look-up. When `metadata_wait_seconds` are over the request goes on to wait only while
somebody has the claim for the item. Owned by vLLM's scheduler thread, which never waits here.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.ec.claimant import Claimant
from connectors.ec.claims import EcClaims
from connectors.ec.pins import Pin, PinTable
from connectors.ec.watch import RequestWatch, WatchedItem
from connectors.identifiers import Carried
from lookup_buffer.client.handles import PrefetchHandle, PrefetchState
from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.protocol.messages import ClaimOutcome

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

WAIT_SECONDS_MAX = 600.0
"""Of one request, in all, however long others say that they are at work on its items."""
QUESTION_SECONDS = 10.0
"""The node goes on to wait so long at most for a request that was aborted."""
ASK_AGAIN_SECONDS = 0.1
"""A node that has not waited (it was lost, or has no room) is asked again after so long."""
ANSWER_SECONDS = 2.0
"""A node that does not even say whether somebody has the claim is not waited for longer; nor is
what it says to be stored."""
STORED_MAX = 3
"""What is said to be stored, and did not come when asked for so often in succession, is lost."""
MISFITS = (MissReason.SHAPE, MissReason.DTYPE)
HOPELESS = (
    MissReason.OVER_BUDGET,
    *MISFITS,
    MissReason.NAMESPACE_UNKNOWN,
    MissReason.WEIGHTS_CHANGED,
)
"""Reasons that no wait will change."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a request fails."""

    reason: MissReason
    """For the counter: few words."""
    text: str
    """For the log."""


@dataclass(slots=True, eq=False)
class _Wait:
    """One request's, until it finished."""

    since: float | None = None
    """When the wait under way began; None while the request needs nothing."""
    waited_seconds: float = 0.0
    """In earlier waits."""
    deadline: float = 0.0
    limit: float = 0.0
    """The deadline while somebody has the claim."""
    look_at: float = 0.0
    """Nothing is to be done before, unless something is heard."""
    ask_at: float = 0.0
    items: dict[str, WatchedItem] = field(default_factory=dict)
    handles: dict[str, PrefetchHandle] = field(default_factory=dict)
    """What was asked for, of `items`."""
    reason: MaybeMissed = ""
    """Why the last of them did not come."""
    claimant: Claimant | None = None
    """Since the deadline: who is at work on the items."""
    answer_by: float = 0.0
    stored: int = 0
    failed: Unavailable | None = None


class EcDeliveries:
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
        """Requests that wait, or have waited and not finished."""
        return len(self._waits)

    def still_waits(self, request_id: str) -> bool:
        """Whether `look` would only say so; a fraction of its cost, for every pass."""
        wait = self._waits.get(request_id)
        if wait is None or wait.since is None or self._clock() >= wait.look_at:
            return False
        asked = wait.claimant.asked if wait.claimant is not None else None
        if asked is not None and asked.state is not ClaimOutcome.PENDING:
            return False
        return all(one.state is PrefetchState.PENDING for one in wait.handles.values())

    def take_in(self, watch: RequestWatch) -> None:
        """Give the pins of what has come to the request."""
        wait = self._waits.get(watch.request_id)
        if wait is None:
            return
        settled = [n for n, one in wait.handles.items() if one.state is not PrefetchState.PENDING]
        for identifier in settled:
            wait.look_at = 0.0  # the gate may hold the request back before it comes to `look`
            handle, item = wait.handles.pop(identifier), wait.items.get(identifier)
            if item is None:  # it came by another way meanwhile
                self._buffer.release(handle)
                continue
            wait.reason = self._pin(watch, item, handle)
            if wait.reason and wait.reason in HOPELESS:
                wait.failed = _unavailable([item], wait.reason)
            if wait.reason == MissReason.NO_ROOM:
                self._let_go(watch)
            if not wait.reason:
                wait.stored = 0

    def look(self, watch: RequestWatch, lacking: Sequence[WatchedItem]) -> Unavailable | None:
        """Why a request that lacks these items fails; None: it waits."""
        wait, now = self._waits.setdefault(watch.request_id, _Wait()), self._clock()
        if wait.since is None:
            left = max(0.0, self._wait_seconds - wait.waited_seconds)
            wait.since, wait.deadline = now, now + left
            wait.limit = max(wait.deadline, now + WAIT_SECONDS_MAX - wait.waited_seconds)
        wait.items = {item.identifier: item for item in lacking}
        if wait.failed is None:
            wait.look_at = wait.deadline
            if now >= wait.deadline:
                self._see_who_is_at_it(watch.request_id, wait, now)
        if wait.failed is None:
            self._ask(wait, now)
        else:
            self._give_up(watch.request_id, wait)
        return wait.failed

    def over(self, request_id: str) -> None:
        """The request has all that it needs now."""
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

    def _ask(self, wait: _Wait, now: float) -> None:
        """Ask for what is lacking and not asked for."""
        new = [item for name, item in wait.items.items() if name not in wait.handles]
        if new and now < wait.ask_at:
            wait.look_at = min(wait.look_at, wait.ask_at)
        elif new:
            wait.ask_at = now + ASK_AGAIN_SECONDS
            keys = [item.key for item in new]
            handles = self._buffer.prefetch(keys, wait_seconds=QUESTION_SECONDS)
            wait.handles.update(zip([item.identifier for item in new], handles, strict=True))

    def _pin(self, watch: RequestWatch, item: WatchedItem, handle: PrefetchHandle) -> MaybeMissed:
        """Take what was asked for as the request's pin; or the reason why it cannot be had."""
        order, name = handle.order, item.identifier
        self._pins.discard_other(name, item.key)
        pin = Pin(name, handle, 0 if order is None else order.nbytes)
        pin.modalities.add(item.modality)
        shared = self._pins.get(name)
        reason = self._pins.why_unfit(pin, item.num_embeds, any_float=True)
        if not reason and shared is not None and self._pins.is_here(shared):
            self._buffer.release(handle)
            pin = shared
        elif not reason and self._pins.has_room(pin.nbytes):
            self._pins.add(pin)
        else:
            self._buffer.release(handle)
            fits = pin.nbytes <= self._pins.budget_bytes
            return reason or (MissReason.NO_ROOM if fits else MissReason.OVER_BUDGET)
        pin.wanted_by.add(watch.request_id)
        pin.modalities.add(item.modality)
        watch.wanted[name] = item
        watch.absent.discard(name)
        return ""

    def _let_go(self, watch: RequestWatch) -> None:
        """Requests that each hold a part of what they need would leave no room for any of them."""
        bare = [name for name, item in watch.wanted.items() if item.carried is Carried.METADATA]
        for name in bare:
            watch.absent.add(name)  # asked for here, with what else is lacking
            del watch.wanted[name]
            self._pins.drop(name, watch.request_id)

    # -- the claims

    def _see_who_is_at_it(self, request_id: str, wait: _Wait, now: float) -> None:
        """The time is over: go on only while somebody has the claim for one of the items."""
        if wait.claimant is None:
            keys = {name: item.key for name, item in wait.items.items()}
            wait.claimant = self._claims.ask_who(request_id, keys, until=wait.limit)
            wait.answer_by = now + ANSWER_SECONDS
        asked = wait.claimant.asked
        assert asked is not None, "kept until it is given up"
        match asked.state:
            case ClaimOutcome.PENDING:
                wait.look_at = wait.limit if asked.holder else wait.answer_by
                if now < wait.look_at:
                    return
                reason = MissReason.CLAIMED if asked.holder else MissReason.NO_ANSWER
                wait.failed = _unavailable(wait.items.values(), reason, asked.holder)
            case ClaimOutcome.STORED if wait.stored < STORED_MAX:
                wait.stored += 1
                wait.look_at = wait.deadline = now + ANSWER_SECONDS
                self._end_question(request_id, wait)
            case ClaimOutcome.HELD:
                wait.failed = _unavailable(wait.items.values(), MissReason.CLAIMED, asked.holder)
            case _:
                wait.failed = _unavailable(wait.items.values(), wait.reason or MissReason.ABSENT)

    def _end_question(self, request_id: str, wait: _Wait) -> None:
        claimant, wait.claimant = wait.claimant, None
        if claimant is not None:
            self._claims.end_question(request_id, claimant)

    def _give_up(self, request_id: str, wait: _Wait) -> None:
        for handle in wait.handles.values():
            self._buffer.release(handle)
        wait.handles.clear()
        self._end_question(request_id, wait)


def _unavailable(items: Iterable[WatchedItem], reason: MissReason, holder: str = "") -> Unavailable:
    names = ", ".join(item.key.text for item in items)
    match reason:
        case MissReason.ABSENT:
            text = f"no node has {names}, and no engine has claimed it"
        case MissReason.CLAIMED:
            text = f"{holder} has the claim for {names}, and has not published it"
        case _ if reason in MISFITS:
            text = f"{names} is stored, and is no output of this model's encoder ({reason})"
        case _:
            text = f"{names} could not be had: {reason}"
    return Unavailable(reason, text)
