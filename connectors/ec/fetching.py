"""The item source of an engine that loads: the node brings items to this host and pins them.

`EcGate` and `EcScheduler` call it on vLLM's scheduler thread. vLLM schedules nothing during a call,
so all first lookups of a pass share one time budget, and later passes collect fetches in flight.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from connectors.counters import Counters, logger
from connectors.ec.claims import EcClaims
from connectors.ec.items import PassCache, Pin, PinTable, Variant
from connectors.ec.supply import ItemSource, Lookup
from connectors.ec.watch import Phase, RequestItem, RequestState
from connectors.identifiers import ItemPayload
from connectors.pass_time import PassTime, PassTimes
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

LOST_LOOKUP_SECONDS = 0.25
"""How long one pass may wait, in all, for items that vLLM's cache lost. An item on this host takes
a thousandth of that; an encode takes from a tenth of it to many times as much."""
LOST_LOOKUP_PAUSE_SECONDS = 10.0
"""Pause after a node did not answer within `LOST_LOOKUP_SECONDS`."""


class FetchingSource(ItemSource):
    """Items are prefetched through `EcClaims`, which may claim them in the same call.

    Args:
        pins: holds what was prefetched; shared with `EcScheduler`.
        pass_cache: a no that is no longer true is dropped from it.
        wait_seconds: limit for the wait of one request for bytes, and as much again for its wait
            for memory.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        pins: PinTable,
        claims: EcClaims,
        pass_cache: PassCache,
        *,
        times: PassTimes,
        wait_seconds: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._pins = pins
        self._claims = claims
        self._pass_cache = pass_cache
        self._times = times
        self._wait_seconds = wait_seconds
        self._counters = counters
        self._clock = clock
        self._lost_time = PassTime(LOST_LOOKUP_SECONDS, clock)
        self._lost_lookup_at = 0.0

    def look_up(self, state: RequestState, needed: Sequence[RequestItem]) -> Lookup:
        for item in needed:
            self._pins.discard_other(item.identifier, item.key)
        new = [item for item in needed if not self._pins.may_arrive(item.identifier)]
        if new and not self._prefetch(state, new):
            return Lookup.DEFERRED if state.awaits_space else Lookup.SKIPPED
        for item in needed:
            pin = self._pins.get(item.identifier)
            assert pin is not None, "prefetched above"
            pin.wanted_by.add(state.request_id)
            pin.modalities.add(item.modality)
            state.wanted[item.identifier] = item
        state.phase = Phase.FETCHING
        return Lookup.STARTED

    def _prefetch(self, state: RequestState, items: list[RequestItem]) -> bool:
        now = self._clock()
        sizes = [self._pins.estimated_bytes(item.num_embeds) for item in items]
        if not self._pins.has_space(sum(sizes)):
            self._await_space(state, items, sum(sizes), now)
            return False
        state.end_space_wait(now)
        handles = self._times.first_sights.spend_on(partial(self._claims.prefetch, state, items))
        for item, nbytes, handle in zip(items, sizes, handles, strict=True):
            self._pins.add(Pin(item.identifier, handle, nbytes))
        return True

    def _await_space(
        self, state: RequestState, items: list[RequestItem], nbytes: int, now: float
    ) -> None:
        wait_seconds = self._wait_seconds
        if nbytes > self._pins.budget_bytes:  # it never fits: do not retry
            state.absent.update(item.identifier for item in items)
            wait_seconds = 0.0
        state.wait_for_space(now, wait_seconds)
        if not (state.awaits_space or state.over_budget):
            state.over_budget = True
            self._counters.add(MissReason.OVER_BUDGET.value)

    def settle(self, state: RequestState) -> bool:
        pending: list[str] = []
        missing: dict[str, tuple[Pin, MissReason]] = {}
        for identifier, item in state.wanted.items():
            pin = self._pins.get(identifier)
            if pin is None:
                continue  # another request's step loads it into vLLM's cache
            if not self._times.idle.spend_on(pin.wait):
                pending.append(identifier)
            elif reason := self._pins.misfit_reason(
                pin, item.num_embeds, any_float=item.payload is ItemPayload.METADATA
            ):
                missing[identifier] = pin, reason
            else:
                self._pass_cache.drop_negative(identifier)
        if pending and state.hold_back(self._clock(), self._wait_seconds):
            return False
        for identifier in pending:
            self._missed(state, identifier, MissReason.TIMEOUT)
        for identifier, (pin, reason) in missing.items():
            # A store that is down cannot grant claims either.
            if pin.handle.state is PrefetchState.MISSING and reason != MissReason.STORE_DOWN:
                state.mark_missing(state.wanted[identifier])
            self._missed(state, identifier, reason)
        state.phase = Phase.RESOLVED
        return True

    def _missed(self, state: RequestState, identifier: str, reason: MissReason) -> None:
        self._counters.add(f"miss:{reason}")
        logger.debug("request %s: item %s missed: %s", state.request_id, identifier, reason)
        state.absent.add(identifier)
        del state.wanted[identifier]
        self._pins.drop(identifier, state.request_id)

    def holds(self, state: RequestState, identifier: str) -> bool:
        pin = self._pins.get(identifier)
        return pin is not None and state.request_id in pin.wanted_by

    def promise(self, identifier: str, variants: Sequence[Variant]) -> bool:
        pin = self._pins.get(identifier)
        if pin is None or self._pins.misfit_reason(pin, None):
            return False
        if any(variant != (pin.handle.key, pin.rows) for variant in variants):
            return False
        self._pins.promise(pin)
        return True

    def look_up_lost(self, identifier: str, variants: Sequence[Variant]) -> bool:
        (key, rows), *others = set(variants) or {(None, 0)}
        now = self._clock()
        if key is None or others or now < self._lost_lookup_at or self._pins.get(identifier):
            return False
        (handle,) = self._lost_time.spend_on(
            lambda seconds: self._buffer.prefetch([key], timeout=seconds)
        )
        if handle.state is PrefetchState.PENDING:
            self._lost_lookup_at = self._clock() + LOST_LOOKUP_PAUSE_SECONDS
        pin = Pin(identifier, handle, handle.order.nbytes if handle.order is not None else 0)
        if self._pins.misfit_reason(pin, rows) or not self._pins.has_space(pin.nbytes):
            self._buffer.release(handle)
            return False
        self._pins.promise_now(pin)
        return True

    def end_pass(self) -> None:
        self._lost_time.begin_pass()

    def drop(self, identifier: str, request_id: str) -> None:
        self._pins.drop(identifier, request_id)
