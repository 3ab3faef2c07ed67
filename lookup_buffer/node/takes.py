"""The taker's side of hand-offs: from a client's `drop_select` until its acknowledgement.

A take tries this node first, then the owner that the store names, and waits if no node has the key.
If another taker has the item, it queues at the owner. Bytes from another node come as a loan, which
is freed with the client's pin. An unreachable owner is queried again, after growing pauses, until
the client's deadline. The death of an owner with its item is answered as soon as `membership`
detects it.

The client has a token of this node (`_Grant`). It maps to a lease of the owner, this node or
another. Only the owner decides: if the connection breaks during an acknowledgement, it is repeated
over a new one, until no taker could still win. Called by `server` on the loop's thread.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lookup_buffer.errors import MissReason, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.connection import Session
from lookup_buffer.node.handoffs import Handoffs, Lease
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.locate import Located, Locator, Waiting
from lookup_buffer.node.membership import Directory
from lookup_buffer.node.owners import UNREACHED, Answer, Owners, again_seconds
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Wanted
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Take
from lookup_buffer.times import CALL_SECONDS, LEASE_ANSWER_SECONDS, NODE_SHARE
from store import Location

Source = tuple[Location, str]


class Leased(NamedTuple):
    """A lease: the owner's lease id, its length, and the location and endpoint of another owner.
    `source` None: this node is the owner."""

    token: int
    seconds: float
    source: Source | None


class Taken(NamedTuple):
    """The pinned item, the client's token and the lease's seconds."""

    held: Held
    token: int
    lease_seconds: float


@dataclass(slots=True, eq=False)
class _Grant:
    session: Session
    leased: Leased
    until: float
    won: "asyncio.Future[bool]"
    asking: "asyncio.Task[None] | None" = None


@dataclass(slots=True, eq=False)
class _Take:
    """One request, while it waits."""

    session: Session
    address: QualifiedKey
    until: float
    bound: asyncio.Timeout
    fetching: Callable[[int], None]
    is_queued: bool = False
    """An owner on another node was queried, and has not answered."""
    is_left: bool = False
    """Its deadline has passed, and the owner where it was queued has answered `Leave`."""


@dataclass(slots=True)
class Takes:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    handoffs: Handoffs
    owners: Owners
    locator: Locator
    directory: Directory
    identity: Identity
    waiting: Waiting
    fetcher: Fetcher
    _grants: dict[int, _Grant] = field(default_factory=dict)

    # -- take

    def take_here(self, session: Session, request: Take) -> Taken | None:
        """Take an item of this node that no taker has; None if there is none.

        Raises:
            ProtocolError: the key is shared.
        """
        if not is_handoff(request.key):
            raise ProtocolError("only a hand-off can be taken; this key has no request id")
        lease = self.handoffs.take_now((request.namespace, request.key), session)
        return None if lease is None else self._hand_over(session, lease)

    async def take(
        self, session: Session, request: Take, fetching: Callable[[int], None]
    ) -> Taken | MissReason:
        """Take the item as soon as possible, until `request.wait_seconds` have passed. `fetching`
        is called before a transfer from another node, with its bytes."""
        address = (request.namespace, request.key)
        until = self.loop.time() + request.wait_seconds
        take: _Take | None = None
        try:
            async with asyncio.timeout_at(until + NODE_SHARE * CALL_SECONDS) as bound:
                take = _Take(session, address, until, bound, fetching)
                return await self._take(take)
        except TimeoutError:
            is_queued = take is not None and take.is_queued
            return MissReason.PEER_FAILED if is_queued else MissReason.STORE_DOWN

    async def _take(self, take: _Take) -> Taken | MissReason:
        failures = 0
        """In a row, by causes whose end is not notified: a peer or the store failed, or the arena
        was full."""
        with self.waiting.changes(take.address, take.until) as changed:
            while True:
                found = await self._attempt(take)
                if isinstance(found, Taken) or found is MissReason.OWNER_DEAD or take.is_left:
                    return found
                if self.loop.time() >= take.until:
                    return found
                failures = 0 if found is MissReason.ABSENT else failures + 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(again_seconds(failures) if failures else None):
                        await changed()

    async def _attempt(self, take: _Take) -> Taken | MissReason:
        """Try this node and then the others."""
        lease = await self._lease_here(take)
        if lease is not None:
            return self._hand_over(take.session, lease)
        if self.handoffs.leased(take.address):
            return MissReason.TAKEN
        if take.is_left:
            return MissReason.ABSENT
        (located,) = await self.locator.locate([take.address])
        return await self._take_from(take, located)

    async def _lease_here(self, take: _Take) -> Lease | None:
        """Queue here until there is nothing to wait for, or until the deadline."""
        left = take.until - self.loop.time()
        if left <= 0 or not self.handoffs.concerns(take.address):
            return self.handoffs.take_now(take.address, take.session)
        try:
            async with asyncio.timeout(left):
                return await self.handoffs.take_queued(take.address, take.session)
        except TimeoutError:
            take.is_left = True
            return None

    def _hand_over(self, session: Session, lease: Lease) -> Taken:
        leased = Leased(lease.token, lease.seconds, None)
        try:
            held = self.shelf.pin(lease.held.item, session.id)
        except BaseException:
            self.give_back_lease(leased)
            raise
        return self._grant(session, leased, held)

    # -- take from another node

    async def _take_from(self, take: _Take, located: Located) -> Taken | MissReason:
        sources = [*located.sources, *located.offers]
        if not sources:
            return self._reason(located)
        unreached = False
        for source in sources:
            answer = await self._ask(take, source)
            if answer.state == "leased":
                return await self._fetch(take, source, answer)
            if answer.state == "absent":
                self.locator.forget(take.address)
            else:
                unreached = True
            if take.is_left:
                return MissReason.PEER_FAILED if unreached else MissReason.TAKEN
        return MissReason.PEER_FAILED if unreached else MissReason.ABSENT

    def _reason(self, located: Located) -> MissReason:
        """Why no node can be queried. Locations of this node itself are out of date."""
        if located.record is None:
            return located.reason or MissReason.ABSENT
        me = (self.identity.node, self.identity.boot)
        others = [at for at in located.record.locations if (at.node, at.boot) != me]
        if not others:
            return MissReason.ABSENT
        if all(map(self.directory.is_dead, others)):
            return MissReason.OWNER_DEAD
        return MissReason.PEER_FAILED

    async def _ask(self, take: _Take, source: Source) -> Answer:
        """The owner's answer. If it comes not before the deadline, the owner is sent `Leave`, and
        answers that: only this shows that it did receive the Take."""
        patience = max(0.0, take.until - self.loop.time())
        owner = self.owners.at(*source)
        request = Take(self.owners.next_number(), *take.address, patience)
        take.is_queued = True
        asked = owner.ask(request)

        def leave() -> None:
            take.is_left = True
            owner.leave(self.owners.next_number(), request.id)

        patient = self.loop.call_later(patience, leave) if patience else None
        try:
            answer = await asked
        except asyncio.CancelledError:
            if asked.cancelled():
                owner.leave(self.owners.next_number(), request.id)
            elif asked.result().state == "leased":  # it came in the same turn
                answer = asked.result()
                self.give_back_lease(Leased(answer.token, answer.lease_seconds, source))
            raise
        finally:
            if patient is not None:
                patient.cancel()
        take.is_queued = False
        return answer

    async def _fetch(self, take: _Take, source: Source, answer: Answer) -> Taken | MissReason:
        """Fetch the leased item; the lease is given back unless the client gets it."""
        leased = Leased(answer.token, answer.lease_seconds, source)
        location, endpoint = source
        exactly = location._replace(generation=answer.generation, checksum=answer.checksum)
        try:
            take.fetching(answer.nbytes)
            take.bound.reschedule(None)  # a transfer has a deadline of its own
            located = Located(None, ((exactly, endpoint),))
            came: asyncio.Future[Fetched] = self.loop.create_future()
            done = partial(self._came, came)
            self.fetcher.fetch([Wanted(take.address, located, done, loan=True)])
            try:
                fetched = await came
            except asyncio.CancelledError:
                if not came.cancelled():
                    self._release(came.result())
                raise
            take.bound.reschedule(take.until + NODE_SHARE * CALL_SECONDS)
            if fetched.held is None:
                self.give_back_lease(leased)
                return fetched.reason or MissReason.PEER_FAILED
            try:
                held = self.shelf.pin(fetched.held.item, take.session.id)
            finally:
                self._release(fetched)
        except BaseException:
            self.give_back_lease(leased)
            raise
        return self._grant(take.session, leased, held)

    def _came(self, came: "asyncio.Future[Fetched]", fetched: Fetched) -> None:
        if came.done():  # the request was cancelled
            self._release(fetched)
        else:
            came.set_result(fetched)

    def _release(self, fetched: Fetched) -> None:
        if fetched.held is not None:
            self.shelf.release([fetched.held.ticket], FETCH_OWNER)

    # -- what was taken and is not settled

    def _grant(self, session: Session, leased: Leased, held: Held) -> Taken:
        token = secrets.randbits(63)
        until = self.loop.time() + leased.seconds + LEASE_ANSWER_SECONDS
        self._grants[token] = _Grant(session, leased, until, self.loop.create_future())
        self.loop.call_at(until, self._over, token)
        return Taken(held, token, leased.seconds)

    def acknowledge(self, session: Session, token: int) -> "asyncio.Future[bool]":
        """Whether the lease was valid; a repeated request gets the same answer. Do not cancel it.

        If this node is the owner, the result is set at once.
        """
        grant = self._grants.get(token)
        if grant is None or grant.session is not session:
            lost: asyncio.Future[bool] = self.loop.create_future()
            lost.set_result(False)
            return lost
        if grant.leased.source is None and not grant.won.done():
            grant.won.set_result(self.handoffs.acknowledge(grant.leased.token))
        elif grant.leased.source is not None and grant.asking is None:
            grant.asking = self.loop.create_task(self._acknowledge(grant, grant.leased.source))
        return grant.won

    def give_back(self, session: Session, token: int) -> None:
        """Give the item back, unless it is settled or being acknowledged."""
        grant = self._grants.get(token)
        if grant is None or grant.session is not session:
            return
        if grant.asking is None and not grant.won.done():
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

    async def _acknowledge(self, grant: _Grant, source: Source) -> None:
        failures = 0
        while True:
            request = Acknowledge(self.owners.next_number(), grant.leased.token)
            answer = await self.owners.at(*source).ask(request)
            if answer is not UNREACHED:
                break
            failures += 1
            await asyncio.sleep(again_seconds(failures))
        if not grant.won.done():
            grant.won.set_result(answer.state == "won")

    def _over(self, token: int) -> None:
        grant = self._grants.pop(token, None)
        if grant is not None:
            if grant.asking is not None:
                grant.asking.cancel()
            if not grant.won.done():
                grant.won.set_result(False)
