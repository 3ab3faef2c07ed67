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

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.storage import Breaker
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


_Call = Callable[[], Coroutine[Any, Any, None]]


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
    _last: dict[QualifiedKey, asyncio.Task[None]] = field(default_factory=dict)
    """The last call of the store for a key, while it runs."""
    _is_closed: bool = False

    @property
    def tells_of_records(self) -> bool:
        """Whether the locator knows a key, for a while, after the reply to a claim for it."""
        return self.locator.claims is not None

    def claim(self, claiming: Claiming, decided: Decided) -> None:
        """Ask for a claim. `decided` is called after this has returned."""
        address, claims = (claiming.namespace, claiming.key), self.locator.claims
        if claims is None or address in self._last:
            self._start(partial(self._claim, claiming, decided), [address])
            return

        def answered(found: ClaimAnswer | StoreError) -> None:
            if isinstance(found, StoreUnavailable):
                self._start(partial(self._claim, claiming, decided), [address])
            elif isinstance(found, StoreError):
                self.loop.call_soon(decided, None)
            elif self.locator.knows(found.record):
                self._decide(claiming, found, decided)
            else:
                self._start(partial(self._meet_and_decide, claiming, found, decided), [])

        claims.claim(claiming, answered)

    def release(self, releasings: Sequence[Releasing], released: Released) -> None:
        """Release claims. `released` is called at least once, each time for some of them."""
        claims = self.locator.claims
        if claims is None or any((one.namespace, one.key) in self._last for one in releasings):
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
        self._is_closed = True

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

    def _start(self, call: _Call, addresses: Sequence[QualifiedKey]) -> None:
        """Run a call for these keys, after the earlier ones for any of them."""
        if self._is_closed:
            return
        earlier = {self._last[address] for address in addresses if address in self._last}
        task = self.loop.create_task(_after(earlier, call))
        self._calls.add(task)
        self._last.update(dict.fromkeys(addresses, task))
        task.add_done_callback(partial(self._ended, addresses))

    def _ended(self, addresses: Sequence[QualifiedKey], task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        for address in addresses:
            if self._last.get(address) is task:
                del self._last[address]

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
            addresses = [(one.namespace, one.key) for one in group]
            self._start(partial(self._release, place, group, released), addresses)

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


async def _after(earlier: set["asyncio.Task[None]"], call: _Call) -> None:
    if earlier:
        await asyncio.wait(earlier)
    await call()
