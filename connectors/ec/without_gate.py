"""Hosts without the gate (vLLM before 0.23): what is not here when they ask is encoded at once.

They never hold a request back, so all that may be waited for is waited for inside of the question,
in vLLM's scheduler thread: for what this host holds, and beyond it for as long as two settings
allow in one scheduling pass. Finds and pins; what vLLM is promised and told stays `EcScheduler`'s.

    0.11 to 0.14    `has_caches(request)` in every step of every request, decoding included
    0.15 to 0.22    `has_cache_item(identifier)`, of an item about to be scheduled; no request
    before 0.18     nothing is said of items that are encoded: read from the step's output
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connectors.counters import PassTime
from connectors.ec.pins import Pin
from connectors.ec.scheduler import EcScheduler
from connectors.ec.shape import EngineShape
from connectors.ec.watch import RequestWatch
from connectors.identifiers import Adapters
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason
from lookup_buffer.key import TensorKey

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import PrefetchHandle

LOCAL_SECONDS = 0.02
"""So long a pass may wait until the node has pinned what the board lists. An item takes a hundredth
of that, unless the node is frozen."""
ASK_AGAIN_SECONDS = 0.1
"""A host asks in every pass for an item that it has no room for; a node is not asked as often."""
# vLLM's own hashes (blake3, sha256, sha512). Without the request nothing else can be told from a
# counter, an adapter's prefix, or a client's name for content of another size.
_CONTENT_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
_ASKER = "host without gate"
"""In place of the request's id: who wants a pin is not known, and ends with the pass."""


@dataclass(slots=True, eq=False)
class Question:
    """One item that the host asked for, while it goes on asking."""

    asked_at: float
    handle: "PrefetchHandle | None" = None
    """What was asked of the node; None on a pure producer, which fetches nothing."""
    in_pass: bool = True
    """Whether the host asked for it in this pass."""
    is_pinned: bool = False
    """Whether what came is in the pin table, which gives it back from then on."""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """As much of a request as `EcScheduler.item_allocated` reads."""

    request_id: str
    mm_features: list[Any]
    lora_request: Any


class EcWithoutGate:
    """See the module. Called by vLLM's scheduler thread only; never raises for a fault of the node,
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
        self._questions: dict[str, Question] = {}
        self._watches: dict[str, RequestWatch] = {}
        self._requests: dict[str, EncodedRequest] = {}
        self._told: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        """Requests and items remembered."""
        return len(self._watches) + len(self._requests) + len(self._questions)

    # -- what the host asks --------------------------------------------------------------------

    def has_caches(self, request: Any) -> list[bool]:
        """For each item of the request, whether it can be loaded in this pass."""
        features = request.mm_features
        watch = self._watches.get(request.request_id)
        if watch is None:
            watch = self._watches[request.request_id] = RequestWatch(request.request_id)
        if watch.feature_count != len(features):
            watch.look_at(request, self._metadata_fields, self._adapters, self._skipped)
        computed = request.num_computed_tokens
        if computed >= watch.items_end:
            return [False] * len(features)  # decoding: the host does not look at the answer
        engine_cache = self._scheduler.engine_cache
        needed = {
            item.identifier: item.num_embeds
            for item in watch.items
            if item.end > computed and item.identifier not in engine_cache and not item.key.part
        }
        self._find(needed)
        self._scheduler.meanings.asking = watch.meant
        return [self._is_loadable(feature.identifier, needed) for feature in features]

    def _is_loadable(self, identifier: str, needed: Mapping[str, int]) -> bool:
        return identifier in needed and self._scheduler.has_cache_item(identifier)

    def look_for(self, identifier: str) -> None:
        """Make sure that `EcScheduler.has_cache_item` knows what can be known of this item."""
        if _CONTENT_HASH.fullmatch(identifier):
            self._find({identifier: None})

    def _find(self, wanted: Mapping[str, int | None]) -> None:
        """Ask for what was not asked for already; value: rows that the engine expects, if known."""
        fresh = []
        for identifier in wanted:
            question = self._questions.get(identifier)
            if question is None:
                fresh.append(identifier)
            else:
                question.in_pass = True
                self._hold(identifier, question, wanted[identifier])
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
            question = self._questions.get(identifier)
            # Without a question, the pass had no time left for it.
            why = (
                self._hold(identifier, question, wanted[identifier])
                if question
                else MissReason.TIMEOUT
            )
            if why is not None:
                self._scheduler.counters.add(f"miss:{why}")

    def _prefetch(self, identifiers: list[str], pass_time: PassTime) -> None:
        """Ask the node, where the pass has time left for it."""
        if not identifiers or pass_time.is_over:
            return
        keys = _keys(identifiers)
        handles = pass_time.spend_on(lambda seconds: self._buffer.prefetch(keys, timeout=seconds))
        now = self._clock()
        for identifier, handle in zip(identifiers, handles, strict=True):
            self._questions[identifier] = Question(now, handle)

    def _hold(self, identifier: str, question: Question, rows: int | None) -> MissReason | None:
        """Make a pin of what has arrived; or the reason why there is none."""
        handle, pins = question.handle, self._scheduler.pins
        if question.is_pinned or handle is None:
            return None
        if handle.state is PrefetchState.PENDING:
            return MissReason.TIMEOUT
        if handle.order is None:
            return handle.reason or MissReason.ABSENT
        nbytes = handle.order.nbytes
        pin = Pin(identifier, handle, nbytes, {_ASKER})
        if reason := pins.why_unfit(pin, rows):
            return reason
        if not pins.has_room(nbytes):
            return MissReason.OVER_BUDGET
        pins.add(pin)
        question.is_pinned = True
        return None

    def _locate(self, identifiers: list[str]) -> None:
        """A pure producer only wants to know what is stored already."""
        started, keys = self._clock(), _keys(identifiers)
        found = self._pass_time.spend_on(
            lambda seconds: self._buffer.has_caches(keys, timeout=seconds)
        )
        for identifier, is_stored in zip(identifiers, found, strict=True):
            self._questions[identifier] = Question(started)
            if is_stored:
                self._scheduler.located.add(identifier, _ASKER)

    # -- what the host did ---------------------------------------------------------------------

    def allocated(self, request_id: str, index: int) -> None:
        """The host said so itself; before 0.18 it does for loads only."""
        self._told.add((request_id, index))

    def end_pass(self, scheduler_output: Any) -> None:
        """Before `EcScheduler.build_metadata`: items of this step that nobody told us of."""
        for new in scheduler_output.scheduled_new_reqs:
            request = EncodedRequest(new.req_id, new.mm_features, new.lora_request)
            if request.mm_features:
                self._requests[new.req_id] = request
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            for index in indices:
                known = self._requests.get(request_id)
                if known is not None and (request_id, index) not in self._told:
                    self._scheduler.item_allocated(known, index, is_hit=False)
        self._told.clear()
        self._forget(scheduler_output.finished_req_ids)
        self._pass_time.begin_pass()
        self._local_time.begin_pass()

    def _forget(self, finished: Iterable[str]) -> None:
        for request_id in finished:
            self._watches.pop(request_id, None)
            self._requests.pop(request_id, None)
        now = self._clock()
        for identifier, question in list(self._questions.items()):
            if not question.in_pass or self._is_settled(identifier, question, now):
                del self._questions[identifier]
                self._let_go(identifier, question)
            question.in_pass = False

    def _is_settled(self, identifier: str, question: Question, now: float) -> bool:
        """Whether to ask anew when the host does: it was used, is lost, or was not to be had."""
        if question.is_pinned:
            pin = self._scheduler.pins.get(identifier)
            return pin is None or not self._scheduler.pins.is_here(pin)
        is_late = question.handle is not None and question.handle.state is PrefetchState.PENDING
        return not is_late and now >= question.asked_at + ASK_AGAIN_SECONDS

    def _let_go(self, identifier: str, question: Question) -> None:
        self._scheduler.located.drop(identifier, _ASKER)
        if question.is_pinned:
            self._scheduler.pins.drop(identifier, _ASKER)
        elif question.handle is not None:
            self._buffer.release(question.handle)

    def close(self) -> None:
        """The engine ends: what is on its way belongs to nobody. Pins are `EcScheduler`'s to give
        back. Idempotent."""
        for question in self._questions.values():
            if question.handle is not None and not question.is_pinned:
                self._buffer.release(question.handle)
        self._questions.clear()

    def _skipped(self, reason: str) -> None:
        self._scheduler.counters.add(f"skipped:{reason}")


def _keys(identifiers: Iterable[str]) -> list[TensorKey]:
    return [TensorKey(identifier) for identifier in identifiers]
