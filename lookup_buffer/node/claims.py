"""Claims: the right to produce a key, held by one engine of the fleet, with a lease.

The store decides. If the store, or the key's server in a cluster, is down or slow, the claim is
granted without it: a fault may cost a second encode, but no endless wait. A claim belongs to the
client's engine (or to the session, if there is no engine). A request in the state ENCODING renews
it. It ends with the publication of the item, on request, with the session that last requested it,
or with its lease.

Claims for several keys are all or none: no request holds one claim while it waits for another. An
attempt takes the claims as intents: in one round trip those of one server, in the order of the
keys, and in the order of the servers. It stops where a key is held by another engine, or is being
encoded by this one. It then releases what it took, and the next attempt follows when the first such
key is published or its claim may be free. So two engines that need the same keys, in any order,
never block each other.

Attempts and the other one-way messages of a session run one after another (`_Turns`): none sees
another's intermediate state. Only a promise (`_promise`) is kept without its turn, since its intent
would expire.

The `Arbiter` uses the mirror's connections: this saves a pooled connection's round trip, and the
mirror keeps the record that comes with the reply. It calls the store if there is no mirror, until
that is connected, after a redirect by a cluster, and while a cut connection is not restored.
Called by `server`, `prefetch` and `insert` on the loop's thread.
"""

import asyncio
import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

from lookup_buffer.errors import BufferFull
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Fields, Session
from lookup_buffer.node.counters import RENEWED, UNASKED, Counters
from lookup_buffer.node.held_claims import HeldClaim, HeldClaims
from lookup_buffer.node.locate import Locator, Waiting
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.read import Reads
from lookup_buffer.node.registrar import Registrar
from lookup_buffer.node.storage import Breaker
from lookup_buffer.node.turns import granted
from lookup_buffer.protocol.messages import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    Encoding,
    ReleaseClaim,
    Unclaim,
)
from lookup_buffer.times import CLAIM_ANSWER_SECONDS, INTENT_SECONDS_MAX, PROMISE_SECONDS
from store import (
    ClaimAnswer,
    Claiming,
    ClaimState,
    MetadataStore,
    Releasing,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

TOGETHER_MAX = 64
"""Bound on the claims of a request that are asked for together: others wait for the store
meanwhile."""
CALLS_MAX = 16
"""Bound on the calls of one server at a time, where the mirror has no connection to it."""
CLOSE_SECONDS = 1.0
"""For claims still to be released at shutdown; leases end the rest."""


class Answer(NamedTuple):
    """The result of one attempt to take a claim. STORED: this or another live node has the key, so
    no engine needs to produce it; a claim that was granted nevertheless is released."""

    outcome: ClaimOutcome
    address: QualifiedKey = ("", "")
    holder: str = ""
    state: str = ""
    remaining_seconds: float = 0.0
    counted_as: str = ""
    """One of `CLAIM_ANSWERS`, if that is not the outcome."""


Tell = Callable[[Fields], None]
Reply = ClaimAnswer | bool | None
"""To a claim, or whether what is released still existed; None if the store was not reached, or
cannot decide."""
Sent = dict[Claiming | Releasing, "asyncio.Future[Reply]"]


# -- claims at the store


@dataclass(slots=True)
class Arbiter:
    """Takes claims at the store and releases them. Operations on one key take effect in order."""

    loop: asyncio.AbstractEventLoop
    locator: Locator
    arena: Arena
    _places: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(CALLS_MAX))
    )
    """By server: calls of the store that run at a time, so a frozen one delays only its own."""
    _breakers: defaultdict[str, Breaker] = field(
        default_factory=lambda: defaultdict(lambda: Breaker(time.monotonic))
    )
    _calls: set[asyncio.Task[None]] = field(default_factory=set)
    _last: dict[QualifiedKey, asyncio.Task[None]] = field(default_factory=dict)
    """The last call of the store for a key, until it has ended: further ones for the key follow
    it, also if the key has moved to another server."""

    async def claim(self, claiming: Claiming) -> Answer | None:
        """Take a claim, or learn who has it. The request is sent before this suspends.

        Returns None if the store has not decided within CLAIM_ANSWER_SECONDS, was not reached, or
        is out of memory. In this case, and if this is cancelled, it may still grant a claim that
        was sent: a release that follows takes effect after that.
        """
        address = _key(claiming)
        decided: asyncio.Future[Reply] = self.loop.create_future()
        self._send({claiming: decided})
        until = self.loop.time() + CLAIM_ANSWER_SECONDS
        try:
            found = await granted(decided, until)
            if not isinstance(found, ClaimAnswer):
                return None
            record = found.record
            if record is not None and not self.locator.knows(record):
                async with asyncio.timeout_at(until):
                    await self.locator.meet([record])
        except TimeoutError:
            return None
        is_elsewhere = record is not None and self.locator.directory.sources(record)
        if is_elsewhere or self.arena.holds(address):
            if found.granted:
                self.release([Releasing(*address, claiming.token)])
            return Answer(ClaimOutcome.STORED, address)
        outcome = ClaimOutcome.GRANTED if found.granted else ClaimOutcome.HELD
        return Answer(outcome, address, found.holder, found.state.value, found.remaining_seconds)

    def release(self, releasings: Sequence[Releasing]) -> "list[asyncio.Future[Reply]]":
        """Release claims; the results are True for each that still existed, as far as is known."""
        existed: Sent = {one: self.loop.create_future() for one in releasings}
        self._send(existed)
        return list(existed.values())

    async def close(self) -> None:
        """Finish pending calls within CLOSE_SECONDS; leases end the other claims."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=CLOSE_SECONDS)

    def _send(self, sent: Sent) -> None:
        """One claim, or several releases."""
        claims, at_store = self.locator.claims, Sent()
        for one, reply in sent.items():
            if claims is None or _key(one) in self._last:
                at_store[one] = reply
            elif isinstance(one, Claiming):
                claims.claim(one, partial(self._replied, one, reply))
            else:
                claims.release(one, partial(self._replied, one, reply))
        self._send_to_store(at_store)

    def _replied(
        self, one: Claiming | Releasing, reply: "asyncio.Future[Reply]", found: Reply | StoreError
    ) -> None:
        if isinstance(found, StoreUnavailable):  # the mirror's connection
            self._send_to_store({one: reply})
        elif not reply.done():
            reply.set_result(None if isinstance(found, StoreError) else found)
        elif isinstance(found, ClaimAnswer) and found.granted and self.arena.holds(_key(one)):
            # Granted so late that its key was inserted here: nobody else would release it.
            self.release([Releasing(*_key(one), one.token)])

    def _send_to_store(self, sent: Sent) -> None:
        groups: defaultdict[str, Sent] = defaultdict(dict)
        for one, reply in sent.items():
            groups[self.locator.place_of(_key(one))][one] = reply
        for place, group in groups.items():
            before = {self._last[key] for key in map(_key, group) if key in self._last}
            task = self.loop.create_task(self._call(place, group, before))
            self._last.update((_key(one), task) for one in group)
            self._calls.add(task)
            task.add_done_callback(partial(self._ended, group))

    def _ended(self, sent: Sent, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        for key in map(_key, sent):
            if self._last.get(key) is task:
                del self._last[key]

    async def _call(self, place: str, sent: Sent, before: "set[asyncio.Task[None]]") -> None:
        """A call of this server, after those `before`. Without a reply the leases end what is
        released."""
        found: Sequence[Reply] = [None] * len(sent)
        breaker = self._breakers[place]
        try:
            if before:
                await asyncio.wait(before)
            async with self._places[place]:
                if all(isinstance(one, Claiming) and sent[one].done() for one in sent):
                    return  # nobody waits for it any more
                store = await self.locator.store() if breaker.allows() else None
                if store is not None:
                    found = await self._reply(store, sent)
                    breaker.succeeded()
        except StoreFull:
            breaker.succeeded()  # the server answers, and releases still succeed
        except StoreError:
            breaker.failed()
        finally:
            for (one, reply), each in zip(sent.items(), found, strict=True):
                self._replied(one, reply, each)

    async def _reply(self, store: MetadataStore, sent: Sent) -> Sequence[Reply]:
        releasings = [one for one in sent if isinstance(one, Releasing)]
        if releasings:
            return await store.release_many(releasings)
        (claiming,) = sent
        found = await store.claim(**asdict(claiming))
        if found.record is not None:  # the mirror may not have it
            self.locator.forget(_key(claiming))
        return [found]


def _key(one: Claiming | Releasing) -> QualifiedKey:
    return one.namespace, one.key


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
    read_only: bool = False  # then no claim is taken: see `messages.CHANGES`
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    _sessions: defaultdict[Session, _Turns] = field(default_factory=lambda: defaultdict(_Turns))

    async def claim(self, session: Session, request: Claim) -> Fields:
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

    async def release(self, session: Session, request: ReleaseClaim) -> Fields:
        """Release a claim; answers whether it was still this engine's."""
        released = [await one for one in self._release(session, [(request.namespace, request.key)])]
        return {"released": released == [True]}

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

    def claim_all(
        self, session: Session, request: ClaimAll, tell: Tell, kept: Sequence[str] = ()
    ) -> None:
        """Take the claims of `request`; `tell` gets the events that `ClaimAll` describes. `kept`:
        keys that the caller keeps until then, if they are more."""
        turns = self._sessions[session]
        task: asyncio.Task[None] | None = None
        if not self.read_only and request.id not in turns.sets:
            waiting = self._claim_all(session, request, tell)
            task = self._start(session, kept or request.keys, waiting)
        if task is None:
            tell(_event(Answer(ClaimOutcome.FAILED)))
        else:
            turns.sets[request.id] = task
            task.add_done_callback(lambda _: turns.sets.pop(request.id))

    def encoding(self, session: Session, request: Encoding) -> None:
        """The engine encodes these keys now, even if others do, too."""
        addresses = {(request.namespace, key) for key in request.keys}
        if self.is_idle(session):  # else earlier messages come first
            seconds = request.lease_seconds
            addresses -= {each for each in addresses if self._promise(session, each, seconds)}
        if addresses:
            self._start(
                session, request.keys, self._encode(session, addresses, request.lease_seconds)
            )

    def unclaim(self, session: Session, request: Unclaim) -> None:
        """End a wait, and release claims that the engine no longer needs."""
        waiting = self._sessions[session].sets.get(request.waiter)
        if waiting is not None:
            waiting.cancel()
        addresses = [(request.namespace, key) for key in request.keys]
        if self.is_idle(session):
            self._release(session, addresses)
        elif addresses:
            self._start(session, request.keys, self._unclaim(session, addresses))

    async def _unclaim(self, session: Session, addresses: Sequence[QualifiedKey]) -> None:
        async with self._sessions[session].turn:
            self._release(session, addresses)

    def _start(
        self, session: Session, keys: Sequence[str], request: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None] | None:
        """Start a request which, from now on, has its turn or waits for it. None if it is dropped,
        since too many wait: leases end its claims."""
        task, active = None, self._sessions[session].active
        with suppress(BufferFull):
            task = session.start(request, keys=keys)
        if task is not None:
            active.add(task)
            task.add_done_callback(active.discard)
        return task

    # -- an engine encodes

    def _promise(self, session: Session, address: QualifiedKey, lease_seconds: float) -> bool:
        """Change this engine's intent to ENCODING here, and at the store only shortly before it
        expires: most encodes are published by then. Returns False if there is no such intent."""
        claim, now = self.held.find(session, address), self.loop.time()
        if claim is None or claim.encoding_since is not None:
            return False
        if (left := claim.granted_until - PROMISE_SECONDS - now) <= 0:
            return False
        claim.session = session
        claim.encoding_since, claim.ends_at = now, now + lease_seconds
        claim.promise = self.loop.call_later(left, self._keep_promise, claim, lease_seconds)
        return True

    def _keep_promise(self, claim: HeldClaim, lease_seconds: float) -> None:
        with suppress(BufferFull):
            claim.session.start(self._encode_promised(claim, lease_seconds), keys=())

    async def _encode_promised(self, claim: HeldClaim, lease_seconds: float) -> None:
        """Without the session's turn, which a set may have until the intent has expired: the
        arbiter keeps the order of this key. Void if the claim was released."""
        if self.held.lasting(claim.session, claim.address) is claim:
            await self._encode_one(claim.session, claim.address, lease_seconds, claim)

    async def _encode(
        self, session: Session, addresses: Iterable[QualifiedKey], lease_seconds: float
    ) -> None:
        """Write the state ENCODING to the store."""
        left = iter(sorted(addresses))
        async with self._sessions[session].turn:
            while some := list(islice(left, TOGETHER_MAX)):
                async with asyncio.TaskGroup() as group:
                    for address in some:
                        group.create_task(self._encode_one(session, address, lease_seconds))

    async def _encode_one(
        self,
        session: Session,
        address: QualifiedKey,
        lease_seconds: float,
        promised: HeldClaim | None = None,
    ) -> None:
        attempt = self._ask(session, address, ClaimState.ENCODING, lease_seconds, promised)
        with suppress(BufferFull):  # then it encodes without a claim
            await self._counted(attempt)

    # -- a set of claims

    async def _claim_all(self, session: Session, request: ClaimAll, tell: Tell) -> None:
        attempt = partial(self._take_in_turn, session, request)
        try:
            answer = await self._repeat(attempt, request.wait_seconds, tell)
        except BufferFull:
            answer = Answer(ClaimOutcome.FAILED)
        tell(_event(answer))

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
        try:
            for addresses in self._together([(request.namespace, key) for key in request.keys]):
                asked = (self._take(session, address, taken) for address in addresses)
                # All have ended before what was taken is rolled back, also if this is cancelled.
                for answer in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer
                    if answer.outcome is not ClaimOutcome.GRANTED:
                        return answer
            taken.clear()
            return Answer(ClaimOutcome.GRANTED)
        finally:
            self._roll_back(session, taken)

    def _together(self, addresses: Sequence[QualifiedKey]) -> Iterator[Sequence[QualifiedKey]]:
        """Those of one server at a time, in an order that is the same for all nodes: of two that
        take what is on two servers at once, each could get what the other needs, for ever."""
        place_of = self.waiting.locator.place_of
        for _, group in groupby(sorted(addresses, key=place_of), place_of):
            while some := list(islice(group, TOGETHER_MAX)):
                yield some

    def _roll_back(self, session: Session, taken: Sequence[QualifiedKey]) -> None:
        """After the session's end, `end` releases those that no other of its engine uses."""
        if not session.has_ended:
            self._release(session, taken)

    async def _take(
        self, session: Session, address: QualifiedKey, taken: list[QualifiedKey]
    ) -> Answer:
        """Take one, and add it to `taken` if this engine did not have it."""
        claim = self.held.lasting(session, address)
        if claim is not None and claim.encoding_since is not None:
            left = claim.ends_at - self.loop.time()  # this engine's output is being stored
            return Answer(ClaimOutcome.HELD, address, self.holder, remaining_seconds=left)
        attempt = self._ask(session, address, ClaimState.INTENT, INTENT_SECONDS_MAX)
        answer = await self._counted(attempt)
        if answer.outcome is ClaimOutcome.GRANTED and claim is None:
            taken.append(address)
        return answer

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
        self,
        session: Session,
        address: QualifiedKey,
        state: ClaimState,
        lease_seconds: float,
        promised: HeldClaim | None = None,
    ) -> Answer:
        """Take one claim, or learn who has it. `promised`: as long as the engine has this one.

        Raises:
            BufferFull: this engine has too many claims.
        """
        if self.arena.holds(address) or self.waiting.locator.known(address[0], [address[1]])[0]:
            return Answer(ClaimOutcome.STORED, address)
        holder = f"{self.holder}:{int(time.time())}"  # since when, shown to people
        token = self._token(session, address)
        claiming = Claiming(*address, holder, token, state, lease_seconds)
        try:
            with self.held.room(session, address):
                answer = await self.arbiter.claim(claiming)
        except asyncio.CancelledError:
            if self.held.find(session, address) is None:  # nobody else would release it
                self.held.count_release(session)
                self._send_releases(session, [address])
            else:  # the store may still grant it, beyond the end of that entry
                self.held.keep(session, claiming, 0.0)
            raise
        if answer is None:  # the store may still grant it: it is released like any other
            answer = Answer(ClaimOutcome.GRANTED, address, self.holder, state.value, 0.0, UNASKED)
        if answer.outcome is ClaimOutcome.STORED:  # else the next look-up may still miss
            self.reads.published(address)
        elif answer.outcome is ClaimOutcome.GRANTED:
            claim = self.held.find(session, address)
            if promised is not None and claim is not promised:
                return answer  # it was released meanwhile, which takes effect after this
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
    ) -> "list[asyncio.Future[Reply]]":
        """Release what this engine has or asks for: without a command for any other key."""
        begun = [one for one in dict.fromkeys(addresses) if self.held.begin_release(session, one)]
        return self._send_releases(session, begun)

    def _send_releases(
        self, session: Session, addresses: Sequence[QualifiedKey]
    ) -> "list[asyncio.Future[Reply]]":
        """Each counts as a claim until the store has answered."""
        replies = self.arbiter.release(
            [Releasing(*each, self._token(session, each)) for each in addresses]
        )
        for reply in replies:
            reply.add_done_callback(lambda _: self.held.count_release(session, -1))
        return replies

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
