"""Claims held by engines of this node, as far as the node knows.

An entry exists from the moment when the store has, or may have, granted a claim, until the claim is
released or its lease has certainly ended. This module makes no store calls; `claims` uses it on the
loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Owner, Session
from lookup_buffer.times import PROMISE_SECONDS
from store import ClaimState

FORGET_SECONDS = 1.0
"""An entry is dropped this long after the end of its lease."""


@dataclass(slots=True)
class HeldClaim:
    """The claim of one engine for one key."""

    session: Session
    """The session that last requested it; its end releases the claim."""
    state: ClaimState
    ends_at: float
    granted_until: float
    """Until when the store has certainly granted it."""
    encoding_since: float | None = None
    promise: asyncio.TimerHandle | None = None
    """Writes the state ENCODING to the store, which does not have it yet."""

    def begin_to_encode(self, now: float) -> None:
        """Enter the state ENCODING, or stay in it."""
        self.state = ClaimState.ENCODING
        if self.encoding_since is None:
            self.encoding_since = now

    def forget_promise(self) -> None:
        if self.promise is not None:
            self.promise.cancel()
            self.promise = None


@dataclass(slots=True)
class HeldClaims:
    """By owner and key: all clients of an engine share its claims."""

    loop: asyncio.AbstractEventLoop
    _held: dict[tuple[Owner, QualifiedKey], HeldClaim] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of claims of this node's engines. On any thread."""
        return len(self._held)

    def find(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """The claim of this session's engine; its lease may have ended."""
        return self._held.get((session.owner, address))

    def lasts(self, session: Session, address: QualifiedKey) -> bool:
        """Whether this engine has the claim, as far as the node knows."""
        claim = self.find(session, address)
        return claim is not None and claim.ends_at > self.loop.time()

    def encoding_seconds(self, session: Session, address: QualifiedKey) -> float:
        """Seconds left of the claim under which this engine encodes the key; 0 if it does not."""
        claim = self.find(session, address)
        if claim is None or claim.state is not ClaimState.ENCODING:
            return 0.0
        return max(0.0, claim.ends_at - self.loop.time())

    def keep(
        self,
        session: Session,
        address: QualifiedKey,
        state: ClaimState,
        *,
        lease_seconds: float,
        granted_seconds: float,
    ) -> None:
        """The claim is, or may be, this engine's, or is renewed; the store has granted it for
        `granted_seconds`."""
        now = self.loop.time()
        ends_at, granted_until = now + lease_seconds, now + granted_seconds
        claim = self.find(session, address)
        if claim is None:
            claim = HeldClaim(session, state, ends_at, granted_until)
            self._held[session.owner, address] = claim
            self._forget_at_end((session.owner, address), claim)
        claim.ends_at = max(claim.ends_at, ends_at)
        claim.granted_until = granted_until
        if state is ClaimState.ENCODING:
            claim.begin_to_encode(now)
            claim.forget_promise()

    def promise(
        self,
        session: Session,
        address: QualifiedKey,
        lease_seconds: float,
        keep: Callable[[Session], None],
    ) -> bool:
        """Change this engine's intent to ENCODING here, and call `keep`, which writes that to
        the store, only shortly before the intent expires: most encodes are published by then,
        which ends the claim. `keep` gets the session that uses the claim. Returns False if there
        is no intent that still lasts."""
        claim = self.find(session, address)
        if claim is None or claim.state is not ClaimState.INTENT:
            return False
        now = self.loop.time()
        left = claim.granted_until - PROMISE_SECONDS - now
        if left <= 0:
            return False
        claim.session = session
        claim.begin_to_encode(now)
        claim.ends_at = now + lease_seconds
        claim.promise = self.loop.call_later(left, lambda: keep(claim.session))
        return True

    def drop(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """Remove the engine's entry and return it."""
        return self._drop((session.owner, address))

    def drop_all(self, session: Session) -> list[QualifiedKey]:
        """The session has ended: remove its entries; returns the keys whose claims are to be
        released."""
        ended = [held for held, claim in self._held.items() if claim.session is session]
        for held in ended:
            self._drop(held)
        return [address for _, address in ended]

    def _drop(self, held: tuple[Owner, QualifiedKey]) -> HeldClaim | None:
        claim = self._held.pop(held, None)
        if claim is not None:
            claim.forget_promise()
        return claim

    def _forget_at_end(self, held: tuple[Owner, QualifiedKey], claim: HeldClaim) -> None:
        """Drop the entry when its lease, however often renewed, has certainly ended. One timer
        an entry."""
        if self._held.get(held) is not claim:
            return
        left = claim.ends_at - self.loop.time()
        if left <= 0:
            self._drop(held)
        else:
            self.loop.call_later(left + FORGET_SECONDS, self._forget_at_end, held, claim)
