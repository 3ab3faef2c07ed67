"""Takes of hand-offs in virtual time: from this node and from another, cancelled at each wait.

Two nodes' parts for hand-offs as they are, with a connection, a locator and a transfer in memory.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cancelling import cancel_at_each_wait
from lookup_buffer.errors import LookupBufferError, MissReason, PipeBroken
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node import handoffs, links, takes
from lookup_buffer.node.arena import PEER_OWNER, Arena
from lookup_buffer.node.connection import Connection, MessageProtocol, Session, Tasks
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import ABSENT, Askers, Handoffs
from lookup_buffer.node.items import Pin
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located, Waiting
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.takes import Owners, Taken, Takes
from lookup_buffer.node.transfer import FETCH_OWNER, TURN_SECONDS, Fetched, Wanted
from lookup_buffer.protocol.auth import PROTOCOL_VERSION, Purpose
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Acknowledge, OwnerReply, Take
from lookup_buffer.times import OWNER_IDLE_SECONDS, PEER_ANSWER_SECONDS
from store import Location, Record
from virtual_loop import VirtualLoop

NAMESPACE = "f" * 64
ADDRESS = (NAMESPACE, "k@r")
AT = Location("owner", "boot", 1, 1)
PURPOSE = Purpose("handoffs", "tcp://127.0.0.1:1", "owner", "boot")
HEADER = TensorHeader("uint8", (100,), 100)
WRITER, OTHER = 7, "another taker"
LEASE_SECONDS = 10.0
ONE_WAY_SECONDS = 0.001
WAIT_SECONDS = 5.0


class Node:
    """The arena and the hand-offs of one node."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.arena = Arena(1 << 20, lambda _address, _reason: None, loop.time)
        self.handoffs = Handoffs(loop, self.arena, Counters(), LEASE_SECONDS)

    def insert(self) -> None:
        item = self.arena.reserve_handoff(ADDRESS, HEADER, ttl_seconds=1e6, wanted=False)
        pin = self.arena.commit(item, 1, WRITER)
        self.handoffs.arrived(ADDRESS)
        self.arena.release([pin.ticket], WRITER)

    def at_rest(self, *, holds: bool) -> None:
        gauges = self.arena.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, 0)
        assert self.arena.holds(ADDRESS) == holds
        assert not self.handoffs.leased(ADDRESS)
        assert not self.handoffs._queues


class End:
    """One end of a connection in memory."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.other = self


class InMemory(Connection):
    """Messages arrive at the other end after `ONE_WAY_SECONDS`."""

    def __init__(
        self, loop: Any, end: Any, protocol: MessageProtocol, macs: None = None, **_: Any
    ) -> None:
        self._loop, self._protocol = loop, protocol
        self._open = self._is_heard = True
        self._requests = Tasks()
        self._other_end = end.other
        end.connection = self

    def send(self, message: Any) -> None:
        if self._open:
            self._loop.call_later(ONE_WAY_SECONDS, self._deliver, message)

    def _deliver(self, message: Any) -> None:
        connection = self._other_end.connection
        if self._open and connection is not None and connection.open:
            connection._protocol.message_received(connection, message)

    def end(self, error: LookupBufferError | None) -> None:
        """The other end is not told: as if the network were cut."""
        if self._open:
            self._open = False
            self._requests.cancel()
            self._protocol.connection_lost(self, error)


class Link:
    """The connections to the owner."""

    def __init__(self, owner: Node) -> None:
        self.is_cut = False
        self.is_silent = False
        """Whether the owner reads nothing of its next connection."""
        self.near = End()
        self.askers = Askers(owner.loop, owner.handoffs, Counters())

    async def dial(self, *_: object) -> Any:
        await asyncio.sleep(ONE_WAY_SECONDS)
        if self.is_cut:
            raise PipeBroken("the connection failed")
        self.near, far = End(), End()
        self.near.other, far.other = far, self.near
        ours: Any = self.near
        theirs: Any = far
        if not self.is_silent:
            self.askers.admit(links.Link(theirs, PURPOSE, None, PROTOCOL_VERSION))
        return links.Link(ours, PURPOSE, None, PROTOCOL_VERSION)

    def cut(self) -> None:
        self.is_cut = True
        if self.near.connection is not None:
            self.near.connection.end(None)


class Pair:
    """A taker's node, and another one, which may own the hand-off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_remote: bool) -> None:
        self.loop = VirtualLoop()
        self.here, self.there = Node(self.loop), Node(self.loop)
        self.owner = self.there if is_remote else self.here
        self.is_remote = is_remote
        self.watches: list[Callable[[], None]] = []
        self.link = Link(self.there)
        monkeypatch.setattr(takes, "Connection", InMemory)
        monkeypatch.setattr(handoffs, "Connection", InMemory)
        monkeypatch.setattr(takes, "dial", self.link.dial)
        parts: Any = self
        self.waiting = Waiting(self.loop, parts)
        owners = Owners(self.loop, parts, Credentials())
        self.takes = Takes(
            self.loop, self.here.arena, self.here.handoffs, owners, parts,
            parts, Identity("taker", "boot", ""), self.waiting, parts,
        )  # fmt: skip
        anchor: Any = None
        self.session = Session(1, anchor, None)
        self.announced: list[tuple[int, int]] = []
        self.asked: list[asyncio.Future[bool]] = []
        """What the client is answered, by the id of its acknowledgement."""
        self.transfer_seconds = 5 * ONE_WAY_SECONDS
        self.is_crowded = False
        self.queued: list[Wanted] = []
        self.landed: Callable[[], object] = lambda: None

    # What it asks of `Locator`, `Directory` and `Fetcher`.

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        await asyncio.sleep(ONE_WAY_SECONDS)
        if not (self.is_remote and self.there.arena.holds(ADDRESS)):
            return [Located(None, reason=MissReason.ABSENT)]
        record = Record(*ADDRESS, "uint8", (100,), 100, "tensor", 1.0, locations=(AT,))
        return [Located(record, ((AT, "tcp://127.0.0.1:1"),))]

    def forget(self, address: QualifiedKey) -> None: ...

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        self.watches.append(notify)
        return lambda: self.watches.remove(notify)

    def is_dead(self, location: Location) -> bool:
        return False

    def is_replaced(self, location: Location) -> bool:
        return False

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        for one in wanted:
            if self.is_crowded:
                self.queued.append(one)
                self.loop.call_at(one.until, self._deny, one)
                continue
            pin = self.there.arena.hold(ADDRESS, PEER_OWNER)  # as it is sent
            self.loop.call_later(self.transfer_seconds, self._land, one, pin)

    def withdraw(self, one: Wanted) -> bool:
        if is_queued := one in self.queued:
            self.queued.remove(one)
        return is_queued

    def _deny(self, one: Wanted) -> None:
        if self.withdraw(one):
            one.done(Fetched(None, MissReason.BUSY))

    def _land(self, one: Wanted, pin: Pin | None) -> None:
        if pin is not None:
            self.there.arena.release([pin.ticket], PEER_OWNER)
        arena = self.here.arena
        item = arena.reserve(ADDRESS, HEADER, origin="owner", ttl_seconds=None, loan=True)
        assert item is not None
        one.done(Fetched(arena.commit(item, 1, FETCH_OWNER)))
        self.landed()

    # The test's part.

    async def take(self, wait_seconds: float = WAIT_SECONDS) -> Taken | MissReason:
        connection: Any = self
        return await self.takes.take(connection, self.session, Take(1, *ADDRESS, wait_seconds))

    @contextmanager
    def fetching(self, request_id: int) -> Iterator[Callable[[int], None]]:
        """As `Connection` to the client."""
        yield lambda nbytes: self.announced.append((request_id, nbytes))

    async def acknowledge(self, taken: Taken, session: Session | None = None) -> bool:
        connection: Any = self
        request = Acknowledge(len(self.asked), taken.token)
        self.asked.append(self.loop.create_future())
        answer = self.takes.acknowledge(connection, session or self.session, request)
        if answer is not None:
            self.send({"id": request.id, **answer})
        return await self.asked[request.id]

    def send(self, message: dict[str, Any]) -> None:
        """As `Connection` to the client."""
        self.asked[message["id"]].set_result(message["won"])

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float = 1000.0) -> Any:
        task = self.loop.create_task(coroutine)
        self.loop.run(seconds)
        return task.result()

    def release(self, taken: Taken | MissReason) -> Taken:
        assert isinstance(taken, Taken)
        self.here.arena.release([taken.held.ticket], self.session.id)
        return taken

    def at_rest(self, *, holds: bool) -> None:
        self.here.at_rest(holds=holds and not self.is_remote)
        self.there.at_rest(holds=holds and self.is_remote)
        assert not self.watches
        assert not self.waiting._waiters
        assert not self.takes._remote
        assert not any(self.link.askers._takes.values())


@pytest.fixture(params=[True, False], ids=["from another node", "from this node"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch, is_remote=request.param)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The other node is the owner."""
    return Pair(monkeypatch, is_remote=True)


async def acknowledged(pair: Pair) -> bool:
    return await pair.acknowledge(pair.release(await pair.take()))


def test_a_hand_off_is_taken_once(pair: Pair) -> None:
    pair.owner.insert()
    assert pair.run(acknowledged(pair)) is True
    assert pair.announced == ([(1, HEADER.nbytes)] if pair.is_remote else [])
    assert pair.run(pair.take(0.0)) is MissReason.ABSENT
    pair.at_rest(holds=False)


def test_a_take_waits_for_the_insert(pair: Pair) -> None:
    pair.loop.call_later(1.0, pair.owner.insert)
    pair.loop.call_later(1.1, lambda: [notify() for notify in list(pair.watches)])
    assert pair.run(acknowledged(pair)) is True
    pair.at_rest(holds=False)


@pytest.mark.parametrize("is_returned", [True, False])
def test_a_take_queues_behind_another_taker(pair: Pair, is_returned: bool) -> None:
    pair.owner.insert()
    lease = pair.owner.handoffs.take(ADDRESS, OTHER)
    assert lease is not None
    end = pair.owner.handoffs.give_back if is_returned else pair.owner.handoffs.acknowledge
    pair.loop.call_later(1.0, end, lease.token)
    if is_returned:
        assert pair.run(acknowledged(pair)) is True
    else:
        assert pair.run(pair.take()) is MissReason.ABSENT
    pair.at_rest(holds=False)


def test_a_take_that_queues_beyond_its_deadline_leaves_the_queue(pair: Pair) -> None:
    pair.owner.insert()
    assert pair.owner.handoffs.take(ADDRESS, OTHER) is not None
    began = pair.loop.time()
    assert pair.run(pair.take(1.0), 1.5) is MissReason.TAKEN
    assert pair.loop.time() - began < 2.0
    pair.loop.run(LEASE_SECONDS)
    pair.at_rest(holds=True)


def test_an_owner_that_does_not_answer_is_queried_until_the_deadline(remote: Pair) -> None:
    remote.owner.insert()
    remote.link.cut()
    assert remote.run(remote.take()) is MissReason.PEER_FAILED
    remote.loop.call_later(2.0, setattr, remote.link, "is_cut", False)
    assert remote.run(acknowledged(remote)) is True
    remote.at_rest(holds=False)


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_owner_says_in_time_whether_it_has_the_item_or_counts_as_unreached(
    remote: Pair, is_silent: bool
) -> None:
    remote.link.is_silent = is_silent
    owner = remote.takes.owners.at(AT, "tcp://127.0.0.1:1")

    async def holds() -> OwnerReply:
        return await owner.holds(ADDRESS)

    expected = takes.UNREACHED if is_silent else ABSENT
    assert remote.run(holds(), PEER_ANSWER_SECONDS + 0.1) == expected
    assert not owner._asked


@pytest.mark.parametrize(
    ("wait_seconds", "waits"),
    [(0.0, TURN_SECONDS), (0.2, takes.GRANTED_TURN_SECONDS), (5.0, 5.0)],
)
def test_a_take_waits_for_the_turn_of_its_transfer_for_its_time(
    remote: Pair, wait_seconds: float, waits: float
) -> None:
    """Without one for TURN_SECONDS. The item stays where it is."""
    remote.owner.insert()
    remote.is_crowded = True

    async def take() -> float:
        began = remote.loop.time()
        assert await remote.take(wait_seconds) is MissReason.BUSY
        return remote.loop.time() - began

    assert remote.run(take()) == pytest.approx(waits, abs=0.5)
    remote.at_rest(holds=True)


def test_a_take_that_is_cancelled_waits_for_no_turn(remote: Pair) -> None:
    remote.owner.insert()
    remote.is_crowded = True
    task = remote.loop.create_task(remote.take())
    remote.loop.run(1.0)
    assert len(remote.queued) == 1
    task.cancel()
    remote.loop.run(1.0)
    assert task.cancelled()
    assert not remote.queued
    remote.at_rest(holds=True)


def test_an_acknowledgement_is_repeated_until_the_lease_is_over(remote: Pair) -> None:
    remote.owner.insert()

    async def cut_then(*, healed: bool) -> bool:
        taken = remote.release(await remote.take())
        remote.link.cut()
        if healed:
            remote.loop.call_later(2.0, setattr, remote.link, "is_cut", False)
        first = asyncio.ensure_future(remote.acknowledge(taken))
        await asyncio.sleep(0)
        again = await remote.acknowledge(taken)
        assert not first.done(), "only the last one waits, however often it is requested"
        first.cancel()
        return again

    assert remote.run(cut_then(healed=False)) is False
    remote.link.is_cut = False
    assert remote.run(cut_then(healed=True)) is True
    remote.at_rest(holds=False)


def test_a_repeated_acknowledgement_gets_the_same_answer(pair: Pair) -> None:
    """Of the session that has the lease; of another one it is lost."""
    anchor: Any = None
    other = Session(2, anchor, None)

    async def test() -> None:
        taken = pair.release(await pair.take())
        pair.takes.give_back(other, taken.token)
        assert await pair.acknowledge(taken, other) is False
        assert await pair.acknowledge(taken)
        assert await pair.acknowledge(taken, other) is False
        for _ in range(2):
            assert await pair.acknowledge(taken) is True
            pair.takes.give_back(pair.session, taken.token)  # too late
            pair.takes.end(pair.session)
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert await pair.acknowledge(taken) is False, "it is forgotten"

    pair.owner.insert()
    pair.run(test())
    pair.at_rest(holds=False)


def test_the_end_of_a_session_gives_back_what_it_has_not_acknowledged(pair: Pair) -> None:
    pair.owner.insert()
    taken = pair.release(pair.run(pair.take(), 1.0))
    assert pair.owner.handoffs.leased(ADDRESS)
    pair.takes.end(pair.session)
    pair.loop.run(1.0)
    assert not pair.owner.handoffs.leased(ADDRESS), "before its lease is over"
    assert pair.run(pair.acknowledge(taken)) is False
    pair.at_rest(holds=True)


@pytest.mark.parametrize("obstacle", ["none", "leased", "absent", "cut"])
def test_a_take_that_is_cancelled_at_any_wait_leaves_the_item(pair: Pair, obstacle: str) -> None:
    async def take() -> None:
        taken = await pair.take()
        if isinstance(taken, Taken):
            pair.release(taken)
            pair.takes.give_back(pair.session, taken.token)

    async def check() -> None:
        await asyncio.sleep(2.0)
        assert not pair.owner.handoffs.leased(ADDRESS), "it need not expire"
        await asyncio.sleep(3 * LEASE_SECONDS)
        pair.at_rest(holds=obstacle != "absent")
        begin()

    def begin() -> None:
        if obstacle == "cut":
            pair.link.cut()
        if obstacle == "leased":
            lease = pair.owner.handoffs.take(ADDRESS, OTHER)
            assert lease is not None
            pair.loop.call_later(1.0, pair.owner.handoffs.give_back, lease.token)

    if obstacle != "absent":
        pair.owner.insert()
    begin()
    waits = pair.run(cancel_at_each_wait(take, check), 1e6)
    assert waits >= {"none": 0, "leased": 1, "absent": 2, "cut": 0}[obstacle]


@pytest.mark.parametrize("what", ["lease", "bytes"])
def test_what_comes_in_the_turn_of_the_cancellation_is_given_back(
    remote: Pair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    remote.owner.insert()
    task = remote.loop.create_task(remote.take())

    class Cancels(InMemory):
        def _deliver(self, message: Any) -> None:
            super()._deliver(message)
            if message.get("state") == "leased" and what == "lease":
                task.cancel()

    monkeypatch.setattr(takes, "Connection", Cancels)
    monkeypatch.setattr(handoffs, "Connection", Cancels)
    remote.landed = task.cancel if what == "bytes" else lambda: None
    remote.loop.run(1.0)
    assert task.cancelled()
    remote.at_rest(holds=True)


def test_many_queued_takers_that_leave_in_one_turn_are_skipped() -> None:
    loop = VirtualLoop()
    node = Node(loop)
    node.insert()
    lease = node.handoffs.take(ADDRESS, OTHER)
    assert lease is not None
    tasks = [loop.create_task(node.handoffs.queue(ADDRESS, "a peer")) for _ in range(1000)]
    loop.run(0.1)

    def leave() -> None:
        for task in tasks:
            task.cancel()
        node.handoffs.give_back(lease.token)

    loop.call_soon(leave)
    loop.run(1.0)
    node.at_rest(holds=True)


def test_a_transfer_may_take_longer_than_lease_and_idle_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(monkeypatch, is_remote=True)
    pair.transfer_seconds = LEASE_SECONDS + OWNER_IDLE_SECONDS + 100.0
    pair.owner.insert()

    async def take() -> bool:
        taken = pair.release(await pair.take())
        await asyncio.sleep(LEASE_SECONDS - 1.0)  # the client copies it
        assert pair.link.near.connection.open, "with its end the owner has the item back"
        return await pair.acknowledge(taken)

    async def tick() -> None:
        while True:
            pair.takes.owners.tick()
            await asyncio.sleep(1.0)

    ticking = pair.loop.create_task(tick())
    assert pair.run(take())
    ticking.cancel()
    pair.loop.run(1.0)
