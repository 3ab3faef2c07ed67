"""The engine's claims: who encodes what nobody has, and who waits for it.

One set of claims per request, asked for before it may encode; a claim belongs to the engine, so
its other requests share it. It is an intent, which lapses by itself, until vLLM makes room for the
item; from then on it is renewed by scheduling passes, while the step that encodes has not surely
run, and by nothing else: an engine that hangs loses it. Runs in vLLM's scheduler thread, and never
waits there for longer than it is told to.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from connectors.counters import Counters
from connectors.ec.claimant import Claimant
from connectors.ec.encodes import EngineEncodes
from connectors.ec.engine_cache import EngineCache
from connectors.ec.intents import Intents
from connectors.ec.shape import EngineShape
from connectors.ec.watch import RequestWatch, WatchedItem
from connectors.identifiers import Carried
from connectors.settings import ConnectorSettings
from lookup_buffer.key import TensorKey
from lookup_buffer.protocol.messages import ClaimOutcome
from lookup_buffer.times import INTENT_SECONDS

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer
    from lookup_buffer.client.handles import PrefetchHandle

WAIT_PER_ENCODE = 5.0
"""Whoever waits for another's encode waits so many times as long as one took here."""
WAIT_SECONDS_MIN = 10.0
WAIT_SECONDS_MAX = 60.0
LATE_MAX = 2
"""A request whose grants vLLM sees too late so often in succession encodes all the same."""
LATE_SECONDS = 0.02
"""What one pass waits for answers where grants came too late: the pass before took much longer, and
so will the next, by which the next grant would be as late."""
ASK_AGAIN_MAX = 2
"""What is said to be stored, and did not come when asked for again so often, is encoded here."""


class Verdict(enum.Enum):
    """What a request that would encode is to do."""

    WAIT = enum.auto()
    """Another is at it, or the node has not answered yet."""
    ENCODE = enum.auto()
    ASK = enum.auto()
    """It was published: ask for the bytes again."""


class EcClaims:
    """See the module. For engines that produce; others encode for themselves alone."""

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
        self.enabled = shape.is_producer and settings.claim_wait_seconds != 0
        self._claimants: dict[str, Claimant] = {}
        self._intents = Intents()
        self._late_seconds_left = LATE_SECONDS
        self._encodes_begun = 0
        self._encodes = EngineEncodes(
            shape.steps_in_flight, settings.claim_lease_seconds / 3, clock=clock
        )

    def __len__(self) -> int:
        """Requests and encodes that are kept track of."""
        return len(self._claimants) + len(self._encodes) + len(self._intents)

    @property
    def wait_seconds(self) -> float:
        """How long a request that asks first now may wait for others."""
        if self._settings.claim_wait_seconds is not None:
            return self._settings.claim_wait_seconds
        longest = WAIT_PER_ENCODE * self._encodes.longest_seconds
        return min(max(longest, WAIT_SECONDS_MIN), WAIT_SECONDS_MAX)

    # -- a request before it may encode

    def prefetch(
        self, watch: RequestWatch, items: Sequence[WatchedItem], timeout: float
    ) -> "list[PrefetchHandle]":
        """Ask for the bytes of `items`, waiting at most `timeout` seconds; for a request seen for
        the first time also for the right to encode them: one wait instead of two where nobody has
        them, which of a new image is so."""
        keys = {item.identifier: item.key for item in items}
        ordered = [*keys.values()]
        if not self._may_claim_ahead(watch, items, ordered):
            return self._buffer.prefetch(ordered, timeout=timeout)
        now = self._clock()
        claimant = self._claimants[watch.request_id] = Claimant(now + self.wait_seconds)
        self._begin(watch, claimant, keys, now)
        handles, claimant.asked = self._buffer.prefetch_and_claim(
            ordered, wait_seconds=claimant.until - now, timeout=timeout
        )
        return handles

    def _may_claim_ahead(
        self, watch: RequestWatch, items: Sequence[WatchedItem], keys: Sequence[TensorKey]
    ) -> bool:
        if not self.enabled or watch.is_running or watch.request_id in self._claimants:
            return False
        can_encode = all(item.carried is Carried.MEDIA for item in items)
        return can_encode and not any(self._buffer.has_caches(keys, timeout=0.0))

    def ask(self, watch: RequestWatch, timeout: float) -> bool:
        """Ask for the right to encode what the request lacks, waiting at most `timeout` seconds.

        False: there is nothing to ask for, or the request does not wait any more. Who runs holds
        blocks that others may need, so it never waits.
        """
        found = {identifier for identifier in watch.unclaimed if identifier in self._engine_cache}
        missing = watch.unclaimed - found
        watch.unclaimed.clear()
        watch.absent -= found
        if not (missing and self.enabled) or watch.is_running:
            return False
        now = self._clock()
        claimant = self._claimants.get(watch.request_id)
        if claimant is None:
            claimant = self._claimants[watch.request_id] = Claimant(now + self.wait_seconds)
        elif claimant.asked is not None and claimant.keys.keys() == missing:
            claimant.answer_by = now + self._settings.fetch_wait_seconds
            claimant.asked.hear(timeout)
            return True
        else:
            if claimant.lapses_at < math.inf:  # all that it is to encode is one set
                missing.update(claimant.keys)
            self._give_up(watch.request_id, claimant)
        if now >= claimant.until:
            return False
        keys = {item.identifier: item.key for item in watch.items if item.identifier in missing}
        self._begin(watch, claimant, keys, now)
        self._claim(claimant, now, timeout)
        return True

    def _begin(
        self, watch: RequestWatch, claimant: Claimant, keys: dict[str, TensorKey], now: float
    ) -> None:
        claimant.keys = keys
        claimant.encodes_seen = self._encodes_begun
        self._intents.want(keys, watch.request_id)
        claimant.ungranted_at = now
        claimant.answer_by = now + self._settings.fetch_wait_seconds

    def _claim(self, claimant: Claimant, now: float, timeout: float) -> None:
        claimant.asked = self._buffer.claim_all(
            sorted(claimant.keys.values(), key=lambda key: key.text),
            wait_seconds=claimant.until - now,
            timeout=timeout,
        )

    def wait(self, watch: RequestWatch, timeout: float) -> bool:
        """Whether the answer for a request that asked is there, at the latest after `timeout`."""
        asked = self._claimants[watch.request_id].asked
        if asked is not None and asked.state is ClaimOutcome.PENDING and timeout > 0:
            asked.wait(timeout)
        return asked is None or asked.state is not ClaimOutcome.PENDING

    def still_waits(self, watch: RequestWatch) -> bool:
        """Whether `look` would only say WAIT; a fraction of its cost, for every pass."""
        claimant = self._claimants[watch.request_id]
        return claimant.still_waits(self._clock(), self._encodes_begun)

    def look(self, watch: RequestWatch, timeout: float) -> Verdict:
        """How it stands for a request that asked; waits at most `timeout` seconds where what was
        granted is no longer sure, because vLLM was long busy with others, and is asked for anew."""
        claimant = self._claimants[watch.request_id]
        now = self._clock()
        if claimant.asked is not None and claimant.asked.state is ClaimOutcome.GRANTED:
            is_late = now >= claimant.ungranted_at + INTENT_SECONDS
            if is_late and claimant.late < LATE_MAX and now < claimant.until:
                claimant.late += 1
                self._counters.add("claim:late")
                self._begin(watch, claimant, claimant.keys, now)
                self._claim(claimant, now, max(timeout, self._late_seconds_left))
                self._late_seconds_left -= self._clock() - now
        verdict = self._look(watch.request_id, claimant)
        if verdict is Verdict.ASK:
            watch.absent.difference_update(claimant.keys)
        return verdict

    def ask_who(self, request_id: str, keys: dict[str, TensorKey], *, until: float) -> Claimant:
        """Ask who is at work on the items, for a request that cannot encode them: the set of
        claims waits for whoever has one, and is GRANTED, to be given up at once, where nobody
        has. To be given to `end_question`."""
        claimant = Claimant(until, keys)
        self._intents.want(keys, request_id)
        self._claim(claimant, self._clock(), 0.0)
        return claimant

    def end_question(self, request_id: str, claimant: Claimant) -> None:
        self._give_up(request_id, claimant)

    def spare(self, watch: RequestWatch) -> None:
        """The request lacks nothing: what was asked for ahead is not needed."""
        claimant = self._claimants.get(watch.request_id)
        if claimant is not None and claimant.asked is not None:
            self._give_up(watch.request_id, claimant)

    def lapsed(self, watch: RequestWatch) -> bool:
        """Whether what was granted to a request that waits may be another's by now, so that it has
        to ask for its items again; said once a grant."""
        claimant = self._claimants.get(watch.request_id)
        if claimant is None or claimant.lapses_at == math.inf or watch.is_running:
            return False
        now = self._clock()
        if now < claimant.lapses_at:
            return False
        claimant.lapses_at = math.inf
        if now >= claimant.until:
            return False
        watch.absent.difference_update(claimant.keys)
        return True

    def _look(self, request_id: str, claimant: Claimant) -> Verdict:
        asked = claimant.asked
        if asked is None:
            return Verdict.ENCODE
        if asked.holder and not claimant.waited:
            claimant.waited = True
            self._counters.add("claim:waited")
        if claimant.encodes_seen != self._encodes_begun:
            claimant.encodes_seen = self._encodes_begun
            if asked.state in (ClaimOutcome.PENDING, ClaimOutcome.GRANTED):
                for identifier, key in claimant.keys.items():
                    if not self._intents.is_wanted(identifier, request_id):
                        # Another request of this engine has come to encode it meanwhile.
                        return self._stored(request_id, claimant, key.text)
        match asked.state:
            case ClaimOutcome.PENDING:
                bound = claimant.until if asked.holder else claimant.answer_by
                now = self._clock()
                if now < min(bound, claimant.until):
                    claimant.ungranted_at = now
                    return Verdict.WAIT
                return self._refused(
                    request_id, claimant, ClaimOutcome.HELD if asked.holder else "no_answer"
                )
            case ClaimOutcome.GRANTED:
                return self._granted(request_id, claimant)
            case ClaimOutcome.STORED:
                return self._stored(request_id, claimant, asked.key)
            case ClaimOutcome.HELD:
                return self._refused(request_id, claimant, ClaimOutcome.HELD)
            case ClaimOutcome.FAILED:
                return self._refused(request_id, claimant, "failed")

    def _granted(self, request_id: str, claimant: Claimant) -> Verdict:
        self._counters.add(f"claim:{ClaimOutcome.GRANTED}")
        if self._clock() < claimant.ungranted_at + INTENT_SECONDS:
            claimant.late = 0
        claimant.asked = None
        claimant.lapses_at = claimant.ungranted_at + INTENT_SECONDS
        self._intents.grant(claimant.keys)
        return Verdict.ENCODE

    def _stored(self, request_id: str, claimant: Claimant, key: str) -> Verdict:
        times = claimant.asked_again[key] = claimant.asked_again.get(key, 0) + 1
        if times > ASK_AGAIN_MAX:
            return self._refused(request_id, claimant, "out_of_reach")
        self._counters.add("claim:published")
        self._give_up(request_id, claimant)
        return Verdict.ASK

    def _refused(self, request_id: str, claimant: Claimant, reason: str) -> Verdict:
        """Encode all the same, without the claims."""
        self._counters.add(f"claim:{reason}")
        if reason == ClaimOutcome.HELD:
            claimant.despite.update(claimant.keys)
        self._give_up(request_id, claimant)
        return Verdict.ENCODE

    def forget(self, request_id: str) -> None:
        """The request finished or was aborted: what it did not come to encode is free."""
        claimant = self._claimants.pop(request_id, None)
        if claimant is not None:
            self._give_up(request_id, claimant)

    def _give_up(self, request_id: str, claimant: Claimant) -> None:
        """Wait no longer, and give back what no other request of this engine wants."""
        asked, claimant.asked = claimant.asked, None
        claimant.lapses_at = math.inf
        # What was granted a moment ago may not have been looked at yet.
        unseen = asked is not None and asked.state in (ClaimOutcome.PENDING, ClaimOutcome.GRANTED)
        if unseen:
            self._intents.may_be_granted(claimant.keys)
        free = []
        for identifier in claimant.keys:
            self._encodes.withdraw(request_id, identifier)
            is_free = self._intents.give_up(identifier, request_id)
            if is_free and identifier not in self._encodes:
                free.append(claimant.keys[identifier])
        if free or unseen:
            self._buffer.unclaim(free, asked)

    # -- encodes

    def encodes(self, request_id: str, identifier: str, key: TensorKey) -> set[str]:
        """vLLM made room for the item, and this engine will encode and publish it.

        Returns the requests that meant to encode it, too, and now need not.
        """
        if not self.enabled:
            return set()
        claimant = self._claimants.get(request_id)
        if claimant is not None and identifier in claimant.despite:
            self._counters.add("encode:despite_holder")
        self._encodes.begin(identifier, key)
        self._encodes_begun += 1
        others = self._intents.encode(identifier)
        if claimant is not None:
            self._pledge(request_id, claimant)
        return others

    def _pledge(self, request_id: str, claimant: Claimant) -> None:
        """The request runs now and will not wait any more: its other items come in later steps, by
        which its intents would long have lapsed."""
        for identifier, key in claimant.keys.items():
            if identifier in self._intents and self._intents.is_wanted(identifier, request_id):
                self._encodes.pledge(request_id, identifier, key)

    def not_run(self, identifier: str) -> None:
        """vLLM took the step's encode of the item back: it preempted the request in that pass."""
        key = self._encodes.drop(identifier)
        if key is not None:
            self._buffer.unclaim([key])

    def end_pass(self, step: int, *, dispatched: bool) -> None:
        """A step was built; `dispatched`: with all that was allocated and not dispatched before."""
        self._late_seconds_left = LATE_SECONDS
        due = self._encodes.end_pass(step, dispatched=dispatched)
        if due:
            self._buffer.encoding(due, lease_seconds=self._settings.claim_lease_seconds)
