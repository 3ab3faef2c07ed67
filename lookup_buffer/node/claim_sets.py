"""Claim sets: claims for several keys, all or none. No request holds one claim while it waits for
another.

An attempt takes the claims as intents, in the order of the keys. It stops at the first key that is
held by another engine, or is being encoded by this one. It then releases the claims that it took,
and the next attempt follows when that key is published or its claim may be free. So two engines
that need the same keys, in any order, never block each other.

Attempts and the other claim messages of a session run one after another: none sees another's
intermediate state. Called by `desk` and `prefetches` on the loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.claims import Answer, Claims
from lookup_buffer.node.holdings import Holdings
from lookup_buffer.node.session import Session
from lookup_buffer.node.waiting import Waiting, Watcher
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Encoding,
    ReleaseClaim,
    Unclaim,
)
from lookup_buffer.times import INTENT_SECONDS_MAX
from store import ClaimState

WAITING_MAX = 4096
"""Bound on the waiting sets, and on the queued messages, of one session."""


@dataclass(slots=True, eq=False)
class _PendingSet:
    """One request for a set of claims, until it is answered."""

    session: Session
    request: ClaimAll
    until: float
    answer: Answer
    given_up: Callable[[], None]
    taken: list[QualifiedKey] = field(default_factory=list)
    """Claims that the current attempt took and that its engine did not hold before."""
    busy: bool = False
    """An attempt is queued or running."""
    look_again: bool = False
    """The key that is waited for changed since the attempt began."""
    watcher: Watcher | None = None
    lease_end: asyncio.TimerHandle | None = None
    """Starts the next attempt when the holder's lease ends."""
    over: bool = False

    def end(self) -> None:
        """Idempotent."""
        self.over = True
        self.rest()

    def rest(self) -> None:
        """Cancel its wake-ups."""
        if self.watcher is not None:
            self.watcher.cancel()
        if self.lease_end is not None:
            self.lease_end.cancel()


@dataclass(slots=True)
class _Line:
    """The queue of one session."""

    words: deque[Callable[[], None]] = field(default_factory=deque)
    """The engine's messages about its claims; they precede attempts, which may be many."""
    attempts: deque[Callable[[], None]] = field(default_factory=deque)
    busy: bool = False
    """A turn is running."""
    pending_sets: dict[int, _PendingSet] = field(default_factory=dict)


@dataclass(slots=True)
class ClaimSets:
    loop: asyncio.AbstractEventLoop
    claims: Claims
    holdings: Holdings
    waiting: Waiting
    _lines: dict[Session, _Line] = field(default_factory=dict)

    def is_idle(self, session: Session) -> bool:
        """Whether a new request starts at once, with nothing queued before it."""
        line = self._line(session)
        return not (line.busy or line.words or line.attempts)

    def ask(
        self,
        session: Session,
        request: ClaimAll,
        answer: Answer,
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the claims of `request`; `answer` gets the events that `ClaimAll` describes. If
        `unclaim` ends the wait, `given_up` is called instead."""
        line = self._line(session)
        if len(line.pending_sets) >= WAITING_MAX or request.id in line.pending_sets:
            answer(_event(ClaimOutcome.FAILED))
            return
        until = self.loop.time() + request.wait_seconds
        pending = line.pending_sets[request.id] = _PendingSet(
            session, request, until, answer, given_up
        )
        self._look(pending)

    def encoding(self, session: Session, request: Encoding) -> None:
        """The engine encodes these keys now, even if others do, too."""
        left = set(request.keys)
        if self.is_idle(session):  # else earlier messages come first
            left = {key for key in left if not self._promise(session, request, key)}
        if left:
            self._say(session, partial(self._encode, session, request, left))

    def _promise(self, session: Session, request: Encoding, key: str) -> bool:
        address = (request.namespace, key)

        def turn(teller: Session) -> None:
            if self.holdings.lasts(teller, address):
                self._encode(teller, request, {key})
            else:  # released meanwhile
                self._next(teller)

        def keep(teller: Session) -> None:
            self._say(teller, partial(turn, teller))

        return self.holdings.promise(session, address, request.lease_seconds, keep)

    def _encode(self, session: Session, request: Encoding, left: set[str]) -> None:
        """One turn: write the state ENCODING to the store."""

        def answered(key: str, _: dict[str, Any]) -> None:
            left.discard(key)
            if not left:
                self._next(session)

        for key in sorted(left):
            self._claim(
                session,
                (request.namespace, key),
                ClaimState.ENCODING,
                request.lease_seconds,
                partial(answered, key),
            )

    def unclaim(self, session: Session, request: Unclaim) -> None:
        """End a wait, and release claims that the engine no longer needs."""
        pending = self._line(session).pending_sets.pop(request.waiter, None)
        if pending is not None:
            pending.end()
            pending.given_up()

        def turn() -> None:
            self._release(session, [(request.namespace, key) for key in request.keys])
            self._next(session)

        if request.keys:
            self._say(session, turn)

    def end(self, session: Session) -> None:
        """The session is over; `Claims` releases what it held."""
        line = self._lines.pop(session, None)
        for pending in line.pending_sets.values() if line else ():
            pending.end()

    # -- turns: one runs at a time; each ends with `_next`

    def _line(self, session: Session) -> _Line:
        return self._lines.setdefault(session, _Line())

    def _say(self, session: Session, turn: Callable[[], None]) -> None:
        line = self._line(session)
        if (
            len(line.words) < WAITING_MAX
        ):  # at the bound the message is dropped; leases end its claims
            line.words.append(turn)
            self._begin(line)

    def _begin(self, line: _Line) -> None:
        if not line.busy and (line.words or line.attempts):
            line.busy = True
            self.loop.call_soon((line.words or line.attempts).popleft())

    def _next(self, session: Session) -> None:
        line = self._lines.get(session)
        if line is not None:  # else the session has ended
            line.busy = False
            self._begin(line)

    # -- attempts

    def _look(self, pending: _PendingSet) -> None:
        """Queue an attempt, unless one is queued or running."""
        if pending.over:
            return
        if pending.busy:
            pending.look_again = True
            return
        pending.busy = True
        line = self._line(pending.session)
        line.attempts.append(partial(self._attempt, pending))
        self._begin(line)

    def _attempt(self, pending: _PendingSet) -> None:
        pending.look_again = False
        pending.taken.clear()
        self._take(pending, 0)

    def _take(self, pending: _PendingSet, index: int) -> None:
        """Take the claims from position `index` on."""
        session, request = pending.session, pending.request
        if pending.over:
            self._release(session, pending.taken)
            self._next(session)
            return
        if index == len(request.keys):
            self._settle(pending, _event(ClaimOutcome.GRANTED))
            self._next(session)
            return
        address = (request.namespace, request.keys[index])
        encoding_seconds = self.holdings.encoding_seconds(session, address)
        if encoding_seconds:  # this engine's output is being stored
            fields = {"holder": self.claims.holder, "remaining_seconds": encoding_seconds}
            self._refused(pending, address, {"outcome": ClaimOutcome.HELD} | fields)
            return
        is_new = not self.holdings.lasts(session, address)

        def answered(fields: dict[str, Any]) -> None:
            if fields["outcome"] == ClaimOutcome.GRANTED:
                if is_new:
                    pending.taken.append(address)
                self._take(pending, index + 1)
            else:
                self._refused(pending, address, fields)

        self._claim(session, address, ClaimState.INTENT, INTENT_SECONDS_MAX, answered)

    def _refused(self, pending: _PendingSet, address: QualifiedKey, fields: dict[str, Any]) -> None:
        """One of the keys is held elsewhere or stored: release all."""
        self._release(pending.session, pending.taken)
        if not pending.over:
            if fields["outcome"] == ClaimOutcome.STORED:
                self._settle(pending, _event(ClaimOutcome.STORED, address))
            elif self.loop.time() >= pending.until:
                self._settle(pending, _event(ClaimOutcome.HELD, address, fields["holder"]))
            else:
                self._wait(pending, address, fields)
        self._next(pending.session)

    def _wait(self, pending: _PendingSet, address: QualifiedKey, fields: dict[str, Any]) -> None:
        if pending.watcher is None:
            pending.answer(_event(ClaimOutcome.PENDING, address, fields["holder"]))
            if pending.over:
                return  # the send failed, which ended the session
        look = partial(self._look, pending)
        if pending.watcher is None or pending.watcher.address != address:
            pending.rest()
            pending.watcher = self.waiting.watch(address, pending.until, look)
        if pending.lease_end is not None:
            pending.lease_end.cancel()
        pending.lease_end = self.loop.call_later(fields["remaining_seconds"], look)
        pending.busy = False
        if pending.look_again:
            self._look(pending)

    def _settle(self, pending: _PendingSet, event: dict[str, Any]) -> None:
        pending.end()
        self._line(pending.session).pending_sets.pop(pending.request.id, None)
        pending.answer(event)

    # -- single claims

    def _claim(
        self,
        session: Session,
        address: QualifiedKey,
        state: ClaimState,
        lease_seconds: float,
        answer: Answer,
    ) -> None:
        namespace, key = address
        request = Claim(0, namespace, key, lease_seconds, state.value, 0.0)
        self.claims.claim(session, request, lambda: not session.over, answer)

    def _release(self, session: Session, addresses: list[QualifiedKey]) -> None:
        for namespace, key in addresses:
            self.claims.release(session, ReleaseClaim(0, namespace, key), lambda _: None)


def _event(
    outcome: ClaimOutcome, address: QualifiedKey = ("", ""), holder: str = ""
) -> dict[str, Any]:
    return {"event": "claimed", "outcome": outcome, "key": address[1], "holder": holder}
