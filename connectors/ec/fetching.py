"""The supply of an engine that loads: the node brings items to this host and pins them.

vLLM schedules nothing else meanwhile, so all first sights of a pass share a budget, and what is on
its way is looked at again in later passes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from connectors.counters import Counters, PassTime, PassTimes, logger
from connectors.ec.answers import Answers
from connectors.ec.claims import EcClaims
from connectors.ec.meanings import Meaning
from connectors.ec.pins import Pin, PinTable
from connectors.ec.supply import Asked, ItemSupply
from connectors.ec.watch import Phase, RequestWatch, WatchedItem
from connectors.identifiers import Carried
from lookup_buffer.client.handles import PrefetchState
from lookup_buffer.errors import MissReason

if TYPE_CHECKING:
    from lookup_buffer.client.buffer import LookupBuffer

LOOK_AGAIN_SECONDS = 0.25
"""So long a pass may wait, in all, for items that vLLM lost. One on this host takes a thousandth of
that, an encode from a tenth up to many times as much."""
LOOK_AGAIN_PAUSE_SECONDS = 10.0
"""A node that does not answer within that is not waited for again so soon."""


class EcFetching(ItemSupply):
    """Items are asked for by `EcClaims`, which may ask for the right to encode them as well.

    Args:
        pins: what was asked for; shared with `EcScheduler`.
        answers: a "no" that is no longer true is taken back.
        wait_seconds: how long one request may wait for bytes, in all, and as long for room.
    """

    def __init__(
        self,
        buffer: "LookupBuffer",
        pins: PinTable,
        claims: EcClaims,
        answers: Answers,
        *,
        times: PassTimes,
        wait_seconds: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._pins = pins
        self._claims = claims
        self._answers = answers
        self._times = times
        self._wait_seconds = wait_seconds
        self._counters = counters
        self._clock = clock
        self._look_again = PassTime(LOOK_AGAIN_SECONDS, clock)
        self._look_again_at = 0.0

    def ask(self, watch: RequestWatch, needed: Sequence[WatchedItem]) -> Asked:
        for item in needed:
            self._pins.discard_other(item.identifier, item.key)
        new = [item for item in needed if not self._pins.hopeful(item.identifier)]
        if new and not self._prefetch(watch, new):
            return Asked.LATER if watch.awaits_room else Asked.WITHOUT
        for item in needed:
            pin = self._pins.get(item.identifier)
            assert pin is not None, "prefetched above"
            pin.wanted_by.add(watch.request_id)
            pin.modalities.add(item.modality)
            watch.wanted[item.identifier] = item
        watch.phase = Phase.WAITING
        return Asked.YES

    def _prefetch(self, watch: RequestWatch, items: list[WatchedItem]) -> bool:
        now = self._clock()
        sizes = [self._pins.estimated_bytes(item.num_embeds) for item in items]
        if not self._pins.has_room(sum(sizes)):
            self._lack_room(watch, items, sum(sizes), now)
            return False
        watch.find_room(now)
        handles = self._times.first_sights.spend_on(partial(self._claims.prefetch, watch, items))
        for item, nbytes, handle in zip(items, sizes, handles, strict=True):
            self._pins.add(Pin(item.identifier, handle, nbytes))
        return True

    def _lack_room(
        self, watch: RequestWatch, items: list[WatchedItem], nbytes: int, now: float
    ) -> None:
        wait_seconds = self._wait_seconds
        if nbytes > self._pins.budget_bytes:  # it never fits: do not look again
            watch.absent.update(item.identifier for item in items)
            wait_seconds = 0.0
        watch.lack_room(now, wait_seconds)
        if not (watch.awaits_room or watch.over_budget):
            watch.over_budget = True
            self._counters.add("over_budget")

    def settle(self, watch: RequestWatch) -> bool:
        pending: list[str] = []
        missing: dict[str, tuple[Pin, MissReason]] = {}
        for identifier, item in watch.wanted.items():
            pin = self._pins.get(identifier)
            if pin is None:
                continue  # it went with another request's step: vLLM's own cache has it
            if not self._times.idle.spend_on(pin.wait):
                pending.append(identifier)
            elif reason := self._pins.why_unfit(
                pin, item.num_embeds, any_float=item.carried is Carried.METADATA
            ):
                missing[identifier] = pin, reason
            else:
                self._answers.retract_no(identifier)
        if pending and watch.hold(self._clock(), self._wait_seconds):
            return False
        for identifier in pending:
            self._missed(watch, identifier, MissReason.TIMEOUT)
        for identifier, (pin, reason) in missing.items():
            # A store that is down has nothing to say of claims either.
            if pin.handle.state is PrefetchState.MISSING and reason != MissReason.STORE_DOWN:
                watch.lacks(watch.wanted[identifier])
            self._missed(watch, identifier, reason)
        watch.phase = Phase.ANSWERED
        return True

    def _missed(self, watch: RequestWatch, identifier: str, reason: MissReason) -> None:
        self._counters.add(f"miss:{reason}")
        logger.debug("request %s: item %s missed: %s", watch.request_id, identifier, reason)
        watch.absent.add(identifier)
        del watch.wanted[identifier]
        self._pins.drop(identifier, watch.request_id)

    def holds(self, watch: RequestWatch, identifier: str) -> bool:
        pin = self._pins.get(identifier)
        return pin is not None and watch.request_id in pin.wanted_by

    def promise(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        pin = self._pins.get(identifier)
        if pin is None or self._pins.why_unfit(pin, None):
            return False
        if any(meaning != (pin.handle.key, pin.rows) for meaning in meanings):
            return False
        self._pins.promise(pin)
        return True

    def look_again(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        (key, rows), *others = set(meanings) or {(None, 0)}
        now = self._clock()
        if key is None or others or now < self._look_again_at or self._pins.get(identifier):
            return False
        (handle,) = self._look_again.spend_on(
            lambda seconds: self._buffer.prefetch([key], timeout=seconds)
        )
        if handle.state is PrefetchState.PENDING:
            self._look_again_at = self._clock() + LOOK_AGAIN_PAUSE_SECONDS
        pin = Pin(identifier, handle, handle.order.nbytes if handle.order is not None else 0)
        if self._pins.why_unfit(pin, rows) or not self._pins.has_room(pin.nbytes):
            self._buffer.release(handle)
            return False
        self._pins.promise_at_once(pin)
        return True

    def end_pass(self) -> None:
        self._look_again.begin_pass()

    def drop(self, identifier: str, request_id: str) -> None:
        self._pins.drop(identifier, request_id)
