"""The gate: which requests may be scheduled now, and what is fetched for those that wait.

Runs in vLLM's scheduler thread, which schedules nothing else meanwhile: a request seen before costs
a dictionary look-up, and all first sights of one scheduling pass share a budget of a millisecond.
Decides per request; what vLLM is then promised and told is `EcScheduler`'s.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from connectors.adapters import Adapters
from connectors.counters import Counters, logger
from connectors.ec_claims import EcClaims, Verdict
from connectors.ec_engine_cache import EngineCache
from connectors.ec_idle import IdleTime
from connectors.ec_meanings import Answers, Meanings
from connectors.ec_pins import Pin, PinTable
from connectors.ec_shape import EngineShape
from connectors.ec_watch import Phase, RequestWatch, WatchedItem
from connectors.media import Carried
from connectors.settings import ConnectorSettings
from lookup_buffer.prefetched import PrefetchState

if TYPE_CHECKING:
    from lookup_buffer.client import LookupBuffer

# vLLM polls an idle engine's waiting request every 1.4 ms; a node need not be asked as often.
ASK_AGAIN_SECONDS = 0.01


class EcGate:
    """One watch per request with multimodal items, from first sight until it finished.

    Args:
        pins, claims: what was prefetched, who encodes the rest; shared with `EcScheduler`.
        engine_cache: what vLLM itself holds; kept by `EcScheduler`.
        answers: what `has_cache_item` said in this pass; a "no" that is no longer true is removed.
        metadata_fields: see `carried_by`.
        adapters: what LoRA adapters contain; shared with `EcScheduler`.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        settings: ConnectorSettings,
        shape: EngineShape,
        *,
        pins: PinTable,
        claims: EcClaims,
        engine_cache: EngineCache,
        answers: Answers,
        metadata_fields: Callable[[str], set[str]],
        adapters: Adapters,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._is_consumer = shape.is_consumer
        self._pins = pins
        self._claims = claims
        self._engine_cache = engine_cache
        self._answers = answers
        self._metadata_fields = metadata_fields
        self._adapters = adapters
        self._counters = counters
        self._clock = clock
        self._watches: dict[str, RequestWatch] = {}
        self.meanings = Meanings()
        self._unavailable: set[str] = set()
        self._seconds_left = settings.first_sight_seconds
        self._idle = IdleTime(settings.idle_wait_seconds, clock)
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
        is_read = len(request.mm_features) == watch.feature_count
        if is_read and num_computed_tokens >= watch.items_end:
            # Decoding: every step of every running request comes here, and needs nothing.
            watch.computed_tokens = num_computed_tokens
            if watch.wanted:
                self._drop_all(watch)
            return True
        if not is_read:
            self._look_at(watch, request)
        self.meanings.asking = watch.meant
        watch.follow(request, num_computed_tokens)
        may_pass = self._may_pass(watch, num_computed_tokens)
        if may_pass:
            watch.held_at = None
        return may_pass

    def _look_at(self, watch: RequestWatch, request: Any) -> None:
        self.meanings.remove(watch.meant)
        watch.look_at(request, self._metadata_fields, self._adapters, self._skipped)
        self.meanings.add(watch.meant)
        if not self._is_consumer:  # it encodes what it can and serves nobody
            watch.metadata_only, watch.hopeless_end = False, 0

    def _may_pass(self, watch: RequestWatch, computed: int) -> bool:
        if computed != watch.computed_tokens:
            watch.computed_tokens = computed
            self._drop_passed(watch)
        if watch.phase is Phase.ANSWERED:
            if not self._is_out_of_date(watch):
                return True
            watch.phase = Phase.UNASKED
        if watch.phase is Phase.UNASKED and not self._ask(watch):
            return self._is_consumer and not watch.awaits_room and self._may_go_without(watch)
        if watch.phase is Phase.WAITING and not self._settle(watch):
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
            started, watch.held_at = self._clock(), None
            if self._claims.ask(watch, max(self._seconds_left, 0.0)):
                watch.phase = Phase.CLAIMING
            self._seconds_left -= self._clock() - started
        elif watch.phase is Phase.ANSWERED:
            self._claims.spare(watch)
        if watch.phase is not Phase.CLAIMING:
            return True
        if self._idle.is_over and self._claims.still_waits(watch):
            return False
        self._idle.spend_on(partial(self._claims.wait, watch))
        started = self._clock()
        verdict = self._claims.look(watch, max(self._seconds_left, 0.0))
        self._seconds_left -= self._clock() - started
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
            not self._is_held(watch, item.identifier) for item in watch.needed(self._engine_cache)
        )

    def _may_go_without(self, watch: RequestWatch) -> bool:
        """A request without media of its own may pass only while everything it needs is pinned."""
        if not watch.is_dependent:
            return True
        if watch.computed_tokens >= watch.hopeless_end:
            needed = watch.needed(self._engine_cache, anew=True)
            rows = {i.identifier: i.num_embeds for i in needed if i.carried is Carried.METADATA}
            if all(len(watch.meant[name]) == 1 for name in rows) and self._pins.promise_all(rows):
                # Kept in this pass even if the node dies in it: vLLM would encode what it lacks.
                self._answers.update(((name, self.meanings.of(name)), True) for name in rows)
                return True
            now = self._clock()
            if watch.hold(now, self._settings.fetch_wait_seconds):
                # Its producer may have answered before the bytes were published.
                if now >= watch.ask_again_at:
                    watch.absent.clear()
                    watch.unclaimed.clear()
                    watch.phase = Phase.UNASKED
                    watch.ask_again_at = now + ASK_AGAIN_SECONDS
                return False
        if watch.request_id not in self._unavailable:
            self._unavailable.add(watch.request_id)
            self._counters.add("unavailable")
        return False

    def _is_held(self, watch: RequestWatch, identifier: str) -> bool:
        if not self._is_consumer:
            return identifier in watch.wanted
        pin = self._pins.get(identifier)
        return pin is not None and watch.request_id in pin.wanted_by

    def _ask(self, watch: RequestWatch) -> bool:
        """Ask for all that is needed, or for nothing. False: not asked, try in a later pass."""
        watch.evictions = self._engine_cache.evictions
        needed = watch.needed(self._engine_cache)
        if not needed:
            watch.phase = Phase.ANSWERED
            return True
        if not self._is_consumer:
            return self._locate(watch, needed)
        for item in needed:
            self._pins.discard_other(item.identifier, item.key)
        new = [item for item in needed if not self._pins.hopeful(item.identifier)]
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
            wait_seconds = self._settings.fetch_wait_seconds
            if sum(sizes) > self._pins.budget_bytes:  # it never fits: do not look again
                watch.absent.update(item.identifier for item in items)
                wait_seconds = 0.0
            watch.lack_room(now, wait_seconds)
            if not (watch.awaits_room or watch.over_budget):
                watch.over_budget = True
                self._counters.add("over_budget")
            return False
        watch.find_room(now)
        handles = self._claims.prefetch(watch, items, max(self._seconds_left, 0.0))
        self._seconds_left -= self._clock() - now
        for item, nbytes, handle in zip(items, sizes, handles, strict=True):
            self._pins.add(Pin(item.identifier, handle, nbytes))
        return True

    def _settle(self, watch: RequestWatch) -> bool:
        """Look at the answers. False: some are on their way and the request has time left."""
        pending: list[str] = []
        missing: dict[str, Pin] = {}
        for identifier, item in watch.wanted.items():
            pin = self._pins.get(identifier)
            if pin is None:
                continue  # it went with another request's step: vLLM's own cache has it
            if not self._idle.spend_on(pin.wait):
                pending.append(identifier)
            elif self._pins.fits(pin, item.num_embeds):
                # An earlier request of this pass may have been told no, when it was still so.
                asked = (identifier, self.meanings.of(identifier))
                if self._answers.get(asked) is False:
                    del self._answers[asked]
            else:
                missing[identifier] = pin
        if pending and watch.hold(self._clock(), self._settings.fetch_wait_seconds):
            return False
        for identifier in pending:
            self._missed(watch, identifier, "timeout")
        for identifier, pin in missing.items():
            reason = self._pins.why_missing(pin)
            # A store that is down has nothing to say of claims either.
            if pin.handle.state is PrefetchState.MISSING and reason != "store_down":
                watch.lacks(watch.wanted[identifier])
            self._missed(watch, identifier, reason)
        watch.phase = Phase.ANSWERED
        return True

    def _missed(self, watch: RequestWatch, identifier: str, reason: str) -> None:
        self._counters.add(f"miss:{reason}")
        logger.debug("request %s: item %s missed: %s", watch.request_id, identifier, reason)
        watch.absent.add(identifier)
        del watch.wanted[identifier]
        self._pins.drop(identifier, watch.request_id)

    def _locate(self, watch: RequestWatch, needed: list[WatchedItem]) -> bool:
        """A pure producer only wants to know what is stored already."""
        needed = [item for item in needed if item.identifier not in watch.wanted]
        started = self._clock()
        wait_seconds = self._settings.fetch_wait_seconds
        if self._seconds_left <= 0 and watch.hold(started, wait_seconds):
            return False
        keys = [item.key for item in needed]
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
                watch.lacks(item)
        watch.phase = Phase.ANSWERED
        return True

    def end_pass(self, *, is_idle: bool) -> None:
        self.meanings.asking = None
        self._seconds_left = self._settings.first_sight_seconds
        self._idle.begin_pass(is_idle=is_idle)

    def take_unavailable_requests(self) -> set[str]:
        """Requests that can get their items neither here nor elsewhere; vLLM fails them."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def allocated(self, request_id: str, identifier: str, end: int) -> None:
        """vLLM's own cache holds the item for this request until `end` is computed."""
        watch = self._watches.get(request_id)
        if watch is not None:
            watch.allocated[identifier] = end

    def found(self, identifier: str, request_ids: set[str]) -> None:
        """What these requests were told that nobody has will be in vLLM's cache, then stored."""
        for request_id in request_ids & self._watches.keys():
            self._watches[request_id].absent.discard(identifier)

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted."""
        self._unavailable.discard(request_id)
        self._claims.forget(request_id)
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            self.meanings.remove(watch.meant)
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
        askers = self.located.get(identifier, set())
        askers.discard(watch.request_id)
        if not askers:
            self.located.pop(identifier, None)

    def _skipped(self, reason: str) -> None:
        self._counters.add(f"skipped:{reason}")
