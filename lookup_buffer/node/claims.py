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
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arbiter import Answer, Arbiter
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Connection, Fields, Owner, Session
from lookup_buffer.node.counters import RENEWED, UNASKED, Counters
from lookup_buffer.node.locate import Waiting
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Encoding,
    ReleaseClaim,
    Unclaim,
)
from lookup_buffer.times import INTENT_SECONDS_MAX, PROMISE_SECONDS
from store import Claiming, ClaimState, Releasing

WAITING_MAX = 4096
"""Bound on the sets of one session that are not answered."""
ACTIVE_MAX = 2 * WAITING_MAX
"""Bound on the requests of one session that wait for their turn: those sets, and messages."""
FORGET_SECONDS = 1.0
"""The entry of a claim is dropped this long after the end of its lease."""

Tell = Callable[[Fields], None]
Request = Callable[[], Coroutine[Any, Any, None]]


# -- claims that engines of this node hold


@dataclass(slots=True, eq=False)
class HeldClaim:
    """The claim of one engine for one key."""

    address: QualifiedKey
    session: Session
    """The session that last requested it; its end releases the claim."""
    ends_at: float = 0.0
    granted_until: float = 0.0
    """Until when the store has certainly granted it."""
    encoding_since: float | None = None
    """None: it is an intent."""
    promise: asyncio.TimerHandle | None = None
    """Writes the state ENCODING to the store, which does not have it yet."""

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

    def keep(self, session: Session, claiming: Claiming, granted_seconds: float) -> None:
        """The claim is, or may be, this engine's, or is renewed; the store has granted it for
        `granted_seconds`, 0 if unknown."""
        now, address = self.loop.time(), (claiming.namespace, claiming.key)
        claim = self.find(session, address)
        is_new = claim is None
        if claim is None:
            claim = self._held[session.owner, address] = HeldClaim(address, session)
        claim.ends_at = max(claim.ends_at, now + claiming.lease_seconds)
        claim.granted_until = now + granted_seconds
        if claiming.state is ClaimState.ENCODING:
            claim.encoding_since = now if claim.encoding_since is None else claim.encoding_since
            claim.forget_promise()
        if is_new:
            self._forget_at_end(claim)

    def drop(self, session: Session, address: QualifiedKey) -> HeldClaim | None:
        """Remove the engine's entry and return it."""
        claim = self._held.pop((session.owner, address), None)
        if claim is not None:
            claim.forget_promise()
        return claim

    def of_session(self, session: Session) -> list[QualifiedKey]:
        """The keys of the claims that end with the session."""
        return [claim.address for claim in self._held.values() if claim.session is session]

    def _forget_at_end(self, claim: HeldClaim) -> None:
        """Drop the entry when its lease, however often renewed, has certainly ended. One timer
        an entry."""
        if self.find(claim.session, claim.address) is not claim:
            return
        left = claim.ends_at - self.loop.time()
        if left <= 0:
            self.drop(claim.session, claim.address)
        else:
            self.loop.call_later(left + FORGET_SECONDS, self._forget_at_end, claim)


# -- the requests of one session


@dataclass(slots=True)
class _Turns:
    """The order of a session's messages and attempts."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    attempt: asyncio.Lock = field(default_factory=asyncio.Lock)
    """An attempt takes it before `turn`: so messages precede attempts, which may be many."""
    active: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Those that have their turn, or wait for it; from the moment of their request."""
    sets: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    """Those that are not answered, by the request's id."""


@dataclass(slots=True)
class Claims:
    loop: asyncio.AbstractEventLoop
    held: HeldClaims
    arbiter: Arbiter
    identity: Identity
    arena: Arena
    waiting: Waiting
    reads: Reads
    registrar: Registrar
    counters: Counters
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _sessions: defaultdict[Session, _Turns] = field(default_factory=lambda: defaultdict(_Turns))

    async def claim(self, _: Connection, session: Session, request: Claim) -> Fields:
        """Answer as `Claim` says, at once or when the wait is over."""
        state, lease_seconds = ClaimState(request.state), request.lease_seconds
        if state is ClaimState.INTENT:
            lease_seconds = min(lease_seconds, INTENT_SECONDS_MAX)
        address = (request.namespace, request.key)
        attempt = partial(self._ask, session, address, state, lease_seconds)
        answer = await self._counted(self._repeat(attempt, request.wait_seconds))
        return {
            "outcome": answer.outcome,
            "holder": answer.holder,
            "state": answer.state,
            "remaining_seconds": answer.remaining_seconds,
        }

    async def release(self, _: Connection, session: Session, request: ReleaseClaim) -> Fields:
        """Release a claim; answers whether it was still this engine's."""
        (released,) = self._release(session, [(request.namespace, request.key)])
        return {"released": await released}

    def inserted(self, session: Session, address: QualifiedKey) -> None:
        """This engine stored the key: its publication drops the claim."""
        claim = self.held.drop(session, address)
        if claim is not None:
            if claim.encoding_since is not None:
                self.counters.encoded(self.loop.time() - claim.encoding_since)
            self.registrar.changed(address, "", self._token(session, address))

    def end(self, session: Session) -> None:
        """The session is over, and none of its requests waits any longer."""
        self._sessions.pop(session, None)
        self._release(session, self.held.of_session(session))

    # -- one-way messages

    def is_idle(self, session: Session) -> bool:
        """Whether a new request starts at once, with nothing queued before it."""
        return session not in self._sessions or not self._sessions[session].active

    def claim_all(self, session: Session, request: ClaimAll, tell: Tell) -> None:
        """Take the claims of `request`; `tell` gets the events that `ClaimAll` describes."""
        turns = self._sessions[session]
        if len(turns.sets) >= WAITING_MAX or request.id in turns.sets:
            tell(_event(Answer(ClaimOutcome.FAILED)))
            return
        task = self._start(session, partial(self._claim_all, session, request, tell))
        if task is not None:
            turns.sets[request.id] = task
            task.add_done_callback(lambda _: turns.sets.pop(request.id))

    def encoding(self, session: Session, request: Encoding) -> None:
        """The engine encodes these keys now, even if others do, too."""
        addresses = {(request.namespace, key) for key in request.keys}
        if self.is_idle(session):  # else earlier messages come first
            seconds = request.lease_seconds
            addresses -= {each for each in addresses if self._promise(session, each, seconds)}
        if addresses:
            encode = partial(self._encode, session, addresses, request.lease_seconds)
            self._queue(session, encode)

    def unclaim(self, session: Session, request: Unclaim) -> None:
        """End a wait, and release claims that the engine no longer needs."""
        waiting = self._sessions[session].sets.get(request.waiter)
        if waiting is not None:
            waiting.cancel()

        async def release() -> None:
            self._release(session, addresses)

        addresses = [(request.namespace, key) for key in request.keys]
        if self.is_idle(session):
            self._release(session, addresses)
        elif addresses:
            self._queue(session, release)

    def _queue(self, session: Session, message: Request) -> None:
        """Run `message` in a turn of its own. At the bound it is dropped; leases end its claims."""
        turns = self._sessions[session]

        async def take_turn() -> None:
            async with turns.turn:
                await message()

        if len(turns.active) < ACTIVE_MAX:
            self._start(session, take_turn)

    def _start(self, session: Session, request: Request) -> "asyncio.Task[None] | None":
        """Start a request which, from now on, has its turn or waits for it."""
        active, task = self._sessions[session].active, session.start(request)
        if task is not None:
            active.add(task)
            task.add_done_callback(active.discard)
        return task

    # -- an engine encodes

    def _promise(self, session: Session, address: QualifiedKey, lease_seconds: float) -> bool:
        """Change this engine's intent to ENCODING here, and at the store only shortly before the
        intent expires: most encodes are published by then, which ends the claim. Returns False if
        there is no intent that still lasts."""
        claim, now = self.held.find(session, address), self.loop.time()
        if claim is None or claim.encoding_since is not None:
            return False
        left = claim.granted_until - PROMISE_SECONDS - now
        if left <= 0:
            return False
        claim.session = session
        claim.encoding_since, claim.ends_at = now, now + lease_seconds
        claim.promise = self.loop.call_later(left, self._keep_promise, claim, lease_seconds)
        return True

    def _keep_promise(self, claim: HeldClaim, lease_seconds: float) -> None:
        session, address = claim.session, claim.address

        async def encode() -> None:
            if self.held.lasts(session, address):  # else it was released meanwhile
                await self._encode(session, [address], lease_seconds)

        self._queue(session, encode)

    async def _encode(
        self, session: Session, addresses: Iterable[QualifiedKey], lease_seconds: float
    ) -> None:
        """Write the state ENCODING to the store."""
        async with asyncio.TaskGroup() as group:
            for address in sorted(addresses):
                claim = self._ask(session, address, ClaimState.ENCODING, lease_seconds)
                group.create_task(self._counted(claim))

    # -- a set of claims

    async def _claim_all(self, session: Session, request: ClaimAll, tell: Tell) -> None:
        attempt = partial(self._take_in_turn, session, request)
        tell(_event(await self._repeat(attempt, request.wait_seconds, tell)))

    async def _take_in_turn(self, session: Session, request: ClaimAll) -> Answer:
        turns, task = self._sessions[session], asyncio.current_task()
        assert task is not None
        turns.active.add(task)
        try:
            async with turns.attempt, turns.turn:
                return await self._take_all(session, request)
        finally:
            turns.active.discard(task)

    async def _take_all(self, session: Session, request: ClaimAll) -> Answer:
        """Take all claims of a set, or none: then the result is that of the first one that this
        engine cannot have."""
        taken: list[QualifiedKey] = []
        with ExitStack() as undo:
            undo.callback(self._roll_back, session, taken)
            for key in request.keys:
                address = (request.namespace, key)
                is_new = not self.held.lasts(session, address)
                answer = await self._take(session, address)
                if answer.outcome is not ClaimOutcome.GRANTED:
                    return answer
                if is_new:
                    taken.append(address)
            undo.pop_all()
        return Answer(ClaimOutcome.GRANTED)

    def _roll_back(self, session: Session, taken: Sequence[QualifiedKey]) -> None:
        """A set that cannot have all its claims keeps none that it took. If the session has ended,
        `end` releases those that no other session of the engine uses."""
        if not session.has_ended:
            self._release(session, taken)

    async def _take(self, session: Session, address: QualifiedKey) -> Answer:
        claim = self.held.find(session, address)
        if claim is not None and claim.encoding_since is not None:
            left = claim.ends_at - self.loop.time()
            if left > 0:  # this engine's output is being stored
                return Answer(ClaimOutcome.HELD, address, self.holder, remaining_seconds=left)
        attempt = self._ask(session, address, ClaimState.INTENT, INTENT_SECONDS_MAX)
        return await self._counted(attempt)

    # -- attempts

    async def _repeat(
        self,
        attempt: Callable[[], Awaitable[Answer]],
        wait_seconds: float,
        tell: Tell = lambda _: None,
    ) -> Answer:
        """Attempt it until no other engine holds a claim, or `wait_seconds` have passed: again
        after each change of the key that is held, and at the end of its holder's lease. If it
        waits at all, `tell` gets the event PENDING."""
        until = self.loop.time() + wait_seconds
        watched: QualifiedKey | None = None
        with ExitStack() as watch:
            while True:
                answer = await attempt()
                if answer.outcome is not ClaimOutcome.HELD or self.loop.time() >= until:
                    return answer
                if watched is None:
                    tell(_event(answer._replace(outcome=ClaimOutcome.PENDING)))
                if watched != answer.address:
                    watch.close()
                    watched = answer.address
                    changed = watch.enter_context(self.waiting.changes(watched, until))
                with suppress(TimeoutError):
                    async with asyncio.timeout(answer.remaining_seconds):
                        await changed()

    async def _counted(self, claim: Awaitable[Answer]) -> Answer:
        answer = await claim
        self.counters.add(f"claims_{answer.counted_as or answer.outcome}")
        return answer

    async def _ask(
        self, session: Session, address: QualifiedKey, state: ClaimState, lease_seconds: float
    ) -> Answer:
        """Take one claim, or learn who has it."""
        if self.arena.holds(address) or self.waiting.locator.known(address[0], [address[1]])[0]:
            return Answer(ClaimOutcome.STORED, address)
        holder = f"{self.holder}:{int(time.time())}"  # since when, shown to people
        token = self._token(session, address)
        claiming = Claiming(*address, holder, token, state, lease_seconds)
        try:
            answer = await self.arbiter.claim(claiming)
        except asyncio.CancelledError:
            if self.held.find(session, address) is None:  # nobody else would release it
                self.arbiter.release([Releasing(*address, token)])
            else:  # the store may still grant it, beyond the end of that entry
                self.held.keep(session, claiming, 0.0)
            raise
        if answer is None:  # the store may still grant it: it is released like any other
            granted = ClaimOutcome.GRANTED
            answer = Answer(granted, address, self.holder, state.value, counted_as=UNASKED)
        if answer.outcome is ClaimOutcome.STORED:  # else the next look-up may still miss
            self.reads.published(address)
        elif answer.outcome is ClaimOutcome.GRANTED:
            claim = self.held.find(session, address)
            self.held.keep(session, claiming, answer.remaining_seconds)
            if claim is not None:
                # The engine attached again: the end of its previous session, which may be detected
                # later, must not release a claim that it still uses.
                claim.session = session
                answer = answer._replace(counted_as=answer.counted_as or RENEWED)
        return answer

    # -- releases

    def _release(
        self, session: Session, addresses: Sequence[QualifiedKey]
    ) -> "list[asyncio.Future[bool]]":
        for address in addresses:
            self.held.drop(session, address)
        return self.arbiter.release(
            [Releasing(*each, self._token(session, each)) for each in addresses]
        )

    @property
    def holder(self) -> str:
        return f"{self.identity.node}:{self.identity.boot}"

    def _token(self, session: Session, address: QualifiedKey) -> str:
        """The fencing token: equal for all clients of an engine, and not guessable by others."""
        text = "\0".join((str(session.owner), *address)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=8).hexdigest()


def _event(answer: Answer) -> Fields:
    key, holder = answer.address[1], answer.holder
    return {"event": "claimed", "outcome": answer.outcome, "key": key, "holder": holder}
