"""The gate: decides for each request whether vLLM may schedule it now.

vLLM's scheduler thread calls it through `LookupBufferECConnector` and schedules nothing during a
call. A request that was seen before costs a dictionary lookup. All first lookups of one scheduling
pass share a time budget (`first_sight_seconds`). The decision depends on what the item source has,
and on which engine may encode the rest; `EcScheduler` keeps what is promised to vLLM.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from connectors.counters import Counters
from connectors.ec.claims import ClaimDecision, EcClaims
from connectors.ec.deliveries import MetadataWaits, Unavailable
from connectors.ec.items import EngineCache, ItemVariants, PassCache, PinTable
from connectors.ec.republishing import EcRepublishing
from connectors.ec.shape import EngineShape
from connectors.ec.supply import ItemSource, Lookup
from connectors.ec.watch import Phase, RequestItem, RequestState
from connectors.identifiers import Adapters, ItemPayload
from connectors.pass_time import PassTimes
from connectors.settings import ConnectorSettings
from lookup_buffer.errors import MissReason

NOT_SHAREABLE = Unavailable(MissReason.NOT_SHAREABLE, "its item cannot be shared between engines")
AMBIGUOUS = Unavailable(MissReason.SHAPE, "one identifier names items of several sizes")


class EcGate:
    """One `RequestState` for each request with multimodal items, from its first poll until it
    finishes.

    Args:
        item_source: provides the items that are not encoded here.
        claims: decides which engine encodes the rest.
        metadata_waits: waits of requests that carry no media of their own.
        republishing: finds items that only vLLM's own cache holds; None on engines that store
            nothing.
        pins: the pinned items, for requests without media.
        engine_cache: what vLLM's own cache holds; `EcScheduler` updates it.
        variants: the variants of all tracked requests; this class updates it.
        pass_cache: the answers of this pass.
        times: how long a pass may wait; shared with the item source.
        metadata_fields: see `payload_of`.
        adapters: what LoRA adapters contain; shared with `EcScheduler`.
    """

    def __init__(
        self,
        item_source: ItemSource,
        claims: EcClaims,
        metadata_waits: MetadataWaits,
        republishing: EcRepublishing | None,
        *,
        pins: PinTable,
        engine_cache: EngineCache,
        variants: ItemVariants,
        pass_cache: PassCache,
        times: PassTimes,
        settings: ConnectorSettings,
        shape: EngineShape,
        metadata_fields: Callable[[str], set[str]],
        adapters: Adapters,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._item_source = item_source
        self._claims = claims
        self._metadata_waits = metadata_waits
        self._republishing = republishing
        self._pins = pins
        self._engine_cache = engine_cache
        self._variants = variants
        self._pass_cache = pass_cache
        self._times = times
        self._wait_seconds = settings.fetch_wait_seconds
        self._is_consumer = shape.is_consumer
        self._metadata_fields = metadata_fields
        self._adapters = adapters
        self._counters = counters
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._unavailable: dict[str, Unavailable] = {}

    def __len__(self) -> int:
        """Requests that are tracked."""
        return len(self._states)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now. On False vLLM asks again in the next pass."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = RequestState(request.request_id)
        is_read = len(request.mm_features) == state.feature_count
        if is_read and num_computed_tokens >= state.items_end:
            # Every step of every decoding request comes here and needs nothing.
            state.computed_tokens = num_computed_tokens
            if state.wanted:
                self._drop_all(state)
            return True
        if not is_read:
            self._read_items(state, request)
        self._variants.current = state.variants
        state.update_progress(request, num_computed_tokens)
        may_pass = self._may_pass(state, num_computed_tokens)
        if may_pass:
            state.held_at = None
        return may_pass

    def _read_items(self, state: RequestState, request: Any) -> None:
        self._variants.remove(state.variants)
        state.read_items(request, self._metadata_fields, self._adapters, self._skipped)
        self._variants.add(state.variants)
        if not self._is_consumer:  # an encode-only engine encodes what it can and serves no request
            state.metadata_only, state.unavailable_end = False, 0

    def _may_pass(self, state: RequestState, computed: int) -> bool:
        if computed != state.computed_tokens:
            state.computed_tokens = computed
            self._drop_passed(state)
        if state.needs_loads:
            if self._metadata_waits.still_waits(state.request_id) and not self._times.idle.spend_on(
                partial(self._metadata_waits.wait, state.request_id)
            ):
                return False
            self._metadata_waits.collect(state)
        if state.phase is Phase.RESOLVED:
            if not self._is_stale(state):
                return True
            state.phase = Phase.UNKNOWN
        if state.phase is Phase.UNKNOWN:
            lookup = self._look_up(state)
            if lookup is not Lookup.STARTED:
                return lookup is Lookup.SKIPPED and self._may_run_without_media(state)
        if state.phase is Phase.FETCHING and not self._item_source.settle(state):
            return False
        if not (self._may_run_without_media(state) and self._may_encode(state)):
            return False
        if not self._was_evicted(state):
            return True
        state.phase = Phase.UNKNOWN
        return self._may_pass(state, computed)

    def _is_stale(self, state: RequestState) -> bool:
        """Whether a request that could pass has to look its items up again first."""
        # vLLM had no free blocks for it, and others may have encoded the item meanwhile.
        has_expired = self._claims.intent_expired(state)
        was_evicted = state.evictions != self._engine_cache.evictions
        return has_expired or state.needs_loads or was_evicted

    def _may_encode(self, state: RequestState) -> bool:
        """Whether missing items may be encoded here now. False while another engine encodes
        them."""
        if state.unclaimed:
            state.held_at = None
            if self._times.first_sights.spend_on(partial(self._claims.request, state)):
                state.phase = Phase.CLAIMING
        elif state.phase is Phase.RESOLVED:
            self._claims.release_unneeded(state)
        if state.phase is not Phase.CLAIMING:
            return True
        if self._times.idle.is_over and self._claims.still_waits(state):
            return False
        self._times.idle.spend_on(partial(self._claims.wait, state))
        decision = self._times.first_sights.spend_on(partial(self._claims.check, state))
        if decision is ClaimDecision.WAIT:
            return False
        state.phase = Phase.RESOLVED
        if decision is ClaimDecision.REFETCH:
            state.phase = Phase.UNKNOWN
            return self._may_pass(state, state.computed_tokens)
        return True

    def _was_evicted(self, state: RequestState) -> bool:
        """Whether vLLM's cache evicted, while the request waited, an item that the request relies
        on."""
        return state.evictions != self._engine_cache.evictions and any(
            not self._item_source.holds(state, item.identifier)
            for item in state.needed(self._engine_cache)
        )

    def _may_run_without_media(self, state: RequestState) -> bool:
        """A request without media of its own may pass only while all its needed items are
        pinned."""
        if not state.needs_loads:
            return True
        needed = state.needed(self._engine_cache, include_absent=True)
        items = [item for item in needed if item.payload is ItemPayload.METADATA]
        why = _permanent_failure(state, items)
        if why is None:
            if self._promise_all(items):
                self._metadata_waits.end_wait(state.request_id)
                return True
            lacking = [item for item in items if not self._is_resident(item)]
            why = self._metadata_waits.check(state, lacking)
        if why is not None and state.request_id not in self._unavailable:
            self._unavailable[state.request_id] = why
            self._counters.add(f"unavailable:{why.reason}")
        return False

    def _promise_all(self, items: list[RequestItem]) -> bool:
        if not self._pins.promise_all({item.identifier: item.num_embeds for item in items}):
            return False
        for item in items:
            # Holds for this pass even if the node dies meanwhile: vLLM would encode an item without
            # media.
            self._pass_cache.set_available(item.identifier)
        return True

    def _is_resident(self, item: RequestItem) -> bool:
        pin = self._pins.get(item.identifier)
        return pin is not None and not self._pins.misfit_reason(
            pin, item.num_embeds, any_float=True
        )

    def _look_up(self, state: RequestState) -> Lookup:
        state.evictions = self._engine_cache.evictions
        if not state.is_republish_checked:
            state.is_republish_checked = True
            if self._republishing is not None:
                self._republishing.check(state)
        needed = state.needed(self._engine_cache)
        if needed:
            return self._item_source.look_up(state, needed)
        state.phase = Phase.RESOLVED
        return Lookup.STARTED

    def end_pass(self, *, is_idle: bool) -> None:
        self._variants.current = None
        self._times.begin_pass(is_idle=is_idle)

    def take_unavailable_requests(self) -> dict[str, Unavailable]:
        """Requests whose items are available neither here nor elsewhere; vLLM fails them."""
        taken, self._unavailable = self._unavailable, {}
        return taken

    def allocated(self, request_id: str, identifier: str, end: int) -> None:
        """vLLM's own cache holds the item for this request until token `end` is computed."""
        state = self._states.get(request_id)
        if state is not None:
            state.allocated[identifier] = end

    def missing_items(self, request_id: str) -> list[RequestItem]:
        """The items of this request that no node has and that may be encoded here."""
        state = self._states.get(request_id)
        return [i for i in state.items if i.identifier in state.absent] if state else []

    def encode_begun(self, identifier: str, request_ids: set[str]) -> None:
        """The item, which these requests missed, will be in vLLM's cache and then stored."""
        for request_id in request_ids & self._states.keys():
            self._states[request_id].absent.discard(identifier)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._unavailable.pop(request_id, None)
        self._metadata_waits.forget(request_id)
        self._claims.forget(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self._variants.remove(state.variants)
            self._drop_all(state)

    def _drop_all(self, state: RequestState) -> None:
        for identifier in state.wanted:
            self._item_source.drop(identifier, state.request_id)
        state.wanted.clear()

    def _drop_passed(self, state: RequestState) -> None:
        passed = [key for key, item in state.wanted.items() if item.end <= state.computed_tokens]
        for identifier in passed:
            self._item_source.drop(identifier, state.request_id)
            del state.wanted[identifier]

    def _skipped(self, reason: str) -> None:
        self._counters.add(f"skipped:{reason}")


def _permanent_failure(state: RequestState, items: list[RequestItem]) -> Unavailable | None:
    """Why waiting for these items is useless. The request carries only their metadata."""
    if state.computed_tokens < state.unavailable_end:
        return NOT_SHAREABLE
    return AMBIGUOUS if any(len(state.variants[item.identifier]) > 1 for item in items) else None
