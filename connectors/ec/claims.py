"""The engine's claims: which request encodes an item that no node has, and which requests wait.

A request claims all its missing items as one set before it may encode them (`RequestClaims`, kept
until the request finishes). The claim belongs to the engine, so its other requests share it. Until
vLLM allocates the item, the claim is an intent (`Intents`). It is released when no request needs it
any more, and expires after `INTENT_SECONDS`. From the allocation on, scheduling passes renew the
claim until the encoding step has certainly run (`EngineEncodes`). Nothing else renews it, so an
engine that hangs loses its claims.

`EcGate`, `EcScheduler` and `MetadataWaits` call this on vLLM's scheduler thread. No call waits
longer than its timeout.
"""

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connectors.counters import Counters
from connectors.ec.items import EngineCache
from connectors.ec.shape import EngineShape
from connectors.ec.watch import RequestItem, RequestState
from connectors.identifiers import ItemPayload
from connectors.settings import ConnectorSettings
from lookup_buffer.client.handles import ClaimHandle
from lookup_buffer.errors import MissReason
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome
from lookup_buffer.times import INTENT_SECONDS

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import PrefetchHandle


@dataclass(slots=True, eq=False)
class RequestClaims:
    """Claims that one request asked for as one set."""

    deadline: float
    """End of the request's single budget for waiting on others. Set at the first claim, never
    extended."""
    keys: dict[str, TensorKey] = field(default_factory=dict)
    """Keys of the claimed items, by identifier."""
    handle: ClaimHandle | None = None
    """The set of claims at the node; None once its outcome was processed."""
    not_granted_at: float = 0.0
    """Time of the last check that found no grant. A grant seen later is not older than this."""
    late_grants: int = 0
    """Successive grants that were seen only after the intent may have passed to another engine."""
    answer_deadline: float = 0.0
    """A node that has not reported a holder by then is not waited for."""
    encodes_seen: int = 0
    """Number of encodes that the engine had begun at the last check."""
    waited: bool = False
    """Whether the wait for another engine was counted."""
    expires_at: float = math.inf
    """When the granted intents expire."""
    held_elsewhere: set[str] = field(default_factory=set)
    """Items that another engine was still encoding when the wait ended."""
    refetches: dict[str, int] = field(default_factory=dict)
    """By the text of a key: how often the item was reported as stored."""

    def still_waits(self, now: float, encodes_begun: int) -> bool:
        """Whether another engine still holds a claim, as already seen, and nothing has changed
        since."""
        handle = self.handle
        if handle is None or handle.state is not ClaimOutcome.PENDING or not handle.holder:
            return False
        if now >= self.deadline or not self.waited or self.encodes_seen != encodes_begun:
            return False
        self.not_granted_at = now
        return True


OBSERVATIONS = 16


@dataclass(slots=True)
class _Encode:
    key: TensorKey
    allocated_at: float
    planned_by: str = ""
    """The running request that encodes the item in a later step; "" once vLLM allocated the
    item."""
    step: int | None = None
    renewed_at: float = -math.inf


class EngineEncodes:
    """Items that vLLM allocated for an encode, or that a running request will encode.

    Args:
        steps_in_flight: how many steps vLLM may have scheduled and not finished.
        renew_seconds: how often a claim is renewed.
    """

    def __init__(
        self, steps_in_flight: int, renew_seconds: float, *, clock: Callable[[], float]
    ) -> None:
        self._steps_in_flight = steps_in_flight
        self._renew_seconds = renew_seconds
        self._clock = clock
        self._encodes: dict[str, _Encode] = {}
        self._seconds: deque[float] = deque(maxlen=OBSERVATIONS)

    def __len__(self) -> int:
        return len(self._encodes)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._encodes

    @property
    def longest_seconds(self) -> float:
        """Longest of the last `OBSERVATIONS` encodes, from allocation to the end of the step; 0
        without any."""
        return max(self._seconds, default=0.0)

    def begin(self, identifier: str, key: TensorKey) -> None:
        """vLLM allocated the item."""
        self._encodes[identifier] = _Encode(key, self._clock())

    def plan(self, request_id: str, identifier: str, key: TensorKey) -> None:
        """This running request will encode the item in a later step."""
        if identifier not in self._encodes:
            self._encodes[identifier] = _Encode(key, self._clock(), request_id)

    def cancel_plan(self, request_id: str, identifier: str) -> None:
        """The request will not encode the item."""
        encode = self._encodes.get(identifier)
        if encode is not None and encode.planned_by == request_id:
            del self._encodes[identifier]

    def drop(self, identifier: str) -> TensorKey | None:
        """The step does not encode the item. Returns its key, or None where no encode was
        tracked."""
        encode = self._encodes.pop(identifier, None)
        return None if encode is None else encode.key

    def end_pass(self, step: int, *, dispatched: bool) -> list[TensorKey]:
        """A step was built. `dispatched`: it carries all allocations that no step carried before.

        Returns the keys whose claims are due for renewal.
        """
        if not self._encodes:
            return []
        now = self._clock()
        due: list[TensorKey] = []
        for identifier, encode in list(self._encodes.items()):
            if encode.step is None:
                encode.step = step if dispatched and not encode.planned_by else None
            elif encode.step + self._steps_in_flight <= step:
                del self._encodes[identifier]
                self._seconds.append(now - encode.allocated_at)
                continue
            if now - encode.renewed_at >= self._renew_seconds:
                encode.renewed_at = now
                due.append(encode.key)
        return due


class Intents:
    """See the module."""

    def __init__(self) -> None:
        self._wanted_by: dict[str, set[str]] = {}
        """Item → requests that claimed it and have not released it."""
        self._granted: set[str] = set()
        """Items whose claim this engine holds, or may hold, and that vLLM has not allocated
        since."""

    def __len__(self) -> int:
        """Tracked items; a granted item counts twice."""
        return len(self._wanted_by) + len(self._granted)

    def __contains__(self, identifier: str) -> bool:
        """Whether this engine holds, or may hold, an intent for the item."""
        return identifier in self._granted

    def want(self, identifiers: Iterable[str], request_id: str) -> None:
        """This request claims these items."""
        for identifier in identifiers:
            self._wanted_by.setdefault(identifier, set()).add(request_id)

    def is_wanted(self, identifier: str, request_id: str) -> bool:
        """Whether this request claimed the item, and no request has begun to encode it since."""
        return request_id in self._wanted_by.get(identifier, ())

    def grant(self, identifiers: Iterable[str]) -> None:
        """This engine holds the claims."""
        self._granted.update(identifiers)

    def may_be_granted(self, identifiers: Iterable[str]) -> None:
        """This engine may hold the claims of those items that are still wanted: the outcome was not
        read."""
        self._granted.update(one for one in identifiers if one in self._wanted_by)

    def release(self, identifier: str, request_id: str) -> bool:
        """The request no longer needs the item. Returns whether the claim was granted and no other
        request needs it."""
        wanted_by = self._wanted_by.get(identifier)
        if wanted_by is None or request_id not in wanted_by:
            return False
        wanted_by.discard(request_id)
        if wanted_by:
            return False
        del self._wanted_by[identifier]
        was_granted = identifier in self._granted
        self._granted.discard(identifier)
        return was_granted

    def begin_encode(self, identifier: str) -> set[str]:
        """The item is encoded and is no longer an intent. Returns the requests that wanted it."""
        self._granted.discard(identifier)
        return self._wanted_by.pop(identifier, set())


WAIT_PER_ENCODE = 5.0
"""The wait for another engine's encode, as a multiple of the longest recent encode here."""
WAIT_SECONDS_MIN = 10.0
WAIT_SECONDS_MAX = 60.0
LATE_MAX = 2
"""After so many late grants in succession a request encodes anyway."""
LATE_SECONDS = 0.02
"""How long one pass may wait for new answers after late grants. The previous pass took much longer
than an intent lives. The next one will too, so an answer that arrives after this pass would be late
again."""
REFETCH_MAX = 2
"""An item that is reported as stored, and is still missing after so many fetches, is encoded
here."""


class ClaimDecision(enum.Enum):
    """What a request with missing items does next."""

    WAIT = enum.auto()
    """Another engine holds a claim, or the node has not answered yet."""
    ENCODE = enum.auto()
    REFETCH = enum.auto()
    """The item was published: look it up again."""


class EcClaims:
    """See the module. An engine that stores nothing (`ec_consumer`) claims as well, and so waits
    while a producer encodes; its client gives back at once what is granted."""

    def __init__(
        self,
        buffer: "LookupBuffer",
        settings: ConnectorSettings,
        shape: EngineShape,
        *,
        engine_cache: EngineCache,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._engine_cache = engine_cache
        self._counters = counters
        self._clock = clock
        self.enabled = settings.claim_wait_seconds != 0 and not settings.read_only
        self._stores = shape.is_producer
        self._claims: dict[str, RequestClaims] = {}
        self._intents = Intents()
        self._late_seconds_left = LATE_SECONDS
        self._encodes_begun = 0
        self._encodes = EngineEncodes(
            shape.steps_in_flight, settings.claim_lease_seconds / 3, clock=clock
        )

    def __len__(self) -> int:
        """Requests, encodes and intents that are tracked."""
        return len(self._claims) + len(self._encodes) + len(self._intents)

    @property
    def wait_seconds(self) -> float:
        """How long a request that claims for the first time now may wait for others, in seconds."""
        if self._settings.claim_wait_seconds is not None:
            return self._settings.claim_wait_seconds
        longest = WAIT_PER_ENCODE * self._encodes.longest_seconds
        return min(max(longest, WAIT_SECONDS_MIN), WAIT_SECONDS_MAX)

    # -- a request before it may encode

    def prefetch(
        self, state: RequestState, items: Sequence[RequestItem], timeout: float
    ) -> "list[PrefetchHandle]":
        """Prefetch `items`, and wait at most `timeout` seconds.

        For a request seen for the first time, the same call also claims the items. Where no node
        has them, as for a new image, this costs one wait instead of two.
        """
        keys = {item.identifier: item.key for item in items}
        ordered = [*keys.values()]
        if not self._may_claim_ahead(state, items, ordered):
            return self._buffer.prefetch(ordered, timeout=timeout)
        now = self._clock()
        claims = self._claims[state.request_id] = RequestClaims(now + self.wait_seconds)
        self._begin(state, claims, keys, now)
        handles, claims.handle = self._buffer.prefetch_and_claim(
            ordered, wait_seconds=claims.deadline - now, timeout=timeout, keeps=self._stores
        )
        return handles

    def _may_claim_ahead(
        self, state: RequestState, items: Sequence[RequestItem], keys: Sequence[TensorKey]
    ) -> bool:
        if not self.enabled or state.is_running or state.request_id in self._claims:
            return False
        can_encode = all(item.payload is ItemPayload.MEDIA for item in items)
        return can_encode and not any(self._buffer.has_caches(keys, timeout=0.0))

    def request(self, state: RequestState, timeout: float) -> bool:
        """Claim what the request lacks, and wait at most `timeout` seconds.

        Returns False where there is nothing to claim, or the request must not wait any more. A
        running request never waits, because it holds blocks that others may need.
        """
        found = {identifier for identifier in state.unclaimed if identifier in self._engine_cache}
        missing = state.unclaimed - found
        state.unclaimed.clear()
        state.absent -= found
        if not (missing and self.enabled) or state.is_running:
            return False
        now = self._clock()
        claims = self._claims.get(state.request_id)
        if claims is None:
            claims = self._claims[state.request_id] = RequestClaims(now + self.wait_seconds)
        elif claims.handle is not None and claims.keys.keys() == missing:
            claims.answer_deadline = now + self._settings.fetch_wait_seconds
            claims.handle.wait_for_answer(timeout)
            return True
        else:
            if claims.expires_at < math.inf:  # one set holds all that the request encodes
                missing.update(claims.keys)
            self._release(state.request_id, claims)
        if now >= claims.deadline:
            return False
        keys = {item.identifier: item.key for item in state.items if item.identifier in missing}
        self._begin(state, claims, keys, now)
        self._claim(claims, now, timeout, keeps=self._stores)
        return True

    def _begin(
        self, state: RequestState, claims: RequestClaims, keys: dict[str, TensorKey], now: float
    ) -> None:
        claims.keys = keys
        claims.encodes_seen = self._encodes_begun
        self._intents.want(keys, state.request_id)
        claims.not_granted_at = now
        claims.answer_deadline = now + self._settings.fetch_wait_seconds

    def _claim(self, claims: RequestClaims, now: float, timeout: float, *, keeps: bool) -> None:
        claims.handle = self._buffer.claim_all(
            sorted(claims.keys.values(), key=lambda key: key.text),
            wait_seconds=claims.deadline - now,
            timeout=timeout,
            keeps=keeps,
        )

    def wait(self, state: RequestState, timeout: float) -> bool:
        """Whether the claims are settled; waits at most `timeout` seconds."""
        handle = self._claims[state.request_id].handle
        if handle is not None and handle.state is ClaimOutcome.PENDING and timeout > 0:
            handle.wait(timeout)
        return handle is None or handle.state is not ClaimOutcome.PENDING

    def still_waits(self, state: RequestState) -> bool:
        """Whether `check` would return WAIT. Much cheaper, for every pass."""
        claims = self._claims[state.request_id]
        return claims.still_waits(self._clock(), self._encodes_begun)

    def check(self, state: RequestState, timeout: float) -> ClaimDecision:
        """Decide what the request does next.

        Where vLLM was busy for so long that a grant may have expired, the items are claimed again;
        this waits at most `timeout` seconds, or what the pass has left of `LATE_SECONDS`, whichever
        is longer.
        """
        claims = self._claims[state.request_id]
        now = self._clock()
        if claims.handle is not None and claims.handle.state is ClaimOutcome.GRANTED:
            is_late = self._stores and now >= claims.not_granted_at + INTENT_SECONDS
            if is_late and claims.late_grants < LATE_MAX and now < claims.deadline:
                claims.late_grants += 1
                self._counters.add("claim:late")
                self._begin(state, claims, claims.keys, now)
                self._claim(claims, now, max(timeout, self._late_seconds_left), keeps=self._stores)
                self._late_seconds_left -= self._clock() - now
        decision = self._decide(state.request_id, claims)
        if decision is ClaimDecision.REFETCH:
            state.absent.difference_update(claims.keys)
        return decision

    def query_holders(
        self, request_id: str, keys: dict[str, TensorKey], *, until: float
    ) -> RequestClaims:
        """Query the claims of these items, for a request that cannot encode them.

        The set of claims stays PENDING while another engine holds one of them. Where none does, it
        is GRANTED, and the caller has to release it. The caller passes the result to `end_query`.
        """
        claims = RequestClaims(until, keys)
        self._intents.want(keys, request_id)
        self._claim(claims, self._clock(), 0.0, keeps=True)
        return claims

    def end_query(self, request_id: str, claims: RequestClaims) -> None:
        """Release what `query_holders` claimed."""
        self._release(request_id, claims)

    def release_unneeded(self, state: RequestState) -> None:
        """Release what was claimed in advance: the request has all its items."""
        claims = self._claims.get(state.request_id)
        if claims is not None and claims.handle is not None:
            self._release(state.request_id, claims)

    def intent_expired(self, state: RequestState) -> bool:
        """Whether the request's granted intents may have passed to another engine while it waited.
        It then has to look its items up again. Returns True once for each grant."""
        claims = self._claims.get(state.request_id)
        if claims is None or claims.expires_at == math.inf or state.is_running:
            return False
        now = self._clock()
        if now < claims.expires_at:
            return False
        claims.expires_at = math.inf
        if now >= claims.deadline:
            return False
        state.absent.difference_update(claims.keys)
        return True

    def _decide(self, request_id: str, claims: RequestClaims) -> ClaimDecision:
        handle = claims.handle
        if handle is None:
            return ClaimDecision.ENCODE
        if handle.holder and not claims.waited:
            claims.waited = True
            self._counters.add("claim:waited")
        if claims.encodes_seen != self._encodes_begun:
            claims.encodes_seen = self._encodes_begun
            if handle.state in (ClaimOutcome.PENDING, ClaimOutcome.GRANTED):
                for identifier, key in claims.keys.items():
                    if not self._intents.is_wanted(identifier, request_id):
                        # Another request of this engine encodes it.
                        return self._stored(request_id, claims, key.text)
        match handle.state:
            case ClaimOutcome.PENDING:
                bound = claims.deadline if handle.holder else claims.answer_deadline
                now = self._clock()
                if now < min(bound, claims.deadline):
                    claims.not_granted_at = now
                    return ClaimDecision.WAIT
                reason = ClaimOutcome.HELD if handle.holder else MissReason.NO_ANSWER
                return self._refused(request_id, claims, reason)
            case ClaimOutcome.GRANTED:
                return self._granted(request_id, claims)
            case ClaimOutcome.STORED:
                return self._stored(request_id, claims, handle.key)
            case ClaimOutcome.HELD:
                return self._refused(request_id, claims, ClaimOutcome.HELD)
            case ClaimOutcome.FAILED:
                return self._refused(request_id, claims, "failed")

    def _granted(self, request_id: str, claims: RequestClaims) -> ClaimDecision:
        if not self._stores:  # the client has given the claims back already
            claims.handle = None
            for identifier in claims.keys:
                self._intents.release(identifier, request_id)
            return ClaimDecision.ENCODE
        self._counters.add(f"claim:{ClaimOutcome.GRANTED}")
        if self._clock() < claims.not_granted_at + INTENT_SECONDS:
            claims.late_grants = 0
        claims.handle = None
        claims.expires_at = claims.not_granted_at + INTENT_SECONDS
        self._intents.grant(claims.keys)
        return ClaimDecision.ENCODE

    def _stored(self, request_id: str, claims: RequestClaims, key: str) -> ClaimDecision:
        times = claims.refetches[key] = claims.refetches.get(key, 0) + 1
        if times > REFETCH_MAX:
            return self._refused(request_id, claims, "out_of_reach")
        self._counters.add("claim:published")
        self._release(request_id, claims)
        return ClaimDecision.REFETCH

    def _refused(self, request_id: str, claims: RequestClaims, reason: str) -> ClaimDecision:
        """Encode without the claims."""
        self._counters.add(f"claim:{reason}")
        if reason == ClaimOutcome.HELD:
            claims.held_elsewhere.update(claims.keys)
        self._release(request_id, claims)
        return ClaimDecision.ENCODE

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted: release what it did not encode."""
        claims = self._claims.pop(request_id, None)
        if claims is not None:
            self._release(request_id, claims)

    def _release(self, request_id: str, claims: RequestClaims) -> None:
        """Stop waiting, and release what no other request of this engine needs."""
        handle, claims.handle = claims.handle, None
        claims.expires_at = math.inf
        # A grant may have arrived since the last check.
        unseen = handle is not None and handle.state in (ClaimOutcome.PENDING, ClaimOutcome.GRANTED)
        if unseen:
            self._intents.may_be_granted(claims.keys)
        free = []
        for identifier in claims.keys:
            self._encodes.cancel_plan(request_id, identifier)
            is_free = self._intents.release(identifier, request_id)
            if is_free and identifier not in self._encodes:
                free.append(claims.keys[identifier])
        if free or unseen:
            self._buffer.unclaim(free, handle)

    # -- encodes

    def encode_begins(self, request_id: str, identifier: str, key: TensorKey) -> set[str]:
        """vLLM allocated the item, and this engine will encode and publish it.

        Returns the requests that claimed the item as well and now need not encode it.
        """
        if not self.enabled:
            return set()
        claims = self._claims.get(request_id)
        if claims is not None and identifier in claims.held_elsewhere:
            self._counters.add("encode:despite_holder")
        self._encodes.begin(identifier, key)
        self._encodes_begun += 1
        others = self._intents.begin_encode(identifier)
        if claims is not None:
            self._plan_remaining(request_id, claims)
        return others

    def _plan_remaining(self, request_id: str, claims: RequestClaims) -> None:
        """Renew the claims of the request's other items too. It runs now and does not wait any
        more, and later steps encode those items; their intents would expire before."""
        for identifier, key in claims.keys.items():
            if identifier in self._intents and self._intents.is_wanted(identifier, request_id):
                self._encodes.plan(request_id, identifier, key)

    def encode_cancelled(self, identifier: str) -> None:
        """vLLM preempted the request in the same pass, so the step does not encode the item."""
        key = self._encodes.drop(identifier)
        if key is not None:
            self._buffer.unclaim([key])

    def end_pass(self, step: int, *, dispatched: bool) -> None:
        """A step was built. `dispatched`: it carries all allocations that no step carried
        before."""
        self._late_seconds_left = LATE_SECONDS
        due = self._encodes.end_pass(step, dispatched=dispatched)
        if due:
            self._buffer.encoding(due, lease_seconds=self._settings.claim_lease_seconds)
