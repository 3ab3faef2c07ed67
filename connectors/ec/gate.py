"""The gate: which requests may be scheduled now.

Runs in vLLM's scheduler thread, which schedules nothing else meanwhile: a request seen before costs
a dictionary look-up, and all first sights of one scheduling pass share a budget of a millisecond.
Decides per request, by what its `supply` has of its items and by who may encode the rest; what vLLM
is then promised and told is `EcScheduler`'s.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from connectors.counters import Counters, PassTimes
from connectors.ec.answers import Answers
from connectors.ec.claims import EcClaims, Verdict
from connectors.ec.deliveries import EcDeliveries, Unavailable
from connectors.ec.engine_cache import EngineCache
from connectors.ec.meanings import Meanings
from connectors.ec.pins import PinTable
from connectors.ec.republishing import EcRepublishing
from connectors.ec.shape import EngineShape
from connectors.ec.supply import Asked, ItemSupply
from connectors.ec.watch import Phase, RequestWatch, WatchedItem
from connectors.identifiers import Adapters, Carried
from connectors.settings import ConnectorSettings
from lookup_buffer.errors import MissReason

NOT_SHAREABLE = Unavailable(
    MissReason.NOT_SHAREABLE, "what it names stays on the instance that encoded it"
)
AMBIGUOUS = Unavailable(MissReason.SHAPE, "it gives one name to items of several sizes")


class EcGate:
    """One watch per request with multimodal items, from first sight until it finished.

    Args:
        supply: has the items that are not encoded here.
        claims: who encodes the rest.
        deliveries: what requests without media of their own wait for.
        republishing: what vLLM's own cache holds and nobody else; None on engines that store
            nothing.
        pins: of what requests without media of their own depend on.
        engine_cache: what vLLM itself holds; kept by `EcScheduler`.
        meanings: of the requests that are watched; kept here.
        answers: of this pass.
        times: what a pass may wait; shared with the supply.
        metadata_fields: see `carried_by`.
        adapters: what LoRA adapters contain; shared with `EcScheduler`.
    """

    def __init__(
        self,
        supply: ItemSupply,
        claims: EcClaims,
        deliveries: EcDeliveries,
        republishing: EcRepublishing | None,
        *,
        pins: PinTable,
        engine_cache: EngineCache,
        meanings: Meanings,
        answers: Answers,
        times: PassTimes,
        settings: ConnectorSettings,
        shape: EngineShape,
        metadata_fields: Callable[[str], set[str]],
        adapters: Adapters,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supply = supply
        self._claims = claims
        self._deliveries = deliveries
        self._republishing = republishing
        self._pins = pins
        self._engine_cache = engine_cache
        self._meanings = meanings
        self._answers = answers
        self._times = times
        self._wait_seconds = settings.fetch_wait_seconds
        self._is_consumer = shape.is_consumer
        self._metadata_fields = metadata_fields
        self._adapters = adapters
        self._counters = counters
        self._clock = clock
        self._watches: dict[str, RequestWatch] = {}
        self._unavailable: dict[str, Unavailable] = {}

    def __len__(self) -> int:
        """Requests watched."""
        return len(self._watches)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now. False: ask again in the next pass."""
        watch = self._watches.get(request.request_id)
        if watch is None:
            watch = self._watches[request.request_id] = RequestWatch(request.request_id)
        is_read = len(request.mm_features) == watch.feature_count
        if is_read and num_computed_tokens >= watch.items_end:
            # Decoding: every step of every running request comes here, and needs nothing.
            watch.computed_tokens = num_computed_tokens
            if watch.wanted:
                self._drop_all(watch)
            return True
        if not is_read:
            self._look_at(watch, request)
        self._meanings.asking = watch.meant
        watch.follow(request, num_computed_tokens)
        may_pass = self._may_pass(watch, num_computed_tokens)
        if may_pass:
            watch.held_at = None
        return may_pass

    def _look_at(self, watch: RequestWatch, request: Any) -> None:
        self._meanings.remove(watch.meant)
        watch.look_at(request, self._metadata_fields, self._adapters, self._skipped)
        self._meanings.add(watch.meant)
        if not self._is_consumer:  # it encodes what it can and serves nobody
            watch.metadata_only, watch.hopeless_end = False, 0

    def _may_pass(self, watch: RequestWatch, computed: int) -> bool:
        if computed != watch.computed_tokens:
            watch.computed_tokens = computed
            self._drop_passed(watch)
        if watch.is_dependent:
            if self._deliveries.still_waits(watch.request_id):
                return False
            self._deliveries.take_in(watch)
        if watch.phase is Phase.ANSWERED:
            if not self._is_out_of_date(watch):
                return True
            watch.phase = Phase.UNASKED
        if watch.phase is Phase.UNASKED:
            asked = self._ask(watch)
            if asked is not Asked.YES:
                return asked is Asked.WITHOUT and self._may_go_without(watch)
        if watch.phase is Phase.WAITING and not self._supply.settle(watch):
            return False
        if not (self._may_go_without(watch) and self._may_encode(watch)):
            return False
        if not self._was_evicted(watch):
            return True
        watch.phase = Phase.UNASKED
        return self._may_pass(watch, computed)

    def _is_out_of_date(self, watch: RequestWatch) -> bool:
        """Whether a request that might pass has to ask for its items again before."""
        lapsed = self._claims.lapsed(watch)  # no room in vLLM: others may have encoded it
        return lapsed or watch.is_dependent or watch.evictions != self._engine_cache.evictions

    def _may_encode(self, watch: RequestWatch) -> bool:
        """Whether what nobody has may be encoded here now; False: another is at it."""
        if watch.unclaimed:
            watch.held_at = None
            if self._times.first_sights.spend_on(partial(self._claims.ask, watch)):
                watch.phase = Phase.CLAIMING
        elif watch.phase is Phase.ANSWERED:
            self._claims.spare(watch)
        if watch.phase is not Phase.CLAIMING:
            return True
        if self._times.idle.is_over and self._claims.still_waits(watch):
            return False
        self._times.idle.spend_on(partial(self._claims.wait, watch))
        verdict = self._times.first_sights.spend_on(partial(self._claims.look, watch))
        if verdict is Verdict.WAIT:
            return False
        watch.phase = Phase.ANSWERED
        if verdict is Verdict.ASK:
            watch.phase = Phase.UNASKED
            return self._may_pass(watch, watch.computed_tokens)
        return True

    def _was_evicted(self, watch: RequestWatch) -> bool:
        """Whether vLLM's cache lost, while the request waited, what it relied on there."""
        return watch.evictions != self._engine_cache.evictions and any(
            not self._supply.holds(watch, item.identifier)
            for item in watch.needed(self._engine_cache)
        )

    def _may_go_without(self, watch: RequestWatch) -> bool:
        """A request without media of its own may pass only while everything it needs is pinned."""
        if not watch.is_dependent:
            return True
        needed = watch.needed(self._engine_cache, anew=True)
        items = [item for item in needed if item.carried is Carried.METADATA]
        why = _hopeless(watch, items)
        if why is None:
            if self._promise_all(items):
                self._deliveries.over(watch.request_id)
                return True
            lacking = [item for item in items if not self._is_here(item)]
            why = self._deliveries.look(watch, lacking)
        if why is not None and watch.request_id not in self._unavailable:
            self._unavailable[watch.request_id] = why
            self._counters.add(f"unavailable:{why.reason}")
        return False

    def _promise_all(self, items: list[WatchedItem]) -> bool:
        if not self._pins.promise_all({item.identifier: item.num_embeds for item in items}):
            return False
        for item in items:
            # Kept in this pass even if the node dies in it: vLLM would encode what it lacks.
            self._answers.promised(item.identifier)
        return True

    def _is_here(self, item: WatchedItem) -> bool:
        pin = self._pins.get(item.identifier)
        return pin is not None and not self._pins.why_unfit(pin, item.num_embeds, any_float=True)

    def _ask(self, watch: RequestWatch) -> Asked:
        watch.evictions = self._engine_cache.evictions
        if not watch.is_checked:
            watch.is_checked = True
            if self._republishing is not None:
                self._republishing.look(watch)
        needed = watch.needed(self._engine_cache)
        if needed:
            return self._supply.ask(watch, needed)
        watch.phase = Phase.ANSWERED
        return Asked.YES

    def end_pass(self, *, is_idle: bool) -> None:
        self._meanings.asking = None
        self._times.begin_pass(is_idle=is_idle)

    def take_unavailable_requests(self) -> dict[str, Unavailable]:
        """Requests that can get their items neither here nor elsewhere; vLLM fails them."""
        taken, self._unavailable = self._unavailable, {}
        return taken

    def allocated(self, request_id: str, identifier: str, end: int) -> None:
        """vLLM's own cache holds the item for this request until `end` is computed."""
        watch = self._watches.get(request_id)
        if watch is not None:
            watch.allocated[identifier] = end

    def lacked(self, request_id: str) -> list[WatchedItem]:
        """What this request may encode here, for nobody has it."""
        watch = self._watches.get(request_id)
        return [i for i in watch.items if i.identifier in watch.absent] if watch else []

    def found(self, identifier: str, request_ids: set[str]) -> None:
        """What these requests were told that nobody has will be in vLLM's cache, then stored."""
        for request_id in request_ids & self._watches.keys():
            self._watches[request_id].absent.discard(identifier)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._unavailable.pop(request_id, None)
        self._deliveries.forget(request_id)
        self._claims.forget(request_id)
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            self._meanings.remove(watch.meant)
            self._drop_all(watch)

    def _drop_all(self, watch: RequestWatch) -> None:
        for identifier in watch.wanted:
            self._supply.drop(identifier, watch.request_id)
        watch.wanted.clear()

    def _drop_passed(self, watch: RequestWatch) -> None:
        passed = [key for key, item in watch.wanted.items() if item.end <= watch.computed_tokens]
        for identifier in passed:
            self._supply.drop(identifier, watch.request_id)
            del watch.wanted[identifier]

    def _skipped(self, reason: str) -> None:
        self._counters.add(f"skipped:{reason}")


def _hopeless(watch: RequestWatch, items: list[WatchedItem]) -> Unavailable | None:
    """Why it is no use to wait for these items, of which the request has the metadata alone."""
    if watch.computed_tokens < watch.hopeless_end:
        return NOT_SHAREABLE
    return AMBIGUOUS if any(len(watch.meant[item.identifier]) > 1 for item in items) else None
