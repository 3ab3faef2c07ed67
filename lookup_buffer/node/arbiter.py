"""The arbiter: takes claims at the store and releases them.

It uses the mirror's connections if there are any: this saves a pooled connection's round trip, and
the mirror keeps the record that comes with the reply. Otherwise it calls the store: without a
mirror, until it is connected, after a redirect by a cluster, and while a cut connection of the
mirror is not restored. Called by `claims` on the loop's thread.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.locate import Locator
from lookup_buffer.node.storage import Breaker
from lookup_buffer.protocol.messages import ClaimOutcome
from lookup_buffer.times import CLAIM_ANSWER_SECONDS
from store import (
    ClaimAnswer,
    Claiming,
    MetadataStore,
    Record,
    Releasing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

CLOSE_SECONDS = 1.0
"""For claims still to be released at shutdown; leases end the rest."""


class Answer(NamedTuple):
    """The result of one attempt to take a claim. STORED: this or another live node has the key, so
    no engine needs to produce it; a claim that was granted nevertheless is released."""

    outcome: ClaimOutcome
    address: QualifiedKey = ("", "")
    holder: str = ""
    state: str = ""
    remaining_seconds: float = 0.0
    counted_as: str = ""
    """One of `CLAIM_ANSWERS`, if that is not the outcome."""


Found = ClaimAnswer | StoreError | None
"""The store's reply to a claim; None if it was not reached."""
Decided = asyncio.Future[Found]
Existed = dict[Releasing, "asyncio.Future[bool]"]
"""For each claim to be released, whether it still existed, as far as is known."""


@dataclass(slots=True)
class _Server:
    """One server of the store: its calls run one after another, in the order in which they were
    started, so a frozen one delays only its own."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    breaker: Breaker = field(default_factory=lambda: Breaker(time.monotonic))


@dataclass(slots=True)
class Arbiter:
    """Operations on one key take effect in order."""

    loop: asyncio.AbstractEventLoop
    locator: Locator
    arena: Arena
    _servers: defaultdict[str, _Server] = field(default_factory=lambda: defaultdict(_Server))
    """By name, for calls of the store."""
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _last: dict[QualifiedKey, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    """The last call of the store for a key, and its server, while it runs: until then further
    calls for the key follow it, also if the key has moved to another server."""
    _is_closed: bool = False

    @property
    def tells_of_records(self) -> bool:
        """Whether the locator knows a key, for a while, after the reply to a claim for it."""
        return self.locator.claims is not None

    async def claim(self, claiming: Claiming) -> Answer | None:
        """Take a claim, or learn who has it. The request is sent before this suspends.

        Returns None if the store has not decided within CLAIM_ANSWER_SECONDS, was not reached, or
        is out of memory. In this case, and if this is cancelled, it may still grant the claim: a
        release that follows takes effect after that.
        """
        address, claims = (claiming.namespace, claiming.key), self.locator.claims
        decided: Decided = self.loop.create_future()
        if claims is None or address in self._last:
            self._claim_at_store(claiming, decided)
        else:
            claims.claim(claiming, partial(self._claimed, claiming, decided))
        until = self.loop.time() + CLAIM_ANSWER_SECONDS
        bound = self.loop.call_at(until, self._claimed, claiming, decided, None)
        try:
            found = await decided
        finally:
            bound.cancel()
        if not isinstance(found, ClaimAnswer) or not await self._meets(found.record, until):
            return None
        record = found.record
        is_elsewhere = record is not None and self.locator.directory.sources(record)
        if is_elsewhere or self.arena.holds(address):
            if found.granted:
                self.release([Releasing(*address, claiming.token)])
            return Answer(ClaimOutcome.STORED, address)
        outcome = ClaimOutcome.GRANTED if found.granted else ClaimOutcome.HELD
        return Answer(outcome, address, found.holder, found.state.value, found.remaining_seconds)

    def release(self, releasings: Sequence[Releasing]) -> "list[asyncio.Future[bool]]":
        """Release claims; the results are whether each still existed, as far as is known."""
        existed: Existed = {one: self.loop.create_future() for one in releasings}
        claims = self.locator.claims
        if claims is None or any((one.namespace, one.key) in self._last for one in existed):
            self._release_at_store(existed)
        else:
            for one in existed:
                claims.release(one, partial(self._released, existed, one))
        return list(existed.values())

    async def close(self) -> None:
        """Finish pending calls within CLOSE_SECONDS; leases end the other claims."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_SECONDS)
        self._is_closed = True

    # -- replies

    def _claimed(self, claiming: Claiming, decided: Decided, found: Found) -> None:
        address = (claiming.namespace, claiming.key)
        if isinstance(found, StoreUnavailable):
            self._claim_at_store(claiming, decided)
        elif not decided.done():
            decided.set_result(found)
        elif isinstance(found, ClaimAnswer) and found.granted and self.arena.holds(address):
            # Granted so late that its key was inserted here: nobody else would release it.
            self.release([Releasing(*address, claiming.token)])

    def _released(self, existed: Existed, one: Releasing, found: bool | StoreError | None) -> None:
        if isinstance(found, StoreUnavailable):
            self._release_at_store({one: existed[one]})
        elif not existed[one].done():
            existed[one].set_result(found is True)

    async def _meets(self, record: Record | None, until: float) -> bool:
        """Make known all nodes that the record names; whether there was time for that."""
        with suppress(TimeoutError):
            if record is not None and not self.locator.knows(record):
                async with asyncio.timeout_at(until):
                    await self.locator.meet([record])
            return True
        return False

    # -- at the store

    def _claim_at_store(self, claiming: Claiming, decided: Decided) -> None:
        address = (claiming.namespace, claiming.key)
        place = self._place_of(address)
        self._start(place, [address], self._claim(place, claiming, decided))

    async def _claim(self, place: str, claiming: Claiming, decided: Decided) -> None:
        found = None
        try:
            async with self._store(place) as store:
                if store is not None:
                    found = await store.claim(
                        claiming.namespace,
                        claiming.key,
                        holder=claiming.holder,
                        token=claiming.token,
                        state=claiming.state,
                        lease_seconds=claiming.lease_seconds,
                    )
            if found is not None and found.record is not None:  # the mirror may not have it
                self.locator.forget((claiming.namespace, claiming.key))
        finally:
            self._claimed(claiming, decided, found)

    def _release_at_store(self, existed: Existed) -> None:
        groups: defaultdict[str, Existed] = defaultdict(dict)
        for one, future in existed.items():
            groups[self._place_of((one.namespace, one.key))][one] = future
        for place, group in groups.items():
            addresses = [(one.namespace, one.key) for one in group]
            self._start(place, addresses, self._release(place, group))

    async def _release(self, place: str, existed: Existed) -> None:
        found: Sequence[bool | None] = [None] * len(existed)
        try:
            async with self._store(place) as store:
                if store is not None:  # else their leases end them
                    found = await store.release_many(list(existed))
        finally:
            for one, was_there in zip(existed, found, strict=True):
                self._released(existed, one, was_there)

    @asynccontextmanager
    async def _store(self, place: str) -> AsyncIterator[MetadataStore | None]:
        """The store, for one call in the server's order; None while the server is not called. An
        error of the store ends the block, and no more."""
        server = self._servers[place]
        async with server.lock:
            store = await self.locator.store() if server.breaker.allows() else None
            try:
                yield store
            except StoreFull:
                server.breaker.succeeded()  # the server answers, and releases still succeed
            except StoreError:
                server.breaker.failed()
            else:
                if store is not None:
                    server.breaker.succeeded()

    def _place_of(self, address: QualifiedKey) -> str:
        last = self._last.get(address)
        return self.locator.place_of(address) if last is None else last[0]

    def _start(
        self, place: str, addresses: Sequence[QualifiedKey], call: Coroutine[Any, Any, None]
    ) -> None:
        """Run a call of this server for these keys."""
        if self._is_closed:
            call.close()
            return
        task = self.loop.create_task(call)
        self._calls.add(task)
        self._last.update(dict.fromkeys(addresses, (place, task)))
        task.add_done_callback(partial(self._ended, addresses))

    def _ended(self, addresses: Sequence[QualifiedKey], task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        for address in addresses:
            if address in self._last and self._last[address][1] is task:
                del self._last[address]
