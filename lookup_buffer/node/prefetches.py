"""Prefetches: fetches and pins what a session requests, and sends an event for each key.

Keys that are here are answered at once; others when they have come by a lane, over the hosts or as
a loan. If the session waits for keys that no node has, they are answered when they are published.
Called by `desk` on the loop's thread.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lookup_buffer.errors import MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.claim_sets import ClaimSets
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.lanes import Lanes
from lookup_buffer.node.loans import Loans
from lookup_buffer.node.resolver import Resolver, Settle
from lookup_buffer.node.selection import Selection
from lookup_buffer.node.session import Session
from lookup_buffer.node.waiting import Waiting
from lookup_buffer.protocol.messages import ClaimAll, Prefetch, Request

ENTRIES_MAX = 1024
"""Entries in one event: at most 1 KiB each, and a frame holds 1 MiB."""
AWAITED_MAX = 4096
"""Keys for which one session waits at a time; further keys are answered without a wait."""
AHEAD_SECONDS = 0.05
"""A prefetch waits at most this long for the claims that were requested with it, since they may
be many."""


@dataclass(slots=True)
class Prefetches:
    loop: asyncio.AbstractEventLoop
    resolver: Resolver
    loans: Loans
    lanes: Lanes
    claims: Claims
    claim_sets: ClaimSets
    counters: Counters
    waiting: Waiting
    try_hold: Callable[[Session, QualifiedKey], dict[str, Any] | None]
    """Pins an address for a session and returns its fields; None if absent here."""
    _awaited: Counter[int] = field(default_factory=Counter)
    """By session: for how many keys it waits."""

    def prefetch(self, session: Session, request: Prefetch) -> None:
        entries: list[tuple[int, dict[str, Any]]] = []
        pending: dict[QualifiedKey, list[int]] = {}
        for index, key in enumerate(request.keys):
            address = (request.namespace, key)
            entry = self.try_hold(session, address)
            if entry is None:
                pending.setdefault(address, []).append(index)
            else:
                entries.append((index, entry))

        def settle(address: QualifiedKey) -> Settle:
            return lambda reason: self._settled(session, request, pending[address], reason)

        if entries:
            _push(session, request, entries)
        handoffs = [address for address in pending if is_handoff(address[1])]
        shared = [address for address in pending if not is_handoff(address[1])]
        if handoffs:
            self.loans.resolve(handoffs, settle)

        def taken(address: QualifiedKey, entry: dict[str, Any]) -> None:
            """The tensor came by a lane."""
            if not session.over:
                _push(session, request, [(index, entry) for index in pending[address]])

        def over_the_hosts(rest: list[QualifiedKey]) -> None:
            if not request.claimer and self._may_wait(session, request, len(rest)):
                self._wait(session, request, {address: pending[address] for address in rest})
            else:
                self.resolver.resolve(rest, settle)

        def resolve() -> None:
            self.lanes.bring(session, shared, taken, over_the_hosts)

        if request.claimer:
            self._claim_ahead(session, request, resolve)
        elif shared:
            resolve()

    def _claim_ahead(
        self, session: Session, request: Prefetch, resolve: Callable[[], None]
    ) -> None:
        """Ask for the claims of what is prefetched. If the replies include the records,
        `resolve` after them, and send both events in one write."""
        keys = sorted(set(request.keys))
        claim_all = ClaimAll(request.claimer, request.namespace, keys, request.wait_seconds)
        located = functools.cache(resolve)  # that is, once

        def told(event: dict[str, Any]) -> None:
            with session.anchor.together():
                located()
                tell(session, claim_all, event)

        if not (self.claims.arbiter.tells_of_records and self.claim_sets.is_idle(session)):
            located()
        self.loop.call_later(AHEAD_SECONDS, located)
        self.claim_sets.ask(session, claim_all, told, located)

    def _may_wait(self, session: Session, request: Prefetch, count: int) -> bool:
        return bool(request.wait_seconds) and self._awaited[session.id] + count <= AWAITED_MAX

    def _wait(
        self, session: Session, request: Prefetch, pending: dict[QualifiedKey, list[int]]
    ) -> None:
        """Fetch these keys; wait for those that no node has until they are published."""
        until = self.loop.time() + request.wait_seconds
        for address, indexes in pending.items():
            self._awaited[session.id] += 1

            def look(
                reason: MaybeMissed,
                last: bool,
                address: QualifiedKey = address,
                indexes: list[int] = indexes,
            ) -> bool:
                is_here = self.resolver.shelf.holds(address)
                is_over = last or is_here or session.over
                if is_over:
                    self._forget_awaited(session)
                    self._settled(session, request, indexes, reason)
                return is_over

            Selection(
                self.loop, self.resolver, self.waiting, address, until, look, lambda _: None
            ).begin()

    def _forget_awaited(self, session: Session) -> None:
        self._awaited[session.id] -= 1
        if not self._awaited[session.id]:
            del self._awaited[session.id]

    def _settled(
        self, session: Session, request: Prefetch, indexes: list[int], reason: MaybeMissed
    ) -> None:
        """Send the session the result of one key that was absent at the request."""
        if session.over:
            return
        entries = []
        for index in indexes:
            entry = self.try_hold(session, (request.namespace, request.keys[index]))
            if entry is None:
                self.counters.add(miss(reason))
                entry = {"state": "missing", "reason": reason or MissReason.ABSENT}
            entries.append((index, entry))
        _push(session, request, entries)


def tell(session: Session, request: Request, event: dict[str, Any]) -> None:
    session.anchor.send({"id": request.id, **event})


def _push(session: Session, request: Request, entries: list[tuple[int, dict[str, Any]]]) -> None:
    for start in range(0, len(entries), ENTRIES_MAX):
        part = entries[start : start + ENTRIES_MAX]
        session.anchor.send({"event": "settled", "id": request.id, "entries": part})


def miss(reason: MaybeMissed) -> str:
    """The counter of misses for that reason."""
    return f"misses_{reason or MissReason.ABSENT}"
