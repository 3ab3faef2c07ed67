"""Grants: hand-offs that clients of this node took and have not acknowledged yet.

The client has a token of this node. It maps to a lease of the owner, this node or another.
Only the owner decides: if the connection breaks during an acknowledgement, it is repeated over a
new one, until no taker could still win. Called by `takings` and `desk` on the loop's thread.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.owners import UNREACHED, Answer, Owners, again_seconds
from lookup_buffer.node.session import Session
from lookup_buffer.protocol.messages import Acknowledge, GiveBack
from lookup_buffer.times import LEASE_ANSWER_SECONDS
from store import Location


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease: the owner's lease id, its length, and the location and endpoint of another owner.
    `source` None: this node is the owner."""

    token: int
    seconds: float
    source: tuple[Location, str] | None


@dataclass(slots=True, eq=False)
class _Grant:
    session: Session
    leased: Leased
    until: float
    won: bool | None = None
    answers: list[Callable[[bool], None]] = field(default_factory=list)
    """Called once it is settled; empty unless it is being acknowledged."""
    unreached: int = 0
    """Number of requests to the owner that got no reply."""
    again: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Grants:
    loop: asyncio.AbstractEventLoop
    handoffs: Handoffs
    owners: Owners
    _grants: dict[int, _Grant] = field(default_factory=dict)

    def grant(self, session: Session, leased: Leased) -> int:
        """A token for the client of `session` that gets the leased item."""
        token = secrets.randbits(63)
        until = self.loop.time() + leased.seconds + LEASE_ANSWER_SECONDS
        self._grants[token] = _Grant(session, leased, until)
        self.loop.call_at(until, self._over, token)
        return token

    def acknowledge(self, session: Session, token: int, answer: Callable[[bool], None]) -> None:
        """`answer` whether the lease was valid; a repeated request gets the same answer."""
        grant = self._grants.get(token)
        if grant is None or grant.session is not session:
            answer(False)
        elif grant.won is not None:
            answer(grant.won)
        else:
            grant.answers.append(answer)
            if len(grant.answers) == 1:
                self._acknowledge(grant)

    def give_back(self, session: Session, token: int) -> None:
        """Give the item back, unless it is settled or being acknowledged."""
        grant = self._grants.get(token)
        if grant is not None and grant.session is session and not _is_asked(grant):
            del self._grants[token]
            self.give_back_lease(grant.leased)

    def give_back_lease(self, leased: Leased) -> None:
        if leased.source is None:
            self.handoffs.give_back(leased.token)
        else:
            request = GiveBack(self.owners.next_number(), leased.token)
            self.owners.at(*leased.source).say(request)

    def end(self, session: Session) -> None:
        """The session is over: give back what it did not acknowledge."""
        for token, grant in list(self._grants.items()):
            if grant.session is session:
                self.give_back(session, token)

    def _acknowledge(self, grant: _Grant) -> None:
        leased = grant.leased
        if leased.source is None:
            self._settle(grant, self.handoffs.acknowledge(leased.token))
        else:
            request = Acknowledge(self.owners.next_number(), leased.token)
            self.owners.at(*leased.source).ask(request, partial(self._answered, grant))

    def _answered(self, grant: _Grant, answer: Answer) -> None:
        if answer is UNREACHED:
            if grant.won is None:
                grant.unreached += 1
                pause = again_seconds(grant.unreached)
                grant.again = self.loop.call_later(pause, self._acknowledge, grant)
        else:
            self._settle(grant, answer.state == "won")

    def _settle(self, grant: _Grant, won: bool) -> None:
        if grant.won is None:
            grant.won = won
            if grant.again is not None:
                grant.again.cancel()
            answers, grant.answers = grant.answers, []
            for answer in answers:
                answer(won)

    def _over(self, token: int) -> None:
        grant = self._grants.pop(token, None)
        if grant is not None:
            self._settle(grant, False)


def _is_asked(grant: _Grant) -> bool:
    return grant.won is not None or bool(grant.answers)
