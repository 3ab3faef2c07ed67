"""The arbiter: takes claims at the store and releases them.

It uses the mirror's connections if there are any: this saves a pooled connection's round trip, and
the mirror keeps the record that comes with the reply. Otherwise it calls the store: without a
mirror, until it is connected, after a redirect by a cluster, and while a cut connection of the
mirror is not restored. Called by `claims` on the loop's thread.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from lookup_buffer.node.breaker import Breaker
from lookup_buffer.node.locate import Locator
from lookup_buffer.protocol.messages import ClaimOutcome
from store import ClaimAnswer, Claiming, Releasing, StoreError, StoreFull, StoreUnavailable

CLOSE_SECONDS = 1.0
"""For claims still to be released at shutdown; leases end the rest."""


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


@dataclass(slots=True)
class _Server:
    """One server of the store: its calls run one after another, so a frozen one delays only its
    own."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    breaker: Breaker = field(default_factory=lambda: Breaker(monotonic))


@dataclass(slots=True)
class Arbiter:
    """Operations on one key take effect in order."""

    loop: asyncio.AbstractEventLoop
    locator: Locator
    _servers: defaultdict[str, _Server] = field(default_factory=lambda: defaultdict(_Server))
    """By name, for calls of the store."""
    _calls: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def tells_of_records(self) -> bool:
        """Whether the locator knows a key, for a while, after the reply to a claim for it."""
        return self.locator.claims is not None

    def claim(self, claiming: Claiming, decided: Decided) -> None:
        """Ask for a claim. `decided` is called after this has returned."""
        claims = self.locator.claims
        if claims is None:
            self._start(self._claim(claiming, decided))
            return

        def answered(found: ClaimAnswer | StoreError) -> None:
            if isinstance(found, StoreUnavailable):
                self._start(self._claim(claiming, decided))
            elif isinstance(found, StoreError):
                self.loop.call_soon(decided, None)
            elif self.locator.knows(found.record):
                self._decide(claiming, found, decided)
            else:
                self._start(self._meet_and_decide(claiming, found, decided))

        claims.claim(claiming, answered)

    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        """Release claims. `released` is called at least once, each time for some of them."""
        claims = self.locator.claims
        if claims is None:
            self._release_at_store(releasings, released)
            return

        def answered(one: Releasing, found: bool | StoreError) -> None:
            if isinstance(found, StoreUnavailable):
                self._release_at_store([one], released)
            else:
                released(found is True)

        for one in releasings:
            claims.release(one, partial(answered, one))

    async def close(self) -> None:
        """Finish pending calls within CLOSE_SECONDS; leases end the other claims."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_SECONDS)

    # -- over the mirror

    async def _meet_and_decide(
        self, claiming: Claiming, found: ClaimAnswer, decided: Decided
    ) -> None:
        """Decide once all nodes that the record names are known, as far as possible."""
        if found.record is not None:
            await self.locator.meet([found.record])
        self._decide(claiming, found, decided)

    def _decide(self, claiming: Claiming, found: ClaimAnswer, decided: Decided) -> None:
        outcome = self._outcome(found)
        if outcome is ClaimOutcome.STORED and found.granted:
            releasing = Releasing(claiming.namespace, claiming.key, claiming.token)
            self.release([releasing], lambda _: None)
        decided(Decision(found, outcome, heard=True))

    def _outcome(self, found: ClaimAnswer) -> ClaimOutcome:
        if found.record is not None and self.locator.directory.sources(found.record):
            return ClaimOutcome.STORED
        return ClaimOutcome.GRANTED if found.granted else ClaimOutcome.HELD

    # -- at the store

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _claim(self, claiming: Claiming, decided: Decided) -> None:
        place = self.locator.place_of((claiming.namespace, claiming.key))
        decision = None
        try:
            async with self._servers[place].lock:
                decision = await self._call(claiming, self._servers[place].breaker)
        finally:
            decided(decision)

    async def _call(self, claiming: Claiming, breaker: Breaker) -> Decision | None:
        store = await self.locator.store() if breaker.allows() else None
        if store is None:
            return None
        name = (claiming.namespace, claiming.key)
        try:
            found = await store.claim(
                *name,
                holder=claiming.holder,
                token=claiming.token,
                state=claiming.state,
                lease_seconds=claiming.lease_seconds,
            )
        except StoreFull:
            breaker.succeeded()  # the server answers, and releases still succeed
            return None
        except StoreError:
            breaker.failed()
            return None
        breaker.succeeded()
        if found.record is not None:
            await self.locator.meet([found.record])
        outcome = self._outcome(found)
        if outcome is ClaimOutcome.STORED and found.granted:
            with suppress(StoreError):  # its lease ends it
                await store.release_claim(*name, token=claiming.token)
        return Decision(found, outcome)

    def _release_at_store(self, releasings: Sequence[Releasing], released: Released) -> None:
        groups = defaultdict(list)
        for one in releasings:
            groups[self.locator.place_of((one.namespace, one.key))].append(one)
        for place, group in groups.items():
            self._start(self._release(place, group, released))

    async def _release(
        self, place: str, releasings: Sequence[Releasing], released: Released
    ) -> None:
        found: list[bool | None] = [None]
        try:
            async with self._servers[place].lock:
                breaker = self._servers[place].breaker
                store = await self.locator.store() if breaker.allows() else None
                if store is not None:
                    try:
                        found = await store.release_many(releasings)
                        breaker.succeeded()
                    except StoreError:
                        breaker.failed()  # their leases end them
        finally:
            released(all(found))
