"""Arbiters: how the node asks the store for claims, and gives them back.

`LineArbiter` asks on threads, in a line for each server of the store. `MirrorArbiter` asks on the
loop, by the connections that the mirror has anyway: no thread has to be woken for it, which is most
of what a claim costs, and what the store says of the record the mirror keeps.
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
class Ruling:
    """What the store said of a claim, and what it comes to. STORED: a node that lives has the key,
    so nobody need produce it, and what was granted all the same is given back."""

    answer: ClaimAnswer
    outcome: ClaimOutcome
    heard: bool = False
    """The locator was told of the record, too."""


Ruled = Callable[[Ruling | None], None]
"""None: the store was not reached, or has no memory left. It may have granted all the same."""
Released = Callable[[bool], None]
"""Whether they were still there to be given back, as far as is known."""


class Arbiter(ABC):
    """Called, and answering, on the loop. What is said of one key takes effect in order."""

    @property
    def tells_of_records(self) -> bool:
        """Whether the locator knows of a key, for a while, when a claim for it was answered."""
        return False

    @abstractmethod
    def claim(self, claiming: Claiming, ruled: Ruled) -> None:
        """Ask for a claim; answered after this has returned."""

    @abstractmethod
    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        """Give claims back. `released` is told once or more, of some of them."""

    @abstractmethod
    def close(self, seconds: float) -> None:
        """Finish what was said, within so long; leases end the rest."""


@dataclass(slots=True)
class LineArbiter(Arbiter):
    loop: asyncio.AbstractEventLoop
    storage: Storage
    directory: Directory
    _lines: Lines = field(default_factory=lambda: Lines("lb-claim"))

    def claim(self, claiming: Claiming, ruled: Ruled) -> None:
        place = self.storage.place_of((claiming.namespace, claiming.key))
        self._lines.submit(place, partial(self._ask, claiming, ruled))

    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        groups = defaultdict(list)
        for one in releasings:
            groups[self.storage.place_of((one.namespace, one.key))].append(one)
        for place, group in groups.items():
            self._lines.submit(place, partial(self._release, group, released))

    def close(self, seconds: float) -> None:
        self._lines.close(seconds)

    # -- in a line

    def _ask(self, claiming: Claiming, ruled: Ruled, breaker: Breaker) -> None:
        call_from_thread(self.loop, ruled, self._ruling(claiming, breaker))

    def _ruling(self, claiming: Claiming, breaker: Breaker) -> Ruling | None:
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
                breaker.succeeded()  # it answers, and releases still pass
            else:
                breaker.failed()
            return None
        breaker.succeeded()
        self.directory.meet(store, [found.record])
        stored = found.record is not None and bool(self.directory.sources(found.record))
        if stored and found.granted:
            with suppress(StoreError):  # the lease will end it
                store.release_claim(claiming.namespace, claiming.key, token=claiming.token)
        return Ruling(found, _outcome(found, stored))

    def _release(
        self, releasings: Sequence[Releasing], released: Released, breaker: Breaker
    ) -> None:
        found: list[bool | None] = [None]
        if breaker.allows():
            try:
                found = self.storage.store().release_many(releasings)
                breaker.succeeded()
            except StoreError:
                breaker.failed()  # the leases will end them
        call_from_thread(self.loop, released, all(found))


@dataclass(slots=True)
class MirrorArbiter(Arbiter):
    """Until the mirror is there, and where a server points elsewhere, by the other way; also where
    the mirror's connection was cut, which is dialled again only after a pause."""

    loop: asyncio.AbstractEventLoop
    locator: MirrorLocator
    lines: LineArbiter

    @property
    def tells_of_records(self) -> bool:
        return self.locator.claims is not None

    def claim(self, claiming: Claiming, ruled: Ruled) -> None:
        claims = self.locator.claims
        if claims is None:
            self.lines.claim(claiming, ruled)
            return

        def answered(found: ClaimAnswer | StoreError) -> None:
            if isinstance(found, StoreUnavailable):
                self.lines.claim(claiming, ruled)
            elif isinstance(found, StoreError):
                self.loop.call_soon(ruled, None)
            else:
                self.locator.held(found.record, partial(self._rule, claiming, found, ruled))

        claims.claim(claiming, answered)

    def _rule(self, claiming: Claiming, found: ClaimAnswer, ruled: Ruled, stored: bool) -> None:
        if stored and found.granted:
            releasing = Releasing(claiming.namespace, claiming.key, claiming.token)
            self.release([releasing], lambda _: None)
        ruled(Ruling(found, _outcome(found, stored), heard=True))

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
