"""The taker's side of hand-offs: from a client's `drop_select` until its acknowledgement.

A take tries this node first, then the owner that the store names, and waits if no node has the key.
If another taker has the item, it queues at the owner. Bytes from another node come as a loan, which
is freed with the client's pin. An unreachable owner is queried again, after growing pauses, until
the client's deadline. The death of an owner with its item is answered as soon as `membership`
detects it.

The client gets the token of the owner's lease, which only its own session can use here. Only the
owner decides: if the connection breaks during an acknowledgement, it is repeated over a new one,
until no taker could still win. Called by `server` on the loop's thread.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena, Pin
from lookup_buffer.node.connection import Connection, Session
from lookup_buffer.node.handoffs import Handoffs, Lease
from lookup_buffer.node.locate import Located, Locator, Waiting
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.owners import UNREACHED, Answer, Owners, again_seconds
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher, Source, Wanted
from lookup_buffer.protocol.messages import Take
from lookup_buffer.times import CALL_SECONDS, LEASE_ANSWER_SECONDS, NODE_SHARE


class Taken(NamedTuple):
    """The pinned item, the lease's token and its seconds."""

    held: Pin
    token: int
    lease_seconds: float


@dataclass(slots=True, eq=False)
class _RemoteLease:
    """A client's lease at another owner, until no acknowledgement of it could still win."""

    session: Session
    source: Source
    until: float
    won: "asyncio.Task[bool] | None" = None
    """The acknowledgement."""


class _Take(NamedTuple):
    """One request, while it waits."""

    connection: Connection
    session: Session
    number: int
    address: QualifiedKey
    until: float


@dataclass(slots=True)
class Takes:
    loop: asyncio.AbstractEventLoop
    arena: Arena
    handoffs: Handoffs
    owners: Owners
    locator: Locator
    directory: Directory
    identity: Identity
    waiting: Waiting
    fetcher: Fetcher
    _remote: dict[int, _RemoteLease] = field(default_factory=dict)
    """By token."""

    # -- take

    def take_here(self, session: Session, request: Take) -> Taken | None:
        """Take an item of this node that no taker has; None if there is none.

        Raises:
            ProtocolError: the key is shared.
        """
        lease = self.handoffs.take((request.namespace, request.key), session)
        return None if lease is None else self._hand_over(session, lease)

    async def take(
        self, connection: Connection, session: Session, request: Take
    ) -> Taken | MissReason:
        """Take the item as soon as possible, until `request.wait_seconds` have passed. Before a
        transfer from another node, its bytes are announced on `connection`."""
        address = (request.namespace, request.key)
        until = self.loop.time() + request.wait_seconds
        take = _Take(connection, session, request.id, address, until)
        failures = 0
        """In a row, by causes whose end is not notified: a peer or the store failed, or the arena
        was full."""
        with self.waiting.changes(address, until) as changed:
            while True:
                found = await self._attempt(take)
                if isinstance(found, Taken) or found is MissReason.OWNER_DEAD:
                    return found
                if self.loop.time() >= until:
                    return found
                failures = 0 if found is MissReason.ABSENT else failures + 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(again_seconds(failures) if failures else None):
                        await changed()

    async def _attempt(self, take: _Take) -> Taken | MissReason:
        """Try this node and then the others; at each, queue until the deadline."""
        try:
            lease = await self.handoffs.queue(take.address, take.session, take.until)
        except TimeoutError:
            return MissReason.TAKEN if self.handoffs.leased(take.address) else MissReason.ABSENT
        if lease is not None:
            return self._hand_over(take.session, lease)
        if self.handoffs.leased(take.address):
            return MissReason.TAKEN
        try:
            async with asyncio.timeout_at(take.until + NODE_SHARE * CALL_SECONDS):
                (located,) = await self.locator.locate([take.address])
        except TimeoutError:
            return MissReason.STORE_DOWN
        return await self._take_from(take, located)

    def _hand_over(self, session: Session, lease: Lease) -> Taken:
        try:
            held = self.arena.pin(lease.held.item, session.id)
        except BaseException:
            self.handoffs.give_back(lease.token)
            raise
        return Taken(held, lease.token, lease.seconds)

    # -- take from another node

    async def _take_from(self, take: _Take, located: Located) -> Taken | MissReason:
        sources = [*located.sources, *located.offers]
        if not sources:
            return self._reason(located)
        is_unreached = False
        for source in sources:
            is_early = self.loop.time() < take.until
            answer = await self.owners.at(*source).take(take.address, take.until)
            if answer.state == "leased":
                return await self._fetch(take, source, answer)
            if answer.state == "absent":
                self.locator.forget(take.address)
            else:
                is_unreached = True
            if is_early and self.loop.time() >= take.until:  # it was queued there
                return MissReason.PEER_FAILED if is_unreached else MissReason.TAKEN
        return MissReason.PEER_FAILED if is_unreached else MissReason.ABSENT

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

    async def _fetch(self, take: _Take, source: Source, answer: Answer) -> Taken | MissReason:
        """Fetch the leased item; the lease is given back unless the client gets it."""
        location, endpoint = source
        exactly = location._replace(generation=answer.generation, checksum=answer.checksum)
        taken: Taken | None = None
        try:
            with (
                take.connection.fetching(take.number, answer.nbytes),
                self.owners.at(*source).transferring(answer.lease_seconds),
            ):
                fetched = await self._fetched(take.address, Located(None, ((exactly, endpoint),)))
            if fetched.held is None:
                return fetched.reason or MissReason.PEER_FAILED
            try:
                held = self.arena.pin(fetched.held.item, take.session.id)
            finally:
                self._release(fetched)
            taken = Taken(held, answer.token, answer.lease_seconds)
        finally:
            if taken is None:
                self.owners.at(*source).give_back(answer.token)
        until = self.loop.time() + answer.lease_seconds + LEASE_ANSWER_SECONDS
        self._remote[answer.token] = _RemoteLease(take.session, source, until)
        self.loop.call_at(until, self._remote.pop, answer.token, None)
        return taken

    async def _fetched(self, address: QualifiedKey, located: Located) -> Fetched:
        came: asyncio.Future[Fetched] = self.loop.create_future()
        done = partial(self._came, came)
        self.fetcher.fetch([Wanted(address, located, done, loan=True)])
        try:
            return await came
        except asyncio.CancelledError:
            if not came.cancelled():
                self._release(came.result())
            raise

    def _came(self, came: "asyncio.Future[Fetched]", fetched: Fetched) -> None:
        if came.done():  # the request was cancelled
            self._release(fetched)
        else:
            came.set_result(fetched)

    def _release(self, fetched: Fetched) -> None:
        if fetched.held is not None:
            self.arena.release([fetched.held.ticket], FETCH_OWNER)

    # -- what was taken and is not settled

    def acknowledge(self, session: Session, token: int) -> "bool | asyncio.Task[bool]":
        """Whether the lease was valid; a repeated request gets the same answer. If another node
        decides that: a task, which all of them share; do not cancel it."""
        lease = self._remote.get(token)
        if lease is None:
            return self.handoffs.acknowledge(token, session)
        if lease.session is not session:
            return False
        if lease.won is None:
            lease.won = self.loop.create_task(self._acknowledge(lease, token))
        return lease.won.result() if lease.won.done() else lease.won

    async def _acknowledge(self, lease: _RemoteLease, token: int) -> bool:
        answer = UNREACHED
        with suppress(TimeoutError):
            async with asyncio.timeout_at(lease.until):
                while answer is UNREACHED:  # `Owner` pauses between its attempts
                    answer = await self.owners.at(*lease.source).acknowledge(token)
        return answer.state == "won"

    def give_back(self, session: Session, token: int) -> None:
        """Give the item back, unless it is settled or being acknowledged."""
        lease = self._remote.get(token)
        if lease is None:
            self.handoffs.give_back(token, session)
        elif lease.session is session and lease.won is None:
            del self._remote[token]
            self.owners.at(*lease.source).give_back(token)

    def end(self, session: Session) -> None:
        """The session is over: give back what it did not acknowledge."""
        self.handoffs.end(session)
        for token in list(self._remote):
            self.give_back(session, token)
