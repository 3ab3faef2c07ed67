"""The gate: which requests may be scheduled now, and what is fetched for those that wait.

Runs in vLLM's scheduler thread, which schedules nothing else meanwhile: a request seen before costs
a dictionary look-up, and all first sights of one scheduling pass share a budget of a millisecond.
Decides per request; what vLLM is then promised and told is `EcScheduler`'s.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.counters import Counters
from connectors.ec_engine_cache import EngineCache
from connectors.ec_pins import Pin, PinTable
from connectors.ec_watch import Phase, RequestWatch, WatchedItem
from connectors.media import Carried
from connectors.settings import ConnectorSettings
from lookup_buffer.key import TensorKey
from lookup_buffer.prefetched import PrefetchState

if TYPE_CHECKING:
    from lookup_buffer.client import LookupBuffer
    from lookup_buffer.prefetched import Prefetched

# vLLM polls an idle engine's waiting request every 1.4 ms; a node need not be asked as often.
ASK_AGAIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the scheduler side has to know about its engine."""

    is_producer: bool
    is_consumer: bool
    steps_in_flight: int
    """Steps that vLLM may have scheduled and not finished (`max_concurrent_batches`)."""
    embed_bytes: int
    """Size of one row of an encoder output, a first guess; learned from what arrives."""


class EcGate:
    """One watch per request with multimodal items, from first sight until it finished.

    Args:
        pins: where prefetched items are kept; shared with `EcScheduler`.
        engine_cache: what vLLM itself holds; kept by `EcScheduler`.
        answers: what `has_cache_item` said in this pass; a "no" that is no longer true is removed.
        metadata_fields: see `carried_by`.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        settings: ConnectorSettings,
        shape: EngineShape,
        *,
        pins: PinTable,
        engine_cache: EngineCache,
        answers: dict[str, bool],
        metadata_fields: Callable[[str], set[str]],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._is_consumer = shape.is_consumer
        self._pins = pins
        self._engine_cache = engine_cache
        self._answers = answers
        self._metadata_fields = metadata_fields
        self._counters = counters
        self._clock = clock
        self._watches: dict[str, RequestWatch] = {}
        self._unavailable: set[str] = set()
        self._seconds_left = settings.first_sight_seconds
        self.embed_bytes = shape.embed_bytes
        self.located: dict[str, set[str]] = {}
        """On a pure producer: items that are stored already, with the requests that asked."""

    def __len__(self) -> int:
        """Requests watched."""
        return len(self._watches)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now. False: ask again in the next pass."""
        watch = self._watches.get(request.request_id)
        if watch is None:
            watch = self._watches[request.request_id] = RequestWatch(request.request_id)
        elif (
            num_computed_tokens >= watch.items_end
            and len(request.mm_features) == watch.feature_count
        ):
            # Decoding: every step of every running request comes here.
            watch.computed_tokens = num_computed_tokens
            if watch.wanted:
                self._drop_all(watch)
            return True
        if len(request.mm_features) != watch.feature_count:
            watch.look_at(request, self._metadata_fields, self._skipped)
            if not self._is_consumer:  # it encodes what it can and serves nobody
                watch.metadata_only, watch.hopeless_end = False, 0
        preemptions = getattr(request, "num_preemptions", 0)
        if num_computed_tokens < watch.computed_tokens or preemptions != watch.preemptions:
            watch.preemptions = preemptions
            watch.rewind()
        return self._may_pass(watch, num_computed_tokens)

    def _may_pass(self, watch: RequestWatch, computed: int) -> bool:
        if computed != watch.computed_tokens:
            watch.computed_tokens = computed
            self._drop_passed(watch)
        if watch.phase is Phase.ANSWERED:
            if watch.evictions == self._engine_cache.evictions and not watch.is_dependent:
                return True
            watch.phase = Phase.UNASKED
        if watch.phase is Phase.UNASKED and not self._ask(watch):
            return self._is_consumer and self._may_go_without(watch)
        if watch.phase is Phase.WAITING and not self._settle(watch):
            return False
        return self._may_go_without(watch)

    def _may_go_without(self, watch: RequestWatch) -> bool:
        """A request without media of its own may pass only while everything it needs is pinned."""
        if not watch.is_dependent:
            return True
        if watch.computed_tokens >= watch.hopeless_end:
            needed = [i for i in self._needed(watch, anew=True) if i.carried is Carried.METADATA]
            if all(self._is_pinned(item) for item in needed):
                return True
            now = self._clock()
            if now < self._deadline(watch, now):
                # Its producer may have answered before the bytes were published.
                if now >= watch.ask_again_at:
                    watch.absent.clear()
                    watch.phase = Phase.UNASKED
                    watch.ask_again_at = now + ASK_AGAIN_SECONDS
                return False
        if watch.request_id not in self._unavailable:
            self._unavailable.add(watch.request_id)
            self._counters.add("unavailable")
        return False

    def _is_pinned(self, item: WatchedItem) -> bool:
        pin = self._pins.get(item.identifier)
        return pin is not None and self._pins.fits(pin)

    def _needed(self, watch: RequestWatch, *, anew: bool = False) -> list[WatchedItem]:
        """Items that still need bytes; `anew`: those that were asked for in vain as well."""
        return [
            item
            for item in watch.items
            if item.end > watch.computed_tokens
            and (anew or item.identifier not in watch.absent)
            and item.identifier not in watch.allocated
            # vLLM's cache may evict before it is used: good enough where media are at hand.
            and (item.identifier not in self._engine_cache or item.carried is Carried.METADATA)
        ]

    def _ask(self, watch: RequestWatch) -> bool:
        """Ask for all that is needed, or for nothing. False: not asked, try in a later pass."""
        watch.evictions = self._engine_cache.evictions
        needed = self._needed(watch)
        if not needed:
            watch.phase = Phase.ANSWERED
            return True
        if not self._is_consumer:
            return self._locate(watch, needed)
        new = [item for item in needed if self._pins.get(item.identifier) is None]
        if new and not self._prefetch(watch, new):
            return False
        for item in needed:
            pin = self._pins.get(item.identifier)
            assert pin is not None, "prefetched above"
            pin.wanted_by.add(watch.request_id)
            watch.wanted[item.identifier] = item
        watch.phase = Phase.WAITING
        return True

    def _prefetch(self, watch: RequestWatch, items: list[WatchedItem]) -> bool:
        now = self._clock()
        if now < watch.ask_again_at:
            return False
        sizes = [item.num_embeds * self.embed_bytes for item in items]
        if not self._pins.has_room(sum(sizes)):
            if not watch.over_budget:
                watch.over_budget = True
                self._counters.add("over_budget")
            if sum(sizes) > self._pins.budget_bytes:  # it never fits: do not look again
                watch.absent.update(item.identifier for item in items)
            return False
        keys = [TensorKey(item.identifier) for item in items]
        handles = self._buffer.prefetch(keys, timeout=max(self._seconds_left, 0.0))
        self._seconds_left -= self._clock() - now
        for item, nbytes, handle in zip(items, sizes, handles, strict=True):
            self._pins.add(Pin(item.identifier, handle, item.num_embeds, nbytes))
        return True

    def _settle(self, watch: RequestWatch) -> bool:
        """Look at the answers. False: some are on their way and the request has time left."""
        pending: list[str] = []
        absent: list[str] = []
        for identifier in watch.wanted:
            pin = self._pins.get(identifier)
            if pin is None:
                continue  # it went with another request's step: vLLM's own cache has it
            if pin.handle.state is PrefetchState.PENDING:
                pending.append(identifier)
            elif self._pins.fits(pin):
                # An earlier request of this pass may have been told no, when it was still so.
                if self._answers.get(identifier) is False:
                    del self._answers[identifier]
            else:
                self._counters.add(f"miss:{self._why_missing(pin.handle)}")
                absent.append(identifier)
        if pending:
            now = self._clock()
            if now < self._deadline(watch, now):
                return False
            self._counters.add("miss:timeout", len(pending))
            absent += pending
        for identifier in absent:
            watch.absent.add(identifier)
            del watch.wanted[identifier]
            self._pins.drop(identifier, watch.request_id)
        watch.phase = Phase.ANSWERED
        return True

    def _deadline(self, watch: RequestWatch, now: float) -> float:
        if watch.deadline is None:
            watch.deadline = now + self._settings.fetch_wait_seconds
        return watch.deadline

    @staticmethod
    def _why_missing(handle: "Prefetched") -> str:
        return "shape" if handle.state is PrefetchState.RESIDENT else handle.reason or "absent"

    def _locate(self, watch: RequestWatch, needed: list[WatchedItem]) -> bool:
        """A pure producer only wants to know what is stored already."""
        needed = [item for item in needed if item.identifier not in watch.wanted]
        started = self._clock()
        if self._seconds_left <= 0 and started < self._deadline(watch, started):
            return False
        keys = [TensorKey(item.identifier) for item in needed]
        if not keys:
            watch.phase = Phase.ANSWERED
            return True
        found = self._buffer.has_caches(keys, timeout=max(self._seconds_left, 0.0))
        self._seconds_left -= self._clock() - started
        for item, is_stored in zip(needed, found, strict=True):
            if is_stored:
                self.located.setdefault(item.identifier, set()).add(watch.request_id)
                watch.wanted[item.identifier] = item
            else:
                watch.absent.add(item.identifier)
        watch.phase = Phase.ANSWERED
        return True

    # -- the end of a pass, of a request, of the engine ----------------------------------------

    def end_pass(self) -> None:
        self._seconds_left = self._settings.first_sight_seconds

    def take_unavailable_requests(self) -> set[str]:
        """Requests that can get their items neither here nor elsewhere; vLLM fails them."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def allocated(self, request_id: str, identifier: str) -> None:
        """vLLM's own cache holds the item for this request until it is freed."""
        watch = self._watches.get(request_id)
        if watch is not None:
            watch.allocated.add(identifier)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._unavailable.discard(request_id)
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            self._drop_all(watch)

    def _drop_all(self, watch: RequestWatch) -> None:
        for identifier in watch.wanted:
            self._drop(watch, identifier)
        watch.wanted.clear()

    def _drop_passed(self, watch: RequestWatch) -> None:
        passed = [key for key, item in watch.wanted.items() if item.end <= watch.computed_tokens]
        for identifier in passed:
            self._drop(watch, identifier)
            del watch.wanted[identifier]

    def _drop(self, watch: RequestWatch, identifier: str) -> None:
        self._pins.drop(identifier, watch.request_id)
        askers = self.located.get(identifier)
        if askers is not None:
            askers.discard(watch.request_id)
            if not askers:
                del self.located[identifier]

    def _skipped(self, reason: str) -> None:
        self._counters.add(f"skipped:{reason}")
