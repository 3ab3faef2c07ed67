"""vLLM before 0.23, which has no gate: an item that is not available when vLLM asks is encoded.

These versions never hold a request back, so every wait happens inside a lookup, on vLLM's scheduler
thread. A lookup waits for items on this host, and for others as long as `first_sight_seconds` and
`sync_fetch_seconds` allow in one scheduling pass. This module finds and pins items; `EcScheduler`
keeps what is promised. What the versions call:

    0.11 to 0.14    `has_caches(request)` in every step of every request, decoding included
    0.15 to 0.22    `has_cache_item(identifier)`, for an item about to be scheduled; no request
    before 0.18     no call for items that are encoded: they are read from the step's output
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.ec.items import Pin
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.watch import RequestState
from connectors.identifiers import Adapters
from connectors.pass_time import PassTime
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import PrefetchHandle

LOCAL_SECONDS = 0.02
"""How long a pass may wait until the node has pinned items that the local index lists. An item
takes a hundredth of that, unless the node is frozen."""
LOOKUP_INTERVAL_SECONDS = 0.1
"""Pause between two lookups of one item at the node. vLLM asks in every pass for an item that it
cannot allocate yet."""
# vLLM's own hashes (blake3, sha256, sha512). Without the request, any other identifier may contain
# a counter or an adapter's prefix, or may be a client's name for content of another size.
_CONTENT_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
_HOLDER = "vLLM without a gate"
"""Stands for the request's id: the version does not name the request, and the pin ends with the
pass."""


@dataclass(slots=True, eq=False)
class ItemLookup:
    """The lookup of one item, as long as vLLM asks for it in each pass."""

    started_at: float
    handle: "PrefetchHandle | None" = None
    """The prefetch; None on a pure producer, which fetches nothing."""
    in_pass: bool = True
    """Whether vLLM asked for the item in this pass."""
    is_pinned: bool = False
    """Whether the pin table owns the pin, and so releases it."""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """The attributes of a request that `EcScheduler.item_allocated` reads."""

    request_id: str
    mm_features: list[Any]
    lora_request: Any


class EcWithoutGate:
    """See the module. Used only on vLLM's scheduler thread. Never raises for a fault of the node,
    of Redis or of a peer."""

    def __init__(
        self,
        scheduler: EcScheduler,
        buffer: "LookupBuffer",
        settings: ConnectorSettings,
        shape: EngineShape,
        *,
        metadata_fields: Callable[[str], set[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._buffer = buffer
        self._is_consumer = shape.is_consumer
        self._metadata_fields = metadata_fields
        self._adapters = Adapters(encode=shape.adapters_encode)
        self._clock = clock
        self._pass_time = PassTime(
            max(settings.first_sight_seconds, settings.sync_fetch_seconds), clock
        )
        self._local_time = PassTime(LOCAL_SECONDS, clock)
        self._lookups: dict[str, ItemLookup] = {}
        self._states: dict[str, RequestState] = {}
        self._requests: dict[str, EncodedRequest] = {}
        self._reported: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        """Requests and items that are tracked."""
        return len(self._states) + len(self._requests) + len(self._lookups)

    # -- calls by vLLM -------------------------------------------------------------------------

    def has_caches(self, request: Any) -> list[bool]:
        """For each item of the request, whether it can be loaded in this pass."""
        features = request.mm_features
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = RequestState(request.request_id)
        if state.feature_count != len(features):
            state.read_items(request, self._metadata_fields, self._adapters, self._skipped)
        computed = request.num_computed_tokens
        if computed >= state.items_end:
            return [False] * len(features)  # decoding: vLLM does not read the answer
        engine_cache = self._scheduler.engine_cache
        needed = {
            item.identifier: item.num_embeds
            for item in state.items
            if item.end > computed and item.identifier not in engine_cache and not item.key.part
        }
        self._find(needed)
        self._scheduler.variants.current = state.variants
        return [self._is_loadable(feature.identifier, needed) for feature in features]

    def _is_loadable(self, identifier: str, needed: Mapping[str, int]) -> bool:
        return identifier in needed and self._scheduler.has_cache_item(identifier)

    def look_up(self, identifier: str) -> None:
        """Look the item up, so that `EcScheduler.has_cache_item` can answer."""
        if _CONTENT_HASH.fullmatch(identifier):
            self._find({identifier: None})

    def _find(self, wanted: Mapping[str, int | None]) -> None:
        """Look up new items. The value is the number of rows that the engine expects, if known."""
        fresh = []
        for identifier in wanted:
            lookup = self._lookups.get(identifier)
            if lookup is None:
                fresh.append(identifier)
            else:
                lookup.in_pass = True
                self._pin(identifier, lookup, wanted[identifier])
        if not fresh:
            return
        if self._is_consumer:
            self._fetch(fresh, wanted)
        else:
            self._locate(fresh)

    def _fetch(self, identifiers: list[str], wanted: Mapping[str, int | None]) -> None:
        listed = self._buffer.has_caches(_keys(identifiers), timeout=0.0)
        here = [key for key, is_here in zip(identifiers, listed, strict=True) if is_here]
        elsewhere = [key for key, is_here in zip(identifiers, listed, strict=True) if not is_here]
        self._prefetch(here, self._local_time)
        self._prefetch(elsewhere, self._pass_time)
        for identifier in identifiers:
            lookup = self._lookups.get(identifier)
            # No lookup: the pass had no time left for it.
            why = (
                self._pin(identifier, lookup, wanted[identifier]) if lookup else MissReason.TIMEOUT
            )
            if why is not None:
                self._scheduler.counters.add(f"miss:{why}")

    def _prefetch(self, identifiers: list[str], pass_time: PassTime) -> None:
        """Prefetch, where the pass has time left for it."""
        if not identifiers or pass_time.is_over:
            return
        keys = _keys(identifiers)
        handles = pass_time.spend_on(lambda seconds: self._buffer.prefetch(keys, timeout=seconds))
        now = self._clock()
        for identifier, handle in zip(identifiers, handles, strict=True):
            self._lookups[identifier] = ItemLookup(now, handle)

    def _pin(self, identifier: str, lookup: ItemLookup, rows: int | None) -> MissReason | None:
        """Pin what has arrived, or return the reason why there is no pin."""
        handle, pins = lookup.handle, self._scheduler.pins
        if lookup.is_pinned or handle is None:
            return None
        if handle.state is PrefetchState.PENDING:
            return MissReason.TIMEOUT
        if handle.order is None:
            return handle.reason or MissReason.ABSENT
        nbytes = handle.order.nbytes
        pin = Pin(identifier, handle, nbytes, {_HOLDER})
        if reason := pins.misfit_reason(pin, rows):
            return reason
        if not pins.has_space(nbytes):
            return MissReason.OVER_BUDGET
        pins.add(pin)
        lookup.is_pinned = True
        return None

    def _locate(self, identifiers: list[str]) -> None:
        """A pure producer only needs to know what is stored already."""
        started, keys = self._clock(), _keys(identifiers)
        found = self._pass_time.spend_on(
            lambda seconds: self._buffer.has_caches(keys, timeout=seconds)
        )
        for identifier, is_stored in zip(identifiers, found, strict=True):
            self._lookups[identifier] = ItemLookup(started)
            if is_stored:
                self._scheduler.stored_items.add(identifier, _HOLDER)

    # -- reports by vLLM -----------------------------------------------------------------------

    def allocated(self, request_id: str, index: int) -> None:
        """vLLM reported this item itself. Before 0.18 it does so for loads only."""
        self._reported.add((request_id, index))

    def end_pass(self, scheduler_output: Any) -> None:
        """Report items of this step that vLLM did not report. Called before
        `EcScheduler.build_metadata`."""
        for new in scheduler_output.scheduled_new_reqs:
            request = EncodedRequest(new.req_id, new.mm_features, new.lora_request)
            if request.mm_features:
                self._requests[new.req_id] = request
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            for index in indices:
                known = self._requests.get(request_id)
                if known is not None and (request_id, index) not in self._reported:
                    self._scheduler.item_allocated(known, index, is_hit=False)
        self._reported.clear()
        self._forget(scheduler_output.finished_req_ids)
        self._pass_time.begin_pass()
        self._local_time.begin_pass()

    def _forget(self, finished: Iterable[str]) -> None:
        for request_id in finished:
            self._states.pop(request_id, None)
            self._requests.pop(request_id, None)
        now = self._clock()
        for identifier, lookup in list(self._lookups.items()):
            if not lookup.in_pass or self._is_finished(identifier, lookup, now):
                del self._lookups[identifier]
                self._release(identifier, lookup)
            lookup.in_pass = False

    def _is_finished(self, identifier: str, lookup: ItemLookup, now: float) -> bool:
        """Whether the next question needs a new lookup: the item was used, lost, or not
        available."""
        if lookup.is_pinned:
            pin = self._scheduler.pins.get(identifier)
            return pin is None or not self._scheduler.pins.is_resident(pin)
        is_late = lookup.handle is not None and lookup.handle.state is PrefetchState.PENDING
        return not is_late and now >= lookup.started_at + LOOKUP_INTERVAL_SECONDS

    def _release(self, identifier: str, lookup: ItemLookup) -> None:
        self._scheduler.stored_items.drop(identifier, _HOLDER)
        if lookup.is_pinned:
            self._scheduler.pins.drop(identifier, _HOLDER)
        elif lookup.handle is not None:
            self._buffer.release(lookup.handle)

    def close(self) -> None:
        """The engine shuts down: release prefetches in flight. `EcScheduler` releases pins.
        Idempotent."""
        for lookup in self._lookups.values():
            if lookup.handle is not None and not lookup.is_pinned:
                self._buffer.release(lookup.handle)
        self._lookups.clear()

    def _skipped(self, reason: str) -> None:
        self._scheduler.counters.add(f"skipped:{reason}")


def _keys(identifiers: Iterable[str]) -> list[TensorKey]:
    return [TensorKey(identifier) for identifier in identifiers]
