"""The claims that engines of this node hold, as far as the node knows.

Bookkeeping without I/O, on the loop's thread. `claims` keeps it, `registrar` and `server` count it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Owner, Session
from lookup_buffer.node.shares import Shares
from store import Claiming, ClaimState

CLAIMS_MAX: Final = 16_384
"""Bound on the claims of all clients, see `shares`: of one engine at most half as many. Each counts
from when it is asked for until the store has answered its release."""
CLAIMS_OWN: Final = 8
FORGET_SECONDS: Final = 1.0
"""The entry of a claim is dropped this long after the end of its lease."""


@dataclass(slots=True, eq=False)
class HeldClaim:
    """The claim of one engine for one key."""

    address: QualifiedKey
    session: Session
    """The session that last requested it; its end releases the claim."""
    ends_at: float
    granted_until: float = 0.0
    """Until when the store has certainly granted it."""
    encoding_since: float | None = None
    """None: it is an intent."""
    promise: asyncio.TimerHandle | None = None
    """Writes the state ENCODING to the store, which does not have it yet."""

    end: asyncio.TimerHandle | None = None
    """Drops the entry after the end of its lease."""

    def forget_promise(self) -> None:
        if self.promise is not None:
            self.promise.cancel()
            self.promise = None


@dataclass(slots=True)
class HeldClaims:
    """By owner and key: all clients of an engine share its claims, as far as the node knows.

    An entry exists from the moment when the store has, or may have, granted a claim, until the
    claim is released or its lease has certainly ended.
    """

    loop: asyncio.AbstractEventLoop
    shares: Shares = field(default_factory=lambda: Shares("claims", CLAIMS_MAX, CLAIMS_OWN))
    _held: dict[tuple[Owner, QualifiedKey], HeldClaim] = field(default_factory=dict)
    _asked: Counter[tuple[Owner, QualifiedKey]] = field(default_factory=Counter)
    """How often each is being asked for."""

    def __len__(self) -> int:
        """The number of claims of this node's engines. On any thread."""
        return len(self._held)

    def find(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """The claim of this session's engine; its lease may have ended."""
        return self._held.get((session.owner, address))

    def lasting(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """The claim, if this engine has it as far as the node knows."""
        claim = self.find(session, address)
        return claim if claim is not None and claim.ends_at > self.loop.time() else None

    @contextmanager
    def room(self, session: Session, address: QualifiedKey) -> Iterator[None]:
        """Room for this claim while it is asked for.

        Raises:
            BufferFull: it would be one more of this engine, which has too many.
        """
        owner, is_new = session.owner, self.find(session, address) is None
        if is_new:
            self.shares.check(owner)
            self.shares.add(owner)
        self._asked[owner, address] += 1
        try:
            yield
        finally:
            if is_new:
                self.shares.add(owner, -1)
            self._asked[owner, address] -= 1
            if not self._asked[owner, address]:
                del self._asked[owner, address]

    def keep(self, session: Session, claiming: Claiming, granted_seconds: float) -> None:
        """The claim is, or may be, this engine's, or is renewed; the store has granted it for
        `granted_seconds`, 0 if unknown."""
        now, address = self.loop.time(), (claiming.namespace, claiming.key)
        claim = self.find(session, address)
        ends_at = now + claiming.lease_seconds
        if claim is None:
            claim = self._held[session.owner, address] = HeldClaim(address, session, ends_at)
            self.shares.add(session.owner)
            self._forget_at_end(claim)
        claim.ends_at = max(claim.ends_at, ends_at)
        claim.granted_until = now + granted_seconds
        if claiming.state is ClaimState.ENCODING:
            claim.encoding_since = now if claim.encoding_since is None else claim.encoding_since
            claim.forget_promise()

    def drop(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """Remove the engine's entry and return it."""
        claim = self._held.pop((session.owner, address), None)
        if claim is not None:
            self.shares.add(session.owner, -1)
            claim.forget_promise()
            if claim.end is not None:
                claim.end.cancel()
        return claim

    def begin_release(self, session: Session, address: QualifiedKey) -> bool:
        """Remove the engine's entry. Returns whether to tell the store, and counts that.

        The store has no claim that the engine neither has nor asks for. If this is one more of an
        engine that has too many, the lease ends the claim.
        """
        is_held = self.drop(session, address) is not None
        is_asked = (session.owner, address) in self._asked
        if is_held or (is_asked and self.shares.fits(session.owner)):
            self.count_release(session)
            return True
        return False

    def count_release(self, session: Session, change: int = 1) -> None:
        """So many more are sent to the store and not answered."""
        self.shares.add(session.owner, change)

    def of_session(self, session: Session) -> list[QualifiedKey]:
        """The keys of the claims that end with the session."""
        return [claim.address for claim in self._held.values() if claim.session is session]

    def _forget_at_end(self, claim: HeldClaim) -> None:
        """Drop the entry when its lease, however often renewed, has certainly ended. One timer
        an entry."""
        left = claim.ends_at - self.loop.time()
        if left <= 0:
            self.drop(claim.session, claim.address)
        else:
            claim.end = self.loop.call_later(left + FORGET_SECONDS, self._forget_at_end, claim)
