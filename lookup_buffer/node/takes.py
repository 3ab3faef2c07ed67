"""The taker's side of hand-offs: from a client's `drop_select` until its acknowledgement.

A take tries this node first, then the owner that the store names, and waits if no node has the key.
If another taker has the item, it queues at the owner. Bytes from another node come as a loan, which
is freed with the client's pin. An unreachable owner is queried again, after growing pauses, until
the client's deadline. The death of an owner with its item is answered as soon as `membership`
detects it.

The client gets the token of the owner's lease, which only its own session can use here. Only the
owner decides: if the connection breaks during an acknowledgement, it is repeated over a new one,
until no taker could still win.

Requests to an owner are multiplexed on one connection, since a taker may be queued for long. When
it ends, its pending requests get UNREACHED, and the owner gives the leases on it back. A connection
that ends or cannot be made does not mean that the node is dead; only `membership` judges that.

Called by `server` and `announcements` on the loop's thread.
"""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lookup_buffer.errors import LookupBufferError, MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Connection, Fields, Session
from lookup_buffer.node.handoffs import Handoffs, Lease
from lookup_buffer.node.items import Pin
from lookup_buffer.node.links import HANDOFFS, Credentials, again_seconds, dial
from lookup_buffer.node.locate import Located, Locator, Waiting
from lookup_buffer.node.membership import Directory, Identity
from lookup_buffer.node.owned import Owned
from lookup_buffer.node.transfer import (
    FETCH_OWNER,
    TURN_SECONDS,
    Fetched,
    Fetcher,
    Source,
    Wanted,
)
from lookup_buffer.node.turns import Turns, granted
from lookup_buffer.protocol.messages import (
    Acknowledge,
    GiveBack,
    Holds,
    Leave,
    OwnerReply,
    Request,
    Take,
)
from lookup_buffer.protocol.tls import Trust
from lookup_buffer.times import (
    CALL_SECONDS,
    LEASE_ANSWER_SECONDS,
    NODE_SHARE,
    OWNER_IDLE_SECONDS,
    PEER_ANSWER_SECONDS,
)
from store import Location

GONE: Final = OwnerReply("gone")
UNREACHED: Final = OwnerReply("unreached")
GRANTED_TURN_SECONDS: Final = 2.0
"""A transfer that was granted waits for its turn at least so long."""


# -- the connection to an owner


@dataclass(slots=True, eq=False)
class Owner:
    """One boot of another node, and the connection to it.

    The connection is made for the first request. After its end, or a failed attempt, it is made
    again for the next request, after a pause.
    """

    location: Location
    endpoint: str
    loop: asyncio.AbstractEventLoop
    credentials: Credentials
    turns: Turns
    """Of all owners."""
    trust: Trust = field(default_factory=Trust)
    """That of the connection."""
    _used_until: float = 0.0
    """The end of the last lease on it, or the time of the last message."""
    _connection: Connection | None = None
    _connecting: "asyncio.Task[None] | None" = None
    _failures: int = 0
    """Connections that failed or ended since the last reply."""
    _not_before: float = 0.0
    _transfers: int = 0
    """Of items that are leased on it."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _asked: dict[int, tuple[Request, "asyncio.Future[OwnerReply]"]] = field(default_factory=dict)
    """Requests without a reply; without a connection they are sent once there is one."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests or leases, and has had none for OWNER_IDLE_SECONDS; if the
        certificate there does not count any more, whether it has none now."""
        seconds = OWNER_IDLE_SECONDS if self.trust.counts() else 0.0
        is_used = self._asked or self._transfers
        return not is_used and self.loop.time() > self._used_until + seconds

    async def take(self, address: QualifiedKey, until: float) -> OwnerReply:
        """Take the item at `address`, or queue for it until `until`, by the loop's clock.

        At the deadline the owner is sent `Leave`, and answers that: only this shows that it did
        receive the Take. A lease that no one here gets is given back.
        """
        patience = max(0.0, until - self.loop.time())
        request = Take(next(self._numbers), *address, patience)
        asked = self._ask(request)
        leave = self.loop.call_at(until, self._leave, request.id) if patience else None
        try:
            return await granted(asked, until + NODE_SHARE * CALL_SECONDS, self._decline)
        except TimeoutError:
            return UNREACHED
        finally:
            if leave is not None:
                leave.cancel()
            if asked.cancelled():
                self._leave(request.id)

    @contextmanager
    def transferring(self, lease_seconds: float) -> Iterator[None]:
        """Keep the connection during a transfer, however long it takes, and for the lease that
        its taker has then: with the connection the lease would end."""
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1
            self._use(lease_seconds)

    def acknowledge(self, token: int) -> "asyncio.Future[OwnerReply]":
        return self._ask(Acknowledge(next(self._numbers), token))

    async def holds(self, address: QualifiedKey) -> OwnerReply:
        """Whether it has the item: present or absent; UNREACHED if it does not answer in time."""
        request = Holds(next(self._numbers), *address)
        try:
            async with asyncio.timeout(PEER_ANSWER_SECONDS):
                return await self._ask(request)
        except TimeoutError:
            return UNREACHED
        finally:
            self._asked.pop(request.id, None)

    def give_back(self, token: int) -> None:
        """Without a connection it is not needed: with its end the owner has the item back."""
        self._say(GiveBack(next(self._numbers), token))

    def end(self, answer: OwnerReply) -> None:
        """Answer all pending requests with `answer`, and close the connection. Idempotent."""
        if self._connecting is not None:
            self._connecting.cancel()
        self._answer_all(answer)
        if self._connection is not None:
            self._connection.end(None)

    def _ask(self, request: Request) -> "asyncio.Future[OwnerReply]":
        """Send a request; the result is its answer, or its fate."""
        answer: asyncio.Future[OwnerReply] = self.loop.create_future()
        self._asked[request.id] = request, answer
        self._use(0.0)
        if self._connection is not None:
            self._connection.send(request.to_wire())
        elif self._connecting is None or self._connecting.done():
            self._connecting = self.loop.create_task(self._connect())
        return answer

    def _say(self, request: Request) -> None:
        if self._connection is not None:
            self._use(0.0)
            self._connection.send(request.to_wire())

    def _leave(self, take: int) -> None:
        """The taker of `take`, the id of a `Take`, waits no longer. If it has been sent, it is
        still answered."""
        if self._connection is None:
            _, asked = self._asked.pop(take, (None, None))
            if asked is not None:
                _set(asked, UNREACHED)
        self._say(Leave(next(self._numbers), take))

    async def _connect(self) -> None:
        if (pause := self._not_before - self.loop.time()) > 0:
            await asyncio.sleep(pause)
        if not self._asked:
            return
        try:
            link = await dial(self.loop, self.location, self.endpoint, HANDOFFS, self.credentials)
        except (LookupBufferError, ValueError):  # the endpoint is no address
            self._unreached()
            return
        self.trust = link.trust
        self._connection = connection = Connection(
            self.loop, link.stream, self, link.macs,
            turns=self.turns,
        )  # fmt: skip
        for request, _ in list(self._asked.values()):
            connection.send(request.to_wire())

    def connection_lost(self, *_: object) -> None:
        self._unreached()

    def _unreached(self) -> None:
        """The connection could not be made, or ended."""
        self._connection, self.trust = None, Trust()
        self._failures += 1
        self._not_before = self.loop.time() + again_seconds(self._failures)
        self._answer_all(UNREACHED)

    def message_received(self, connection: Connection, message: Any) -> None:
        number, answer = OwnerReply.parse(message)
        self._failures = 0
        self._use(answer.lease_seconds)
        _, asked = self._asked.pop(number, (None, None))
        if asked is not None and not _set(asked, answer):
            self._decline(answer)

    def _decline(self, answer: OwnerReply) -> None:
        """Its request was cancelled."""
        if answer.state == "leased":
            self.give_back(answer.token)

    def _answer_all(self, answer: OwnerReply) -> None:
        all_asked, self._asked = self._asked, {}
        for _, asked in all_asked.values():
            _set(asked, answer)

    def _use(self, seconds: float) -> None:
        self._used_until = max(self._used_until, self.loop.time() + seconds)


def _set(asked: "asyncio.Future[OwnerReply]", answer: OwnerReply) -> bool:
    """False: its request was cancelled."""
    if not asked.done():
        asked.set_result(answer)
    return not asked.cancelled()


@dataclass(slots=True)
class Owners:
    loop: asyncio.AbstractEventLoop
    directory: Directory
    credentials: Credentials
    _owners: dict[tuple[str, str], Owner] = field(default_factory=dict)
    _turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self._turns = Turns(self.loop)

    def at(self, location: Location, endpoint: str) -> Owner:
        """The owner of `location`. To be used at once: an idle one is replaced."""
        boot = (location.node, location.boot)
        owner = self._owners.get(boot)
        if owner is None:
            owner = Owner(location, endpoint, self.loop, self.credentials, self._turns)
            self._owners[boot] = owner
        return owner

    def tick(self) -> None:
        """Close the connections to dead nodes, idle ones, and those whose certificates do not count
        any more. To be called a few times a second."""
        for owner in list(self._owners.values()):
            if self.directory.is_replaced(owner.location):
                self._end(owner, GONE)
            elif owner.is_idle or owner.trust.is_over() or self.directory.is_dead(owner.location):
                self._end(owner, UNREACHED)

    def close(self) -> None:
        for owner in list(self._owners.values()):
            self._end(owner, UNREACHED)

    def _end(self, owner: Owner, answer: OwnerReply) -> None:
        del self._owners[owner.location.node, owner.location.boot]
        owner.end(answer)


# -- takes


class Taken(NamedTuple):
    """The pinned item, the lease's token and its seconds."""

    held: Pin
    token: int
    lease_seconds: float


@dataclass(slots=True, eq=False)
class RemoteLease:
    """A session's lease at another owner. It is kept from the end of the transfer until no
    acknowledgement of it could still win."""

    session: Session
    source: Source
    granted: OwnerReply
    until: float = 0.0
    won: "asyncio.Task[bool] | None" = None
    """The acknowledgement."""
    asked: tuple[Connection, int] | None = None
    """Where its result is sent: the connection and the id of the last request for it."""


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
    _remote: Owned[RemoteLease] = field(default_factory=Owned)
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
        failures = 0
        """In a row, by causes whose end is not notified: a peer or the store failed, or the arena
        was full."""
        with self.waiting.changes(address, until) as changed:
            while True:
                found: Taken | RemoteLease | MissReason
                found = await self._attempt(session, address, until)
                if isinstance(found, RemoteLease):
                    found = await self._fetch(
                        connection, request, found, self._turn_until(request, until)
                    )
                if isinstance(found, Taken) or found is MissReason.OWNER_DEAD:
                    return found
                if self.loop.time() >= until:
                    return found
                failures = 0 if found is MissReason.ABSENT else failures + 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(again_seconds(failures) if failures else None):
                        await changed()

    def _turn_until(self, request: Take, until: float) -> float:
        """Until when a transfer that is granted waits for its turn. It needs some time also if the
        take had to wait: else a burst of takes would lose those that waited longest."""
        if not request.wait_seconds:
            return until + TURN_SECONDS
        return max(until, self.loop.time() + GRANTED_TURN_SECONDS)

    async def _attempt(
        self, session: Session, address: QualifiedKey, until: float
    ) -> Taken | RemoteLease | MissReason:
        """Try this node and then the others; at each, queue until the deadline."""
        try:
            lease = await self.handoffs.queue(address, session, until)
        except TimeoutError:
            return MissReason.TAKEN if self.handoffs.leased(address) else MissReason.ABSENT
        if lease is not None:
            return self._hand_over(session, lease)
        if self.handoffs.leased(address):
            return MissReason.TAKEN
        try:
            async with asyncio.timeout_at(until + NODE_SHARE * CALL_SECONDS):
                (located,) = await self.locator.locate([address])
        except TimeoutError:
            return MissReason.STORE_DOWN
        is_unreached = False
        for source in (sources := [*located.sources, *located.offers]):
            is_early = self.loop.time() < until
            answer = await self.owners.at(*source).take(address, until)
            if answer.state == "leased":
                return RemoteLease(session, source, answer)
            if answer.state == "absent":
                self.locator.forget(address)
            else:
                is_unreached = True
            if is_early and self.loop.time() >= until:  # it was queued there
                return MissReason.PEER_FAILED if is_unreached else MissReason.TAKEN
        if not sources:
            return self._reason(located)
        return MissReason.PEER_FAILED if is_unreached else MissReason.ABSENT

    def _hand_over(self, session: Session, lease: Lease) -> Taken:
        try:
            held = self.arena.pin(lease.held.item, session.id)
        except BaseException:
            self.handoffs.give_back(lease.token)
            raise
        return Taken(held, lease.token, lease.seconds)

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

    async def _fetch(
        self, connection: Connection, request: Take, lease: RemoteLease, turn_until: float
    ) -> Taken | MissReason:
        """Fetch the leased item, which waits for its turn until `turn_until`; the lease is given
        back unless the client gets it."""
        (_, token, seconds, generation, checksum, nbytes), taken = lease.granted, None
        location, endpoint = lease.source
        exactly = location._replace(generation=generation, checksum=checksum)
        try:
            with (
                connection.fetching(request.id) as fetching,
                self.owners.at(*lease.source).transferring(seconds),
            ):
                fetching(nbytes)
                located = Located(None, ((exactly, endpoint),))
                fetched = await self._loan((request.namespace, request.key), located, turn_until)
            if fetched.held is None:
                return fetched.reason or MissReason.PEER_FAILED
            try:
                held = self.arena.pin(fetched.held.item, lease.session.id)
            finally:
                self._release(fetched)
            taken = Taken(held, token, seconds)
        finally:
            if taken is None:
                self.owners.at(*lease.source).give_back(token)
        lease.until = self.loop.time() + seconds + LEASE_ANSWER_SECONDS
        if (earlier := self._remote.get(token)) is not None:  # the other node drew it twice
            self._remote.drop(earlier.session, token)
        self._remote.put(lease.session, token, lease)
        self.loop.call_at(lease.until, self._remote.drop, lease.session, token)
        return taken

    async def _loan(self, address: QualifiedKey, located: Located, turn_until: float) -> Fetched:
        came: asyncio.Future[Fetched] = self.loop.create_future()
        wanted = Wanted(address, located, came.set_result, loan=True, until=turn_until)
        self.fetcher.fetch([wanted])
        try:
            return await asyncio.shield(came)
        except asyncio.CancelledError:
            if not self.fetcher.withdraw(wanted):
                came.add_done_callback(lambda came: self._release(came.result()))
            raise

    def _release(self, fetched: Fetched) -> None:
        if fetched.held is not None:
            self.arena.release([fetched.held.ticket], FETCH_OWNER)

    # -- what was taken and is not settled

    def acknowledge(
        self, connection: Connection, session: Session, request: Acknowledge
    ) -> Fields | None:
        """The answer whether the lease was valid; a repeated request gets the same answer.

        None if another node decides that. Then the answer is sent later, to the last of the
        requests that came meanwhile, since a client repeats it only if its connection broke. So a
        lease has one that waits, and it need not be refused to bound them: the owner may have
        removed the item.
        """
        token = request.token
        lease = self._remote.get(token)
        if lease is None:
            return {"won": self.handoffs.acknowledge(token, session)}
        if lease.session is not session:
            return {"won": False}
        if lease.won is not None and lease.won.done():
            return {"won": lease.won.result()}
        lease.asked = connection, request.id
        if lease.won is None:
            lease.won = self.loop.create_task(self._acknowledge(lease, token))
        return None

    async def _acknowledge(self, lease: RemoteLease, token: int) -> bool:
        reply = UNREACHED
        with suppress(TimeoutError):
            async with asyncio.timeout_at(lease.until):
                while reply is UNREACHED:  # `Owner` pauses between its attempts
                    reply = await self.owners.at(*lease.source).acknowledge(token)
        won = reply.state == "won"
        assert lease.asked is not None
        connection, request_id = lease.asked
        connection.send({"id": request_id, "won": won})
        return won

    def give_back(self, session: Session, token: int) -> None:
        """Give the item back, unless it is settled or being acknowledged."""
        lease = self._remote.get(token)
        if lease is None:
            self.handoffs.give_back(token, session)
        elif lease.session is session and lease.won is None:
            self._remote.drop(session, token)
            self.owners.at(*lease.source).give_back(token)

    def end(self, session: Session) -> None:
        """The session is over: give back what it did not acknowledge."""
        self.handoffs.end(session)
        for lease in self._remote.of(session):
            self.give_back(session, lease.granted.token)
