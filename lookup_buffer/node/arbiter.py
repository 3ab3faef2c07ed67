"""Arbiters: how the node takes claims at the store and releases them.

`LineArbiter` calls the store on `lb-claim` threads, one queue for each server. `MirrorArbiter` uses
the mirror's connections on the loop: this saves the thread switch, which is most of a claim's cost,
and the mirror keeps the record that comes with the reply. Called by `claims` on the loop's thread.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.lines import Lines
from lookup_buffer.node.loop import call_from_thread
from lookup_buffer.node.mirroring import MirrorLocator
from lookup_buffer.node.storage import Storage
from lookup_buffer.protocol.messages import ClaimOutcome
from store import ClaimAnswer, Claiming, Releasing, StoreError, StoreFull, StoreUnavailable


@dataclass(frozen=True, slots=True)
class Decision:
    """The store's reply to a claim, and the outcome. STORED: a live node has the key, so no
    engine needs to produce it; a claim that was granted nevertheless is released."""

    answer: ClaimAnswer
    outcome: ClaimOutcome
    heard: bool = False
    """Whether the locator has the record of the reply, too."""


Decided = Callable[[Decision | None], None]
"""Called with None if the store was not reached or is out of memory. It may have granted the
claim."""
Released = Callable[[bool], None]
"""Called with whether the claims still existed, as far as is known."""


class Arbiter(ABC):
    """Called on the loop's thread, and calls back there. Operations on one key take effect in
    order."""

    @property
    def tells_of_records(self) -> bool:
        """Whether the locator knows a key, for a while, after the reply to a claim for it."""
        return False

    @abstractmethod
    def claim(self, claiming: Claiming, decided: Decided) -> None:
        """Ask for a claim. `decided` is called after this has returned."""

    @abstractmethod
    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        """Release claims. `released` is called at least once, each time for some of them."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """Finish pending operations within `seconds`; leases end the other claims."""


@dataclass(slots=True)
class LineArbiter(Arbiter):
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    _lines: Lines = field(default_factory=lambda: Lines("lb-claim"))

    def claim(self, claiming: Claiming, decided: Decided) -> None:
        place = self.storage.place_of((claiming.namespace, claiming.key))
        self._lines.submit(place, partial(self._ask, claiming, decided))

    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        groups = defaultdict(list)
        for one in releasings:
            groups[self.storage.place_of((one.namespace, one.key))].append(one)
        for place, group in groups.items():
            self._lines.submit(place, partial(self._release, group, released))

    def close(self, seconds: float) -> None:
        self._lines.close(seconds)

    # -- on a thread of `Lines`

    def _ask(self, claiming: Claiming, decided: Decided, breaker: Breaker) -> None:
        call_from_thread(self.loop, decided, self._decide(claiming, breaker))

    def _decide(self, claiming: Claiming, breaker: Breaker) -> Decision | None:
        if not breaker.allows():
            return None
        try:
            store = self.storage.store()
            found = store.claim(
                claiming.namespace,
                claiming.key,
                holder=claiming.holder,
                token=claiming.token,
                state=claiming.state,
                lease_seconds=claiming.lease_seconds,
            )
        except StoreError as error:
            if isinstance(error, StoreFull):
                breaker.succeeded()  # the server answers, and releases still succeed
            else:
                breaker.failed()
            return None
        breaker.succeeded()
        self.directory.meet(store, [found.record])
        stored = found.record is not None and bool(self.directory.sources(found.record))
        if stored and found.granted:
            with suppress(StoreError):  # its lease ends it
                store.release_claim(claiming.namespace, claiming.key, token=claiming.token)
        return Decision(found, _outcome(found, stored))

    def _release(
        self, releasings: Sequence[Releasing], released: Released, breaker: Breaker
    ) -> None:
        found: list[bool | None] = [None]
        if breaker.allows():
            try:
                found = self.storage.store().release_many(releasings)
                breaker.succeeded()
            except StoreError:
                breaker.failed()  # their leases end them
        call_from_thread(self.loop, released, all(found))


@dataclass(slots=True)
class MirrorArbiter(Arbiter):
    """Uses `lines` until the mirror is connected, after a redirect by a cluster, and while a cut
    connection of the mirror is not restored."""

    loop: asyncio.AbstractEventLoop
    locator: MirrorLocator
    lines: LineArbiter

    @property
    def tells_of_records(self) -> bool:
        return self.locator.claims is not None

    def claim(self, claiming: Claiming, decided: Decided) -> None:
        claims = self.locator.claims
        if claims is None:
            self.lines.claim(claiming, decided)
            return

        def answered(found: ClaimAnswer | StoreError) -> None:
            if isinstance(found, StoreUnavailable):
                self.lines.claim(claiming, decided)
            elif isinstance(found, StoreError):
                self.loop.call_soon(decided, None)
            else:
                self.locator.held(found.record, partial(self._decide, claiming, found, decided))

        claims.claim(claiming, answered)

    def _decide(
        self, claiming: Claiming, found: ClaimAnswer, decided: Decided, stored: bool
    ) -> None:
        if stored and found.granted:
            releasing = Releasing(claiming.namespace, claiming.key, claiming.token)
            self.release([releasing], lambda _: None)
        decided(Decision(found, _outcome(found, stored), heard=True))

    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        claims = self.locator.claims
        if claims is None:
            self.lines.release(releasings, released)
            return
        for one in releasings:
            claims.release(one, partial(self._released, one, released))

    def _released(self, one: Releasing, released: Released, found: bool | StoreError) -> None:
        if isinstance(found, StoreUnavailable):
            self.lines.release([one], released)
        else:
            released(found is True)

    def close(self, seconds: float) -> None:
        self.lines.close(seconds)


def _outcome(found: ClaimAnswer, stored: bool) -> ClaimOutcome:
    if stored:
        return ClaimOutcome.STORED
    return ClaimOutcome.GRANTED if found.granted else ClaimOutcome.HELD
