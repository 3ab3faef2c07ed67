"""Claims: the right to produce a key, held by one engine of the fleet, with a lease.

The store decides. If the store, or the key's server in a cluster, is down or slow, the claim is
granted without it: a fault may cost a second encode, but no endless wait. A claim belongs to the
client's engine (or to the session, if there is no engine). A request in the state ENCODING renews
it. It ends with the publication of the item, on request, with the session that last requested it,
or with its lease.

Claims for several keys are all or none: no request holds one claim while it waits for another. An
attempt takes the claims as intents, in the order of the keys. It stops at the first key that is
held by another engine, or is being encoded by this one. It then releases what it took, and the next
attempt follows when that key is published or its claim may be free. So two engines that need the
same keys, in any order, never block each other.

Attempts and the other one-way messages of a session run one after another (`_Turns`): none sees
another's intermediate state. Called by `server`, `prefetch` and `insert` on the loop's thread;
`arbiter` calls the store.
"""

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arbiter import Arbiter, Decision
from lookup_buffer.node.connection import Session
from lookup_buffer.node.counters import RENEWED, UNASKED, Counters
from lookup_buffer.node.held_claims import HeldClaims
from lookup_buffer.node.locate import Waiting
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Encoding,
    ReleaseClaim,
    Unclaim,
)
from lookup_buffer.times import CLAIM_ANSWER_SECONDS, INTENT_SECONDS_MAX
from store import ClaimAnswer, Claiming, ClaimState, Releasing

WAITING_MAX = 4096
"""Bound on the waiting sets, and on the queued messages, of one session."""

Tell = Callable[[dict[str, Any]], None]


class Answer(NamedTuple):
    """The result of one attempt. `counted`: one of `CLAIM_ANSWERS`."""

    outcome: ClaimOutcome
    counted: str
    holder: str = ""
    state: str = ""
    remaining_seconds: float = 0.0

    def to_fields(self) -> dict[str, Any]:
        fields = self._asdict()
        del fields["counted"]
        return fields


STORED = Answer(ClaimOutcome.STORED, ClaimOutcome.STORED)


@dataclass(slots=True, eq=False)
class _Attempt:
    """One call of the store for one claim."""

    session: Session
    address: QualifiedKey
    state: ClaimState
    lease_seconds: float
    answer: "asyncio.Future[Answer]"
    """Cancelled if the request ended."""
    is_unasked: bool = False
    """It was granted without the store."""


class _Turns:
    """One turn of a session at a time. Messages precede attempts, which may be many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: asyncio.Future[None] | None = None
        self.messages: deque[asyncio.Future[None]] = deque()
        self.attempts: deque[asyncio.Future[None]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether a new turn begins at once."""
        return self._running is None

    def queue(self, queue: "deque[asyncio.Future[None]]") -> "asyncio.Future[None]":
        """A place in `messages` or `attempts`, which is done when its turn comes. `leave` it."""
        place: asyncio.Future[None] = self._loop.create_future()
        queue.append(place)
        if self._running is None:
            self._begin()
        return place

    def leave(self, place: "asyncio.Future[None]") -> None:
        """Its turn is over, or will not be taken. Idempotent."""
        place.cancel()
        if place is self._running:
            self._begin()

    def _begin(self) -> None:
        self._running = None
        while self._running is None and (queue := self.messages or self.attempts):
            place = queue.popleft()
            if not place.done():  # else its request was cancelled
                self._running = place
                place.set_result(None)


@dataclass(slots=True, eq=False)
class _ClaimSet:
    """One `ClaimAll`, until it is answered."""

    session: Session
    request: ClaimAll
    tell: Tell
    given_up: Callable[[], None]
    task: "asyncio.Task[None] | None" = None
    has_turn: bool = False
    is_over: bool = False

    def give_up(self) -> None:
        """End its wait. An attempt ends with the store's next answer: a release that overtook it
        could take the claim away from a later request of the engine."""
        self.is_over = True
        if self.task is not None and not self.has_turn:
            self.task.cancel()
        self.given_up()


@dataclass(slots=True)
class _SessionClaims:
    turns: _Turns
    sets: dict[int, _ClaimSet] = field(default_factory=dict)
    """By the request's id."""


@dataclass(slots=True)
class Claims:
    loop: asyncio.AbstractEventLoop
    held: HeldClaims
    arbiter: Arbiter
    identity: Identity
    shelf: Shelf
    waiting: Waiting
    reads: Reads
    registrar: Registrar
    counters: Counters
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _sessions: dict[Session, _SessionClaims] = field(default_factory=dict)

    # -- one claim

    async def claim(self, session: Session, request: Claim) -> Answer:
        """Answer as `Claim` says, at once or when the wait is over."""
        address = (request.namespace, request.key)
        state, lease_seconds = ClaimState(request.state), request.lease_seconds
        if state is ClaimState.INTENT:
            lease_seconds = min(lease_seconds, INTENT_SECONDS_MAX)
        until = self.loop.time() + request.wait_seconds
        with self.waiting.changes(address, until) as changed:
            while True:
                answer = await self._ask(session, address, state, lease_seconds)
                if answer.outcome is not ClaimOutcome.HELD or self.loop.time() >= until:
                    self.counters.add(f"claims_{answer.counted}")
                    return answer
                await _changed_or_over(changed, answer)

    def release(self, session: Session, request: ReleaseClaim) -> "asyncio.Future[bool]":
        """Release a claim; the result is whether it was still this engine's."""
        address = (request.namespace, request.key)
        self.held.drop(session, address)
        released: asyncio.Future[bool] = self.loop.create_future()
        self._give_back([address], session, partial(_set, released))
        return released

    def inserted(self, session: Session, address: QualifiedKey) -> None:
        """This engine stored the key: its publication drops the claim."""
        claim = self.held.drop(session, address)
        if claim is not None:
            if claim.encoding_since is not None:
                self.counters.encoded(time.monotonic() - claim.encoding_since)
            self.registrar.changed(address, "", self._token(session, address))

    def end(self, session: Session) -> None:
        """The session is over, and none of its requests waits any longer."""
        self._sessions.pop(session, None)
        self._give_back(self.held.drop_all(session), session)

    # -- claims for several keys

    def is_idle(self, session: Session) -> bool:
        """Whether a new request starts at once, with nothing queued before it."""
        return session not in self._sessions or self._sessions[session].turns.is_idle

    def claim_all(
        self,
        session: Session,
        request: ClaimAll,
        tell: Tell,
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the claims of `request`; `tell` gets the events that `ClaimAll` describes. If
        `unclaim` ends the wait, `given_up` is called instead."""
        sets = self._of(session).sets
        if len(sets) >= WAITING_MAX or request.id in sets:
            tell(_event(ClaimOutcome.FAILED))
            return
        one = sets[request.id] = _ClaimSet(session, request, tell, given_up)
        turns = self._of(session).turns
        place = turns.queue(turns.attempts)
        one.task = session.start(self._claim_all, one, place)
        if one.task is None:
            turns.leave(place)
        else:  # also if it is cancelled before it begins
            one.task.add_done_callback(lambda _: turns.leave(place))

    def encoding(self, session: Session, request: Encoding) -> None:
        """The engine encodes these keys now, even if others do, too."""
        addresses = {(request.namespace, key) for key in request.keys}
        if self.is_idle(session):  # else earlier messages come first
            seconds = request.lease_seconds
            addresses -= {each for each in addresses if self._promise(session, each, seconds)}
        if addresses:
            self._queue(session, partial(self._encode, session, addresses, request.lease_seconds))

    def unclaim(self, session: Session, request: Unclaim) -> None:
        """End a wait, and release claims that the engine no longer needs."""
        waiting = self._of(session).sets.pop(request.waiter, None)
        if waiting is not None:
            waiting.give_up()

        async def release() -> None:
            self._release(session, addresses)

        addresses = [(request.namespace, key) for key in request.keys]
        if self.is_idle(session):
            self._release(session, addresses)
        elif addresses:
            self._queue(session, release)

    def _of(self, session: Session) -> _SessionClaims:
        if session not in self._sessions:
            self._sessions[session] = _SessionClaims(_Turns(self.loop))
        return self._sessions[session]

    def _queue(self, session: Session, message: Callable[[], Awaitable[None]]) -> None:
        """Run `message` in a turn of its own. At the bound it is dropped; leases end its claims."""
        turns = self._of(session).turns
        if len(turns.messages) < WAITING_MAX:
            place = turns.queue(turns.messages)

            async def take_turn() -> None:
                try:
                    await place
                    await message()
                finally:
                    turns.leave(place)

            if session.start(take_turn) is None:
                turns.leave(place)

    def _promise(self, session: Session, address: QualifiedKey, lease_seconds: float) -> bool:
        """Whether the claim becomes ENCODING here now, and at the store only if the encode takes
        longer than most."""

        def keep(session: Session) -> None:
            self._queue(session, partial(keep_in_turn, session))

        async def keep_in_turn(session: Session) -> None:
            if self.held.lasts(session, address):  # else it was released meanwhile
                await self._encode(session, {address}, lease_seconds)

        return self.held.promise(session, address, lease_seconds, keep)

    async def _encode(
        self, session: Session, addresses: set[QualifiedKey], lease_seconds: float
    ) -> None:
        """Write the state ENCODING to the store."""
        async with asyncio.TaskGroup() as group:
            for address in sorted(addresses):
                claim = self._ask(session, address, ClaimState.ENCODING, lease_seconds)
                group.create_task(self._counted(claim))

    async def _claim_all(self, one: _ClaimSet, place: "asyncio.Future[None]") -> None:
        until = self.loop.time() + one.request.wait_seconds
        turns, watched = self._of(one.session).turns, None
        with ExitStack() as watch:
            while True:
                try:
                    await place
                    one.has_turn = True
                    address, answer = await self._take_all(one)
                    one.has_turn = False
                finally:
                    turns.leave(place)
                if one.is_over:
                    return
                if answer.outcome is not ClaimOutcome.HELD or self.loop.time() >= until:
                    break
                if watched is None:
                    one.tell(_event(ClaimOutcome.PENDING, address, answer.holder))
                if address != watched:
                    watch.close()
                    changed = watch.enter_context(self.waiting.changes(address, until))
                    watched = address
                await _changed_or_over(changed, answer)
                place = turns.queue(turns.attempts)
        self._of(one.session).sets.pop(one.request.id, None)
        one.tell(_event(answer.outcome, address, answer.holder))

    async def _take_all(self, one: _ClaimSet) -> tuple[QualifiedKey, Answer]:
        """Take all claims of a set, or none: then the result is that of the first one that this
        engine cannot have."""
        nowhere, granted = ("", ""), Answer(ClaimOutcome.GRANTED, ClaimOutcome.GRANTED)
        taken: list[QualifiedKey] = []
        try:
            for key in one.request.keys:
                address = (one.request.namespace, key)
                is_new = not self.held.lasts(one.session, address)
                answer = await self._take(one.session, address)
                if answer.outcome is not ClaimOutcome.GRANTED:
                    return address, answer
                if is_new:
                    taken.append(address)
                if one.is_over:
                    return nowhere, granted
            taken.clear()
            return nowhere, granted
        finally:
            self._roll_back(one.session, taken)

    def _roll_back(self, session: Session, taken: Sequence[QualifiedKey]) -> None:
        """A set that cannot have all its claims keeps none that it took. If the session has ended,
        `end` releases those that no other session of the engine uses."""
        if not session.has_ended:
            self._release(session, taken)

    async def _take(self, session: Session, address: QualifiedKey) -> Answer:
        encoding_seconds = self.held.encoding_seconds(session, address)
        if encoding_seconds:  # this engine's output is being stored
            held = ClaimOutcome.HELD
            return Answer(held, held, self.holder, remaining_seconds=encoding_seconds)
        claim = self._ask(session, address, ClaimState.INTENT, INTENT_SECONDS_MAX)
        return await self._counted(claim)

    async def _counted(self, claim: Awaitable[Answer]) -> Answer:
        answer = await claim
        self.counters.add(f"claims_{answer.counted}")
        return answer

    # -- one call of the store

    async def _ask(
        self, session: Session, address: QualifiedKey, state: ClaimState, lease_seconds: float
    ) -> Answer:
        """Take one claim, or learn who has it. The store has CLAIM_ANSWER_SECONDS to decide."""
        if self.shelf.holds(address) or self.waiting.locator.known(address[0], [address[1]])[0]:
            return STORED
        attempt = _Attempt(session, address, state, lease_seconds, self.loop.create_future())
        holder = f"{self.holder}:{int(time.time())}"  # since when, shown to people
        token = self._token(session, address)
        claiming = Claiming(*address, holder, token, state, lease_seconds)
        self.arbiter.claim(claiming, partial(self._decided, attempt))
        bound = self.loop.call_later(CLAIM_ANSWER_SECONDS, self._decided, attempt, None)
        try:
            return await attempt.answer
        finally:
            bound.cancel()

    def _decided(self, attempt: _Attempt, decision: Decision | None) -> None:
        """The store's reply; None if it was not reached in time. It may come after the request's
        end."""
        is_awaited = not attempt.answer.done()
        if decision is None:
            if is_awaited:
                attempt.answer.set_result(self._grant_unasked(attempt))
            return
        session, address = attempt.session, attempt.address
        found, outcome = decision.answer, decision.outcome
        if outcome is ClaimOutcome.STORED:  # else the next look-up may still miss
            self.reads.published(address, located=decision.heard)
        elif self.shelf.holds(address):
            # Inserted here since the request: the outcome does not consider copies of this node.
            if outcome is ClaimOutcome.GRANTED:
                self._give_back([address], session)
            outcome = ClaimOutcome.STORED
        is_kept = self.held.find(session, address) is not None
        if outcome is ClaimOutcome.GRANTED:
            if is_awaited or is_kept:
                self._keep(attempt, found.remaining_seconds, is_awaited=is_awaited)
            elif not attempt.is_unasked:  # nobody would ever release it
                self._give_back([address], session)
        if is_awaited:
            attempt.answer.set_result(_answer(outcome, found, is_kept=is_kept))

    def _grant_unasked(self, attempt: _Attempt) -> Answer:
        """Grant it without the store, which may still grant it: it is released like any other."""
        attempt.is_unasked = True
        self._keep(attempt, 0.0, is_awaited=True)
        return Answer(ClaimOutcome.GRANTED, UNASKED, self.holder, attempt.state.value)

    def _keep(self, attempt: _Attempt, granted_seconds: float, *, is_awaited: bool) -> None:
        """Keep the claim for this engine; the store has granted it for `granted_seconds`, 0 if
        unknown."""
        session, address = attempt.session, attempt.address
        claim = self.held.find(session, address)
        if claim is not None and is_awaited:
            # The engine attached again: the end of its previous session, which may be detected
            # later, must not release a claim that it still uses.
            claim.session = session
        self.held.keep(
            session, address, attempt.state,
            lease_seconds=attempt.lease_seconds, granted_seconds=granted_seconds,
        )  # fmt: skip

    def _release(self, session: Session, addresses: Sequence[QualifiedKey]) -> None:
        for address in addresses:
            self.held.drop(session, address)
        self._give_back(addresses, session)

    def _give_back(
        self,
        addresses: Sequence[QualifiedKey],
        session: Session,
        released: Callable[[bool], None] = lambda _: None,
    ) -> None:
        releasings = [Releasing(*each, self._token(session, each)) for each in addresses]
        self.arbiter.release(releasings, released)

    @property
    def holder(self) -> str:
        return f"{self.identity.node}:{self.identity.boot}"

    def _token(self, session: Session, address: QualifiedKey) -> str:
        """The fencing token: equal for all clients of an engine, and not guessable by others."""
        text = "\0".join((str(session.owner), *address)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=8).hexdigest()


async def _changed_or_over(changed: Callable[[], Awaitable[None]], answer: Answer) -> None:
    """Wait for a change of the key, or for the end of its holder's lease."""
    with suppress(TimeoutError):
        async with asyncio.timeout(answer.remaining_seconds):
            await changed()


def _answer(outcome: ClaimOutcome, found: ClaimAnswer, *, is_kept: bool) -> Answer:
    if outcome is ClaimOutcome.STORED:
        return STORED
    counted = RENEWED if is_kept and outcome is ClaimOutcome.GRANTED else outcome
    return Answer(outcome, counted, found.holder, found.state.value, found.remaining_seconds)


def _set(future: "asyncio.Future[bool]", result: bool) -> None:
    if not future.done():
        future.set_result(result)


def _event(
    outcome: ClaimOutcome, address: QualifiedKey = ("", ""), holder: str = ""
) -> dict[str, Any]:
    return {"event": "claimed", "outcome": outcome, "key": address[1], "holder": holder}
