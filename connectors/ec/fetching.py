"""The supply of an engine that loads: the node brings items to this host and pins them.

vLLM schedules nothing else meanwhile, so all first sights of a pass share a budget, and what is on
its way is looked at again in later passes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from connectors.counters import Counters, logger
from connectors.ec.answers import Answers
from connectors.ec.claims import EcClaims
from connectors.ec.meanings import Meaning
from connectors.ec.pins import Pin, PinTable
from connectors.ec.supply import Asked, ItemSupply
from connectors.ec.watch import Phase, RequestWatch, WatchedItem
from connectors.pass_time import PassTimes
from lookup_buffer.prefetched import PrefetchState


class EcFetching(ItemSupply):
    """Items are asked for by `EcClaims`, which may ask for the right to encode them as well.

    Args:
        pins: what was asked for; shared with `EcScheduler`.
        answers: a "no" that is no longer true is taken back.
        wait_seconds: how long one request may wait for bytes, in all, and as long for room.
    """

    def __init__(
        self,
        pins: PinTable,
        claims: EcClaims,
        answers: Answers,
        *,
        times: PassTimes,
        wait_seconds: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pins = pins
        self._claims = claims
        self._answers = answers
        self._times = times
        self._wait_seconds = wait_seconds
        self._counters = counters
        self._clock = clock

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
        missing: dict[str, Pin] = {}
        for identifier, item in watch.wanted.items():
            pin = self._pins.get(identifier)
            if pin is None:
                continue  # it went with another request's step: vLLM's own cache has it
            if not self._times.idle.spend_on(pin.wait):
                pending.append(identifier)
            elif self._pins.fits(pin, item.num_embeds):
                self._answers.retract_no(identifier)
            else:
                missing[identifier] = pin
        if pending and watch.hold(self._clock(), self._wait_seconds):
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

    def holds(self, watch: RequestWatch, identifier: str) -> bool:
        pin = self._pins.get(identifier)
        return pin is not None and watch.request_id in pin.wanted_by

    def promise(self, identifier: str, meanings: Sequence[Meaning]) -> bool:
        pin = self._pins.get(identifier)
        if pin is None or not self._pins.is_here(pin):
            return False
        if any(meaning != (pin.handle.key, pin.rows) for meaning in meanings):
            return False
        self._pins.promise(pin)
        return True

    def drop(self, identifier: str, request_id: str) -> None:
        self._pins.drop(identifier, request_id)
