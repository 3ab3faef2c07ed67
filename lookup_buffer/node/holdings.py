"""Holdings: the claims that engines of this node have, as far as is known here.

What the store has granted, or may have, from then until it is given back or its lease has surely
ended. Asks the store nothing; that is for `claims`. On the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.session import Owner, Session
from lookup_buffer.times import PROMISE_SECONDS
from store import ClaimState

FORGET_SECONDS = 1.0
"""How long after the end of a lease it is forgotten."""


@dataclass(slots=True)
class Holding:
    """The claim of one engine for one key."""

    session: Session
    """Whose end gives it back: the one that last asked for it."""
    state: ClaimState
    ends_at: float
    granted_until: float
    """What the store has surely granted."""
    encoding_since: float | None = None
    promise: asyncio.TimerHandle | None = None
    """To tell the store of the state, which it does not know yet."""

    def begin_to_encode(self, now: float) -> None:
        """Or go on with it."""
        self.state = ClaimState.ENCODING
        if self.encoding_since is None:
            self.encoding_since = now

    def forget_promise(self) -> None:
        if self.promise is not None:
            self.promise.cancel()
            self.promise = None


@dataclass(slots=True)
class Holdings:
    """By owner and key: all clients of an engine share its claims."""

    loop: asyncio.AbstractEventLoop
    _held: dict[tuple[Owner, QualifiedKey], Holding] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many claims engines of this node have. From any thread."""
        return len(self._held)

    def find(self, session: Session, address: QualifiedKey) -> Holding | None:
        """What this session's engine has; its lease may be over."""
        return self._held.get((session.owner, address))

    def lasts(self, session: Session, address: QualifiedKey) -> bool:
        """Whether this engine has the claim, as far as is known here."""
        holding = self.find(session, address)
        return holding is not None and holding.ends_at > self.loop.time()

    def encoding_seconds(self, session: Session, address: QualifiedKey) -> float:
        """How long the claim lasts by which this engine has said that it is encoding the key."""
        holding = self.find(session, address)
        if holding is None or holding.state is not ClaimState.ENCODING:
            return 0.0
        return max(0.0, holding.ends_at - self.loop.time())

    def keep(
        self,
        session: Session,
        address: QualifiedKey,
        state: ClaimState,
        *,
        lease_seconds: float,
        granted_seconds: float,
    ) -> None:
        """The claim is, or may be, this engine's now, or goes on to be; the store has granted it
        for `granted_seconds`."""
        now = self.loop.time()
        ends_at, granted_until = now + lease_seconds, now + granted_seconds
        holding = self.find(session, address)
        if holding is None:
            holding = Holding(session, state, ends_at, granted_until)
            self._held[session.owner, address] = holding
            self._forget_at_end((session.owner, address), holding)
        holding.ends_at = max(holding.ends_at, ends_at)
        holding.granted_until = granted_until
        if state is ClaimState.ENCODING:
            holding.begin_to_encode(now)
            holding.forget_promise()

    def promise(
        self,
        session: Session,
        address: QualifiedKey,
        lease_seconds: float,
        keep: Callable[[Session], None],
    ) -> bool:
        """Take this engine's intent for ENCODING, and call `keep`, which tells the store, only when
        it is about to lapse: most encodes are over and published by then, and that ends the claim.
        `keep` gets the session that goes on with it. False where there is no intent that lasts."""
        holding = self.find(session, address)
        if holding is None or holding.state is not ClaimState.INTENT:
            return False
        now = self.loop.time()
        left = holding.granted_until - PROMISE_SECONDS - now
        if left <= 0:
            return False
        holding.session = session
        holding.begin_to_encode(now)
        holding.ends_at = now + lease_seconds
        holding.promise = self.loop.call_later(left, lambda: keep(holding.session))
        return True

    def drop(self, session: Session, address: QualifiedKey) -> Holding | None:
        """This engine has it no more. What it was, if it was there."""
        return self._drop((session.owner, address))

    def drop_all(self, session: Session) -> list[QualifiedKey]:
        """The session has ended: the keys of what it was to give back."""
        ended = [held for held, holding in self._held.items() if holding.session is session]
        for held in ended:
            self._drop(held)
        return [address for _, address in ended]

    def _drop(self, held: tuple[Owner, QualifiedKey]) -> Holding | None:
        holding = self._held.pop(held, None)
        if holding is not None:
            holding.forget_promise()
        return holding

    def _forget_at_end(self, held: tuple[Owner, QualifiedKey], holding: Holding) -> None:
        """When its lease, however often renewed, has surely ended. One timer a holding."""
        if self._held.get(held) is not holding:
            return
        left = holding.ends_at - self.loop.time()
        if left <= 0:
            self._drop(held)
        else:
            self.loop.call_later(left + FORGET_SECONDS, self._forget_at_end, held, holding)
