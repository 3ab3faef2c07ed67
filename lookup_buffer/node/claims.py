"""Claims: the right to produce a key, held by one engine of the fleet, with a lease.

The store decides. If the store, or the key's server in a cluster, is down or slow, the claim is
granted without it: a fault may cost a second encode, but no endless wait. A claim belongs to the
client's engine (or to the session, if there is no engine). A request in the state ENCODING renews
it. It ends with the publication of the item, on request, with the session that last requested it,
or with its lease.
Called by `desk`, `claim_sets` and `intake` on the loop's thread; `arbiter` calls the store.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arbiter import Arbiter, Decision
from lookup_buffer.node.counters import RENEWED, UNASKED, Counters
from lookup_buffer.node.holdings import Holdings
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.resolver import Resolver
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.waiting import Waiting, Watcher
from lookup_buffer.protocol.messages import Claim, ClaimOutcome, ReleaseClaim
from lookup_buffer.times import CLAIM_ANSWER_SECONDS, INTENT_SECONDS_MAX
from store import ClaimAnswer, Claiming, ClaimState, Releasing

Answer = Callable[[dict[str, Any]], None]

CLOSE_SECONDS = 1.0
"""For claims still to be released at shutdown; leases end the rest."""
STORED = {"outcome": ClaimOutcome.STORED, "holder": "", "state": "", "remaining_seconds": 0.0}


def _nobody(fields: dict[str, Any]) -> None:
    """The callback of a release that no client requested."""


@dataclass(slots=True, eq=False)
class _Question:
    """One request for a claim, until it is answered."""

    session: Session
    address: QualifiedKey
    state: ClaimState
    lease_seconds: float
    wanted: Callable[[], bool]
    """Whether the client can still be answered."""
    until: float
    answer: Answer
    token: str
    answered: bool = False
    asking: bool = False
    look_again: bool = False
    """The key changed during the call to the store."""
    lease_end: asyncio.TimerHandle | None = None
    """Starts the next attempt when the holder's lease ends."""
    watcher: Watcher | None = None


@dataclass(slots=True)
class Claims:
    loop: asyncio.AbstractEventLoop
    holdings: Holdings
    arbiter: Arbiter
    identity: Identity
    shelf: Shelf
    waiting: Waiting
    resolver: Resolver
    registrar: Registrar
    counters: Counters
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def claim(
        self, session: Session, request: Claim, wanted: Callable[[], bool], answer: Answer
    ) -> None:
        """Answer as `Claim` says, now or when the wait is over.

        If the store is down, the claim is granted: a second encode is cheaper than an endless wait.
        """
        address = (request.namespace, request.key)
        state, lease_seconds = ClaimState(request.state), request.lease_seconds
        if state is ClaimState.INTENT:
            lease_seconds = min(lease_seconds, INTENT_SECONDS_MAX)
        question = _Question(
            session,
            address,
            state,
            lease_seconds,
            wanted,
            time.monotonic() + request.wait_seconds,
            answer,
            self._token(session, address),
        )
        if request.wait_seconds:
            look = partial(self._look, question)
            question.watcher = self.waiting.watch(address, question.until, look)
        self._look(question)

    def release(self, session: Session, request: ReleaseClaim, answer: Answer) -> None:
        """Release a claim; `answer` gets whether it was still this engine's."""
        address = (request.namespace, request.key)
        self.holdings.drop(session, address)
        self._give_back([address], session, answer)

    def release_all(self, session: Session) -> None:
        """The session has ended."""
        self._give_back(self.holdings.drop_all(session), session)

    def inserted(self, session: Session, address: QualifiedKey) -> None:
        """This engine stored the key: its publication drops the claim."""
        holding = self.holdings.drop(session, address)
        if holding is not None:
            if holding.encoding_since is not None:
                self.counters.encoded(time.monotonic() - holding.encoding_since)
            self.registrar.changed(address, "", self._token(session, address))

    def close(self) -> None:
        """Release what is pending, within CLOSE_SECONDS."""
        self.arbiter.close(CLOSE_SECONDS)

    # -- one question, on the loop's thread

    def _look(self, question: _Question) -> None:
        """Try to answer, unless a call to the store is running."""
        if question.answered:
            return
        if question.asking:
            question.look_again = True
        elif not question.wanted():
            self._settle(question, {})  # the client is gone; nothing is sent
        elif self.shelf.holds(question.address) or self._known_elsewhere(question.address):
            self._settle(question, STORED, ClaimOutcome.STORED)
        else:
            question.asking, question.look_again = True, False
            bound = self.loop.call_later(CLAIM_ANSWER_SECONDS, self._granted_unasked, question)
            holder = f"{self.holder}:{int(time.time())}"  # since when, shown to people
            claiming = Claiming(
                *question.address, holder, question.token, question.state, question.lease_seconds
            )
            self.arbiter.claim(claiming, partial(self._decided, question, bound))

    def _known_elsewhere(self, address: QualifiedKey) -> bool:
        namespace, key = address
        return self.waiting.locator.known(namespace, [key]) == [True]

    def _decided(
        self, question: _Question, bound: asyncio.TimerHandle, decision: Decision | None
    ) -> None:
        """The store's reply, or None if it was not reached."""
        bound.cancel()
        if decision is None:
            self._granted_unasked(question)
            return
        question.asking = False
        found, outcome = decision.answer, decision.outcome
        if outcome is ClaimOutcome.STORED:  # else the next look-up may still miss
            self.resolver.published(question.address, located=decision.heard)
        elif self.shelf.holds(question.address):
            # Inserted here since the request: the outcome does not consider copies of this node.
            if outcome is ClaimOutcome.GRANTED:
                self._give_back([question.address], question.session)
            outcome = ClaimOutcome.STORED
        is_kept = self.holdings.find(question.session, question.address) is not None
        if outcome is ClaimOutcome.GRANTED and (is_kept or not question.answered):
            self._hold(question, found.remaining_seconds)
        if question.answered:
            return  # granted without the store, which was slow; perhaps released since
        if outcome is ClaimOutcome.STORED:
            self._settle(question, STORED, outcome)
        elif outcome is ClaimOutcome.GRANTED:
            self._settle(question, _fields(outcome, found), RENEWED if is_kept else outcome)
        elif time.monotonic() >= question.until:
            self._settle(question, _fields(outcome, found), outcome)
        else:
            if question.lease_end is not None:
                question.lease_end.cancel()
            question.lease_end = self.loop.call_later(found.remaining_seconds, self._look, question)
            if question.look_again:
                self._look(question)

    def _granted_unasked(self, question: _Question) -> None:
        if question.answered:
            return
        # The store may still grant it: then it must be released like any other.
        self._hold(question, 0.0)
        unasked = ClaimAnswer(True, self.holder, question.state, 0.0)
        self._settle(question, _fields(ClaimOutcome.GRANTED, unasked), UNASKED)

    def _settle(self, question: _Question, fields: dict[str, Any], counted: str = "") -> None:
        """`counted`: one of `CLAIM_ANSWERS`."""
        if question.answered:
            return
        question.answered = True
        if question.watcher is not None:
            question.watcher.cancel()
        if question.lease_end is not None:
            question.lease_end.cancel()
        if question.wanted():
            self.counters.add(f"claims_{counted}")
            question.answer(fields)

    def _hold(self, question: _Question, granted_seconds: float) -> None:
        """Keep the claim for this engine; the store has granted it for `granted_seconds`, 0 if
        unknown."""
        session, address = question.session, question.address
        holding, is_wanted = self.holdings.find(session, address), question.wanted()
        if holding is None and not is_wanted:
            # The client is gone and would never release it.
            self._give_back([address], session)
            return
        if holding is not None and is_wanted:
            # The engine attached again: the end of its previous session, which may be detected
            # later, must not release a claim that it still uses.
            holding.session = session
        self.holdings.keep(
            session, address, question.state,
            lease_seconds=question.lease_seconds, granted_seconds=granted_seconds,
        )  # fmt: skip

    def _give_back(
        self, addresses: Sequence[QualifiedKey], session: Session, answer: Answer = _nobody
    ) -> None:
        releasings = [Releasing(*each, self._token(session, each)) for each in addresses]
        self.arbiter.release(releasings, lambda released: answer({"released": released}))

    @property
    def holder(self) -> str:
        return f"{self.identity.node}:{self.identity.boot}"

    def _token(self, session: Session, address: QualifiedKey) -> str:
        """The fencing token: equal for all clients of an engine, and not guessable by others."""
        text = "\0".join((str(session.owner), *address)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=8).hexdigest()


def _fields(outcome: ClaimOutcome, found: ClaimAnswer) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "holder": found.holder,
        "state": found.state.value,
        "remaining_seconds": found.remaining_seconds,
    }
