"""Claim sets: the right to produce several keys, all or none; nobody waits while holding.

An attempt takes the claims as intents in the order of the keys and stops at the first that another
engine has; what it took newly is given back, and the next attempt follows when that one key was
published or its claim may be free; likewise where the engine itself is encoding the key. So two who
want the same keys in any order never hold each other up. Attempts and what else a session says of
its claims take turns: none sees another's half work. Runs on the loop's thread.
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
from lookup_buffer.node.waiting import Vigil, Waiting
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
"""Sets that wait, and words that are due, of one session."""


@dataclass(slots=True, eq=False)
class _Wish:
    """One who wants a set of claims, until it is answered."""

    session: Session
    request: ClaimAll
    until: float
    answer: Answer
    given_up: Callable[[], None]
    taken: list[QualifiedKey] = field(default_factory=list)
    """What the attempt under way has taken that its engine did not hold before."""
    busy: bool = False
    """An attempt is due or under way."""
    look_again: bool = False
    """Something happened to the key that is waited for since the attempt began."""
    vigil: Vigil | None = None
    lease_end: asyncio.TimerHandle | None = None
    """Looks again when the holder's lease is over."""
    over: bool = False

    def end(self) -> None:
        """Idempotent."""
        self.over = True
        self.rest()

    def rest(self) -> None:
        """Not to be woken any more."""
        if self.vigil is not None:
            self.vigil.cancel()
        if self.lease_end is not None:
            self.lease_end.cancel()


@dataclass(slots=True)
class _Line:
    """What one session has asked for."""

    words: deque[Callable[[], None]] = field(default_factory=deque)
    """What the engine said of its claims; before attempts, of which there may be many."""
    attempts: deque[Callable[[], None]] = field(default_factory=deque)
    busy: bool = False
    """A turn is under way."""
    wishes: dict[int, _Wish] = field(default_factory=dict)


@dataclass(slots=True)
class ClaimSets:
    loop: asyncio.AbstractEventLoop
    claims: Claims
    holdings: Holdings
    waiting: Waiting
    _lines: dict[Session, _Line] = field(default_factory=dict)

    def is_idle(self, session: Session) -> bool:
        """Whether what is asked now is done now, and not behind others."""
        line = self._line(session)
        return not (line.busy or line.words or line.attempts)

    def ask(
        self,
        session: Session,
        request: ClaimAll,
        answer: Answer,
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer as `ClaimAll` says, until it is settled, or cancelled by `unclaim` and `given_up`
        told."""
        line = self._line(session)
        if len(line.wishes) >= WAITING_MAX or request.id in line.wishes:
            answer(_event(ClaimOutcome.FAILED))
            return
        until = self.loop.time() + request.wait_seconds
        wish = line.wishes[request.id] = _Wish(session, request, until, answer, given_up)
        self._look(wish)

    def encoding(self, session: Session, request: Encoding) -> None:
        """The engine is at work on these keys, whoever else may be."""
        left = set(request.keys)
        if self.is_idle(session):  # else what was said before has to be done before
            left = {key for key in left if not self._promise(session, request, key)}
        if left:
            self._say(session, partial(self._encode, session, request, left))

    def _promise(self, session: Session, request: Encoding, key: str) -> bool:
        address = (request.namespace, key)

        def turn(teller: Session) -> None:
            if self.holdings.lasts(teller, address):
                self._encode(teller, request, {key})
            else:  # given back meanwhile
                self._next(teller)

        def keep(teller: Session) -> None:
            self._say(teller, partial(turn, teller))

        return self.holdings.promise(session, address, request.lease_seconds, keep)

    def _encode(self, session: Session, request: Encoding, left: set[str]) -> None:
        """A turn: tell the store."""

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
        """End a wait, and give back what the engine does not want any more."""
        wish = self._line(session).wishes.pop(request.waiter, None)
        if wish is not None:
            wish.end()
            wish.given_up()

        def turn() -> None:
            self._release(session, [(request.namespace, key) for key in request.keys])
            self._next(session)

        if request.keys:
            self._say(session, turn)

    def end(self, session: Session) -> None:
        """The session is over; what it held is given back by `Claims`."""
        line = self._lines.pop(session, None)
        for wish in line.wishes.values() if line else ():
            wish.end()

    # -- turns: one under way at a time, each ends by `_next`

    def _line(self, session: Session) -> _Line:
        return self._lines.setdefault(session, _Line())

    def _say(self, session: Session, turn: Callable[[], None]) -> None:
        line = self._line(session)
        if len(line.words) < WAITING_MAX:  # else the leases end it
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

    def _look(self, wish: _Wish) -> None:
        """See whether all can be had, unless that is being done."""
        if wish.over:
            return
        if wish.busy:
            wish.look_again = True
            return
        wish.busy = True
        line = self._line(wish.session)
        line.attempts.append(partial(self._attempt, wish))
        self._begin(line)

    def _attempt(self, wish: _Wish) -> None:
        wish.look_again = False
        wish.taken.clear()
        self._take(wish, 0)

    def _take(self, wish: _Wish, index: int) -> None:
        """Take the claims from the one at `index` on."""
        session, request = wish.session, wish.request
        if wish.over:
            self._release(session, wish.taken)
            self._next(session)
            return
        if index == len(request.keys):
            self._settle(wish, _event(ClaimOutcome.GRANTED))
            self._next(session)
            return
        address = (request.namespace, request.keys[index])
        encoding_seconds = self.holdings.encoding_seconds(session, address)
        if encoding_seconds:  # its own output is on its way into the buffer
            fields = {"holder": self.claims.holder, "remaining_seconds": encoding_seconds}
            self._refused(wish, address, {"outcome": ClaimOutcome.HELD} | fields)
            return
        is_new = not self.holdings.lasts(session, address)

        def answered(fields: dict[str, Any]) -> None:
            if fields["outcome"] == ClaimOutcome.GRANTED:
                if is_new:
                    wish.taken.append(address)
                self._take(wish, index + 1)
            else:
                self._refused(wish, address, fields)

        self._claim(session, address, ClaimState.INTENT, INTENT_SECONDS_MAX, answered)

    def _refused(self, wish: _Wish, address: QualifiedKey, fields: dict[str, Any]) -> None:
        """One of the keys is another's, or is there already: hold none."""
        self._release(wish.session, wish.taken)
        if not wish.over:
            if fields["outcome"] == ClaimOutcome.STORED:
                self._settle(wish, _event(ClaimOutcome.STORED, address))
            elif self.loop.time() >= wish.until:
                self._settle(wish, _event(ClaimOutcome.HELD, address, fields["holder"]))
            else:
                self._wait(wish, address, fields)
        self._next(wish.session)

    def _wait(self, wish: _Wish, address: QualifiedKey, fields: dict[str, Any]) -> None:
        if wish.vigil is None:
            wish.answer(_event(ClaimOutcome.PENDING, address, fields["holder"]))
            if wish.over:
                return  # nobody was there to be told, and with that the session has ended
        look = partial(self._look, wish)
        if wish.vigil is None or wish.vigil.address != address:
            wish.rest()
            wish.vigil = self.waiting.watch(address, wish.until, look)
        if wish.lease_end is not None:
            wish.lease_end.cancel()
        wish.lease_end = self.loop.call_later(fields["remaining_seconds"], look)
        wish.busy = False
        if wish.look_again:
            self._look(wish)

    def _settle(self, wish: _Wish, event: dict[str, Any]) -> None:
        wish.end()
        self._line(wish.session).wishes.pop(wish.request.id, None)
        wish.answer(event)

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
