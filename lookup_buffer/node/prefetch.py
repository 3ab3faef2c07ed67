"""Prefetches: fetches and pins what a session requests, and sends an event for each key.

Keys that are here are answered at once, and so are those that certainly no node has; others when
they have come by a lane or over the hosts. If the session waits for keys that no node has, they are
answered when they are published. A key whose handles are all released is no longer waited for; if
it was found by then it comes nevertheless, for the next reader. Called by `server` on the loop's
thread.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from lookup_buffer.errors import BufferFull, MaybeMissed, MissReason
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.claims import Claims
from lookup_buffer.node.connection import Fields, Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Lanes
from lookup_buffer.node.locate import Located
from lookup_buffer.node.read import NOTHING, Reads
from lookup_buffer.node.transfer import TURN_SECONDS, Fetched
from lookup_buffer.protocol.messages import ClaimAll, EndPrefetch, Prefetch

ENTRIES_MAX = 1024
"""Entries in one event: at most 1 KiB each, and a frame holds 1 MiB."""
AHEAD_SECONDS = 0.05
"""A prefetch waits at most this long for the claims that were requested with it, since they may
be many."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Pending:
    """One prefetch."""

    session: Session
    request: Prefetch
    until: float
    """How long it waits, by the loop's clock."""
    indexes: dict[QualifiedKey, set[int]] = field(default_factory=dict)
    """The positions of each key that are neither answered nor released."""
    awaiting: "dict[QualifiedKey, asyncio.Task[None]]" = field(default_factory=dict)
    """Of each key that is waited for."""

    def await_by(self, task: "asyncio.Task[None]", address: QualifiedKey) -> None:
        self.session.count(task)
        self.awaiting[address] = task
        task.add_done_callback(lambda _: self.awaiting.pop(address))

    def release(self, index: int) -> None:
        """Its handle is released; the last one of a key ends the wait for it."""
        address = (self.request.namespace, self.request.keys[index])
        indexes = self.indexes.get(address)
        if indexes is None:
            return
        indexes.discard(index)
        if not indexes:
            del self.indexes[address]
            if address in self.awaiting:
                self.awaiting[address].cancel()


@dataclass(slots=True)
class Prefetches:
    reads: Reads
    lanes: Lanes
    claims: Claims
    counters: Counters
    sessions: Mapping[int, Session]
    """All that are open, by id."""
    _pending: WeakValueDictionary[tuple[int, int], _Pending] = field(
        default_factory=WeakValueDictionary
    )
    """By the session's id and the request's: those that are not answered in full."""

    def prefetch(self, session: Session, request: Prefetch) -> None:
        """Send the entries of what is here now, and bring the rest."""
        seconds = 0.0 if request.claimer else request.wait_seconds
        until = self.reads.loop.time() + (seconds or TURN_SECONDS)
        pending = _Pending(session, request, until)
        for index, key in enumerate(request.keys):
            pending.indexes.setdefault((request.namespace, key), set()).add(index)
        self._pending[session.id, request.id] = pending
        here = [(address, NOTHING) for address in pending.indexes]
        self._answer(pending, here, is_final=False)
        if request.claimer:
            self._claim_ahead(pending)
        else:
            self._bring(pending)

    def end(self, session: Session, request: EndPrefetch) -> None:
        """The client has released these handles: it gets no pins for them."""
        pending = self._pending.get((session.id, request.prefetch))
        if pending is not None:
            for index in request.indexes:
                if index < len(pending.request.keys):
                    pending.release(index)

    def _claim_ahead(self, pending: _Pending) -> None:
        """Ask for the claims of what is prefetched. If the replies include the records, bring it
        after them, and send both events in one write."""
        session, request = pending.session, pending.request
        keys = sorted(set(request.keys))
        claim_all = ClaimAll(request.claimer, request.namespace, keys, request.wait_seconds)
        located = functools.cache(functools.partial(self._bring, pending))  # that is, once

        def told(event: Fields) -> None:
            with session.anchor.together():
                located()
                session.tell(claim_all, event)

        def locate_at_last() -> None:
            if not session.has_ended:
                located()

        if self.reads.locator.claims is None or not self.claims.is_idle(session):
            located()
        else:
            self.reads.loop.call_later(AHEAD_SECONDS, locate_at_last)
        self.claims.claim_all(session, claim_all, told, kept=request.keys)

    def _bring(self, pending: _Pending) -> None:
        """Answer what certainly no node has, unless the session waits for it; bring the rest."""
        rest, missing = [], []
        for address in pending.indexes:
            reason = "" if self._may_wait(pending, address) else self.reads.missing(address)
            if reason:
                missing.append((address, Fetched(None, reason)))
            else:
                rest.append(address)
        self._answer(pending, missing)
        if not rest:
            return
        try:
            bringing = self._bring_rest(pending, rest)
            pending.session.start(bringing, keys=pending.request.keys)  # all of them are kept
        except BufferFull:
            crowded = Fetched(None, MissReason.NO_ROOM)
            self._answer(pending, [(address, crowded) for address in rest])

    async def _bring_rest(self, pending: _Pending, rest: Sequence[QualifiedKey]) -> None:
        shared = [address for address in rest if not is_handoff(address[1])]
        try:
            async with asyncio.TaskGroup() as group:
                by_lane = await self.lanes.find(pending.session, shared)
                for address, located in by_lane.items():
                    group.create_task(self._receive(pending, address, located, group))
                others = [address for address in rest if address not in by_lane]
                await self._over_hosts(pending, others, group)
        except Exception:  # a bug; a handle without an answer would wait as long as its client
            failed = Fetched(None, MissReason.STORE_DOWN)
            self._answer(pending, [(address, failed) for address in rest])
            raise

    async def _receive(
        self, pending: _Pending, address: QualifiedKey, located: Located, group: asyncio.TaskGroup
    ) -> None:
        entry = await self.lanes.receive(pending.session, address, located)
        if entry is None:
            await self._over_hosts(pending, [address], group)
        elif address in pending.indexes:
            _push(pending, [(index, entry) for index in pending.indexes.pop(address)])
        else:
            self.lanes.release([entry["ticket"]], pending.session)

    def _may_wait(self, pending: _Pending, address: QualifiedKey) -> bool:
        """Whether the session waits for this key until it is published."""
        request = pending.request
        waits = request.wait_seconds > 0 and not request.claimer and not is_handoff(address[1])
        return waits and address in pending.indexes

    async def _over_hosts(
        self, pending: _Pending, addresses: Sequence[QualifiedKey], group: asyncio.TaskGroup
    ) -> None:
        """Bring these keys together, and then wait for each that no node has, in `group`."""
        async for came in self.reads.bring_each(addresses, pending.until):
            final = []
            for address, fetched in came:
                if self._is_awaited(pending, address, fetched):
                    pending.await_by(group.create_task(self._await(pending, address)), address)
                else:
                    final.append((address, fetched))
            self._answer(pending, final)

    def _is_awaited(self, pending: _Pending, address: QualifiedKey, fetched: Fetched) -> bool:
        """Whether this key is waited for now. A key that found no room is not: its session may
        hold the pins that fill the arena. Nor is one of a session of which too many wait."""
        is_missing = fetched.held is None and not self.reads.arena.holds(address)
        may_come = is_missing and fetched.reason != MissReason.NO_ROOM
        is_bounded = pending.session.waits.fits(pending.session.id)
        has_time = self.reads.loop.time() < pending.until
        return may_come and is_bounded and has_time and self._may_wait(pending, address)

    async def _await(self, pending: _Pending, address: QualifiedKey) -> None:
        def answer(fetched: Fetched) -> bool | None:
            is_here = self.reads.arena.holds(address)  # else ranks that are missing do not matter
            if is_here or fetched.reason == MissReason.NO_ROOM:
                self._answer(pending, [(address, fetched)])
                return True
            return None

        left = pending.until - self.reads.loop.time()
        found = await self.reads.bring(address, left, answer)
        if isinstance(found, MissReason):
            self._answer(pending, [(address, Fetched(None, found))])

    def _answer(
        self,
        pending: _Pending,
        came: Sequence[tuple[QualifiedKey, Fetched]],
        *,
        is_final: bool = True,
    ) -> None:
        """Send the session a pin of its own for each handle of these keys; for those that are
        absent here a miss, if that is final."""
        are_attached = self._are_attached(pending.session)
        entries: list[tuple[int, Fields]] = []
        for address, fetched in came:
            for index in pending.indexes.get(address, ()):
                entry = self._hold(pending.session, address, fetched, are_attached=are_attached)
                if entry is None:
                    if not is_final:
                        break
                    entry = self._missing(fetched.reason)
                entries.append((index, entry))
            else:
                pending.indexes.pop(address, None)
        _push(pending, entries)

    def _are_attached(self, session: Session) -> bool:
        """Whether all ranks of the session's engine have mapped the arena. A worker may attach
        again before the end of its previous session was detected."""
        seat = session.seat
        if seat is None:
            return True
        seats = [other.seat for other in self.sessions.values() if other.seat is not None]
        ranks = {other.rank for other in seats if other.engine_id == seat.engine_id}
        return len(ranks - {None}) >= seat.world_size

    def _hold(
        self, session: Session, address: QualifiedKey, fetched: Fetched, *, are_attached: bool
    ) -> Fields | None:
        """Pin the item for this session and return its fields, or why that failed; None if it is
        absent here."""
        if not are_attached:
            return {"state": "failed", "reason": MissReason.RANKS_NOT_ATTACHED}
        try:
            held = self.reads.hold(session, address, fetched)
        except BufferFull:
            self.counters.miss(MissReason.NO_ROOM)
            return {"state": "failed", "reason": MissReason.NO_ROOM}
        return None if held is None else self.reads.resident(held)

    def _missing(self, reason: MaybeMissed) -> Fields:
        self.counters.miss(reason)
        return {"state": "missing", "reason": reason or MissReason.ABSENT}


def _push(pending: _Pending, entries: list[tuple[int, Fields]]) -> None:
    for start in range(0, len(entries), ENTRIES_MAX):
        part = entries[start : start + ENTRIES_MAX]
        event = {"event": "settled", "id": pending.request.id, "entries": part}
        pending.session.anchor.send(event)
