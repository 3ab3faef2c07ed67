"""The taker's side of `drop_select`: from a client's request until the client has the bytes.

It tries this node first, then the owner that the store names, and waits if no node has the key. If
another taker has the item, it queues at the owner. Bytes from another node come as a loan, which is
freed with the client's pin. An unreachable owner is queried again, after growing pauses, until the
client's deadline. The death of an owner with its item is answered as soon as `directory` detects
it. Called by `desk` on the loop's thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lookup_buffer.errors import MissReason, ProtocolError
from lookup_buffer.key import QualifiedKey, is_handoff
from lookup_buffer.node.connection import Connection
from lookup_buffer.node.directory import Directory
from lookup_buffer.node.grants import Grants, Leased
from lookup_buffer.node.handoffs import Bid, Handoffs, Lease
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.locate import Located, Locator
from lookup_buffer.node.owners import Answer, Owner, Owners, again_seconds
from lookup_buffer.node.session import Session
from lookup_buffer.node.shelf import Held, Shelf
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Fetcher
from lookup_buffer.node.waiting import Waiting, Watcher
from lookup_buffer.protocol.messages import Leave, Take
from lookup_buffer.times import CALL_SECONDS, NODE_SHARE
from store import Location

Source = tuple[Location, str]


@dataclass(slots=True)
class Takings:
    loop: asyncio.AbstractEventLoop
    shelf: Shelf
    handoffs: Handoffs
    grants: Grants
    owners: Owners
    locator: Locator
    directory: Directory
    identity: Identity
    waiting: Waiting
    fetcher: Fetcher
    _takings: set["Taking"] = field(default_factory=set)

    def take(
        self,
        connection: Connection,
        session: Session,
        request: Take,
        answer: Callable[[Held, int, float], None],
        missing: Callable[[MissReason], None],
        fetching: Callable[[int], None],
    ) -> None:
        """Call `answer` with the pinned item, its token and the lease's seconds, or `missing` with
        the reason. `fetching` is called before a transfer from another node, with its bytes.

        Raises:
            ProtocolError: the key is shared.
        """
        if not is_handoff(request.key):
            raise ProtocolError("only a hand-off can be taken; this key has no request id")
        until = self.loop.time() + request.wait_seconds
        taking = Taking(self, connection, session, request, until, answer, missing, fetching)
        self._takings.add(taking)
        taking.begin()

    def end(self, session: Session) -> None:
        """The session is over: cancel its requests."""
        for taking in [taking for taking in self._takings if taking.session is session]:
            taking.end()
        self.grants.end(session)

    def discard(self, taking: "Taking") -> None:
        self._takings.discard(taking)


@dataclass(slots=True, eq=False)
class Taking:
    node: Takings
    connection: Connection
    session: Session
    request: Take
    until: float
    answer: Callable[[Held, int, float], None]
    missing: Callable[[MissReason], None]
    fetching: Callable[[int], None]
    _bid: Bid | None = None
    _asked: tuple[Owner, int] | None = None
    _sources: list[Source] = field(default_factory=list)
    """Owners still to be queried in this attempt."""
    _unreached: bool = False
    """One of the owners did not answer in this attempt."""
    _leaving: bool = False
    """Its deadline has passed, and the owner where it is queued was sent `Leave`."""
    _locating: asyncio.Task[None] | None = None
    _watcher: Watcher | None = None
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _look_again: asyncio.TimerHandle | None = None
    _failures: int = 0
    """Failed attempts in a row, by causes whose end is not notified: a peer or the store failed,
    or the arena was full."""
    _under_way: bool = False
    _again: bool = False
    _is_fetching: bool = False
    _over: bool = False

    @property
    def address(self) -> QualifiedKey:
        return self.request.namespace, self.request.key

    def begin(self) -> None:
        late = self.until + NODE_SHARE * CALL_SECONDS
        self._timers = [
            self.node.loop.call_at(self.until, self._out_of_patience),
            self.node.loop.call_at(late, self._too_late),
        ]
        self.attempt()

    def attempt(self) -> None:
        """Try this node and then the others; if something changes meanwhile, repeat it
        afterwards."""
        if self._over:
            return
        if self._under_way:
            self._again = True
            return
        self._under_way = True
        self._again = False
        patient = self.node.loop.time() < self.until
        bid = self.node.handoffs.take(self.address, self.session, self._here, patient=patient)
        if bid is not None:  # else the callback ran already, and may have queued again
            self._bid = bid

    def end(self) -> None:
        """Cancel the request. Idempotent."""
        self._over = True
        for timer in (*self._timers, self._look_again):
            if timer is not None:
                timer.cancel()
        if self._locating is not None:
            self._locating.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._bid is not None:
            self.node.handoffs.cancel(self._bid)
        if self._asked is not None:
            owner, number = self._asked
            owner.withdraw(Leave(self.node.owners.next_number(), number))
        self.node.discard(self)

    # -- on this node

    def _here(self, lease: Lease | None) -> None:
        self._bid = None
        if lease is None:
            if self.node.handoffs.leased(self.address):
                self._settle(MissReason.TAKEN)
            else:
                self._locating = self.node.loop.create_task(self._locate())
            return
        held = self.node.shelf.pin(lease.held.item, self.session.id)
        self._hand_over(held, Leased(lease.token, lease.seconds, None))

    def _hand_over(self, held: Held, leased: Leased) -> None:
        if self._over or self._is_deserted():
            self.node.shelf.release([held.ticket], self.session.id)
            self.node.grants.give_back_lease(leased)
            self.end()
            return
        self.end()
        token = self.node.grants.grant(self.session, leased)
        self.answer(held, token, leased.seconds)
        if self._is_deserted():  # the client will never use that token
            self.node.shelf.release([held.ticket], self.session.id)
            self.node.grants.give_back(self.session, token)

    def _is_deserted(self) -> bool:
        return self.session.over or not self.connection.open

    # -- on other nodes

    async def _locate(self) -> None:
        (located,) = await self.node.locator.locate([self.address])
        self._unreached = False
        self._sources = [*located.sources, *located.offers]
        if self._sources:
            self._ask()
        else:
            self._settle(self._reason(located))

    def _reason(self, located: Located) -> MissReason:
        """Why no node can be queried. Locations of this node itself are out of date."""
        if located.record is None:
            return located.reason or MissReason.ABSENT
        me = (self.node.identity.node, self.node.identity.boot)
        others = [at for at in located.record.locations if (at.node, at.boot) != me]
        if not others:
            return MissReason.ABSENT
        return (
            MissReason.OWNER_DEAD
            if all(map(self.node.directory.is_dead, others))
            else MissReason.PEER_FAILED
        )

    def _ask(self) -> None:
        location, endpoint = self._sources.pop(0)
        owner = self.node.owners.at(location, endpoint)
        patience = max(0.0, self.until - self.node.loop.time())
        request = Take(
            self.node.owners.next_number(), self.request.namespace, self.request.key, patience
        )
        self._asked = (owner, request.id)
        owner.ask(request, partial(self._told, (location, endpoint)))

    def _told(self, source: Source, answer: Answer) -> None:
        self._asked = None
        leased = Leased(answer.token, answer.lease_seconds, source)
        if answer.state == "leased":
            if self._over:
                self.node.grants.give_back_lease(leased)
            else:
                self._fetch(leased, source, answer)
            return
        if self._over:
            return
        if answer.state == "absent":
            self.node.locator.forget(self.address)
        else:
            self._unreached = True
        if self._leaving:
            self._finish(MissReason.PEER_FAILED if self._unreached else MissReason.TAKEN)
        elif self._sources:
            self._ask()
        else:
            self._settle(MissReason.PEER_FAILED if self._unreached else MissReason.ABSENT)

    def _fetch(self, leased: Leased, source: Source, answer: Answer) -> None:
        self._is_fetching = True
        self.fetching(answer.nbytes)
        location, endpoint = source
        exactly = location._replace(generation=answer.generation, checksum=answer.checksum)
        located = Located(None, ((exactly, endpoint),))
        done = self.node.fetcher.fetch(self.address, located, loan=True)
        done.add_done_callback(lambda done: self._fetched(leased, done.result()))

    def _fetched(self, leased: Leased, fetched: Fetched) -> None:
        self._is_fetching = False
        if fetched.held is not None:
            held = self.node.shelf.pin(fetched.held.item, self.session.id)
            self.node.shelf.release([fetched.held.ticket], FETCH_OWNER)
            self._hand_over(held, leased)
            return
        self.node.grants.give_back_lease(leased)
        if not self._over:
            self._settle(fetched.reason or MissReason.PEER_FAILED)

    # -- not available now

    def _settle(self, reason: MissReason) -> None:
        """The attempt failed: finish at the deadline, otherwise wait for the next one."""
        self._under_way = False
        loop = self.node.loop
        if loop.time() >= self.until or reason == MissReason.OWNER_DEAD:
            self._finish(reason)
            return
        self._failures = 0 if reason == MissReason.ABSENT else self._failures + 1
        if self._look_again is not None:
            self._look_again.cancel()
        if self._failures:
            self._look_again = loop.call_later(again_seconds(self._failures), self.attempt)
        if self._watcher is None:
            self._watcher = self.node.waiting.watch(self.address, self.until, self.attempt)
        elif self._again:
            self.attempt()

    def _out_of_patience(self) -> None:
        """The deadline has passed. If queued here, finish now. If queued at an owner, send
        `Leave` and await its reply: only that shows that the owner did receive the Take."""
        if not self.request.wait_seconds:
            return
        if self._bid is not None:
            self._finish(
                MissReason.TAKEN if self.node.handoffs.leased(self.address) else MissReason.ABSENT
            )
        elif self._asked is not None:
            owner, number = self._asked
            self._leaving = owner.is_linked
            if self._leaving:
                owner.withdraw(Leave(self.node.owners.next_number(), number))
            else:
                self._finish(MissReason.PEER_FAILED)

    def _too_late(self) -> None:
        if not self._is_fetching:  # a fetch has a deadline of its own
            self._finish(MissReason.STORE_DOWN if self._asked is None else MissReason.PEER_FAILED)

    def _finish(self, reason: MissReason) -> None:
        if not self._over:
            self.end()
            self.missing(reason)
