"""Takes of hand-offs in virtual time: from this node and from another, cancelled at each wait.

Two nodes' parts for hand-offs as they are, with a connection, a locator and a transfer in memory.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from cancelling import cancel_at_each_wait
from lookup_buffer.errors import MissReason
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node.connection import Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.identity import Identity
from lookup_buffer.node.locate import Located, Waiting
from lookup_buffer.node.owners import UNREACHED, Answer
from lookup_buffer.node.shelf import Shelf
from lookup_buffer.node.takes import Taken, Takes
from lookup_buffer.node.transfer import FETCH_OWNER, Fetched, Wanted
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import Acknowledge, GiveBack, Take
from store import Location, Record
from virtual_loop import VirtualLoop

NAMESPACE = "f" * 64
ADDRESS = (NAMESPACE, "k@r")
AT = Location("owner", "boot", 1, 1)
HEADER = TensorHeader("uint8", (100,), 100)
WRITER, OTHER = 7, "another taker"
LEASE_SECONDS = 10.0
ONE_WAY_SECONDS = 0.001
WAIT_SECONDS = 5.0


class Node:
    """The arena and the hand-offs of one node."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.shelf = Shelf(1 << 20, lambda _address, _reason: None, loop.time)
        self.handoffs = Handoffs(loop, self.shelf, Counters(), LEASE_SECONDS)

    def insert(self) -> None:
        item = self.shelf.reserve_handoff(ADDRESS, HEADER, ttl_seconds=1e6, wanted=False)
        pin = self.shelf.commit(item, 1, WRITER)
        self.handoffs.arrived(ADDRESS)
        self.shelf.release([pin.ticket], WRITER)

    def at_rest(self, *, holds: bool) -> None:
        gauges = self.shelf.gauges()
        assert (gauges.pins, gauges.reserved_bytes) == (0, 0)
        assert self.handoffs.holds(ADDRESS) == holds
        assert not self.handoffs.leased(ADDRESS)
        assert not self.handoffs._lines


class Link:
    """The connection to the owner: requests arrive there after `ONE_WAY_SECONDS`, as answers do."""

    def __init__(self, owner: Node) -> None:
        self.owner, self.loop = owner, owner.loop
        self.is_cut = False
        self._takes: dict[int, tuple[asyncio.Task[None], asyncio.Future[Answer]]] = {}

    def ask(self, request: Any) -> "asyncio.Future[Answer]":
        asked: asyncio.Future[Answer] = self.loop.create_future()
        if self.is_cut:
            self.loop.call_later(ONE_WAY_SECONDS, self._answer, asked, UNREACHED)
        elif isinstance(request, Take):
            self._takes[request.id] = self.loop.create_task(self._take(request, asked)), asked
        else:
            self.loop.create_task(self._acknowledge(request, asked))
        return asked

    async def _take(self, request: Take, asked: "asyncio.Future[Answer]") -> None:
        await asyncio.sleep(ONE_WAY_SECONDS)
        lease = self.owner.handoffs.take_now(ADDRESS, self)
        if lease is None and request.wait_seconds:
            lease = await self.owner.handoffs.take_queued(ADDRESS, self)
        self._reply(asked, lease)

    def _reply(self, asked: "asyncio.Future[Answer]", lease: Any) -> None:
        answer = Answer("absent")
        if lease is not None:
            answer = Answer("leased", lease.token, lease.seconds, 1, 1, HEADER.nbytes)
        self.loop.call_later(ONE_WAY_SECONDS, self._answer, asked, answer)

    async def _acknowledge(self, request: Acknowledge, asked: "asyncio.Future[Answer]") -> None:
        await asyncio.sleep(ONE_WAY_SECONDS)
        won = self.owner.handoffs.acknowledge(request.token)
        self.loop.call_later(ONE_WAY_SECONDS, self._answer, asked, Answer("won" if won else "lost"))

    def _answer(self, asked: "asyncio.Future[Answer]", answer: Answer) -> None:
        if asked.cancelled() and answer.state == "leased":
            self.say(GiveBack(0, answer.token))
        if not asked.done():
            asked.set_result(answer)

    def say(self, request: GiveBack) -> None:
        self.loop.call_later(ONE_WAY_SECONDS, self.owner.handoffs.give_back, request.token)

    def leave(self, number: int, take: int) -> None:
        self.loop.call_later(ONE_WAY_SECONDS, self._leave, take)

    def _leave(self, take: int) -> None:
        task, asked = self._takes.get(take, (None, None))
        if task is not None and asked is not None and not task.done():
            task.cancel()
            self.loop.call_later(ONE_WAY_SECONDS, self._answer, asked, Answer("absent"))

    # What `Takes` asks of `Owners`.

    def at(self, location: Location, endpoint: str) -> "Link":
        return self

    def next_number(self) -> int:
        return len(self._takes) + 1


class Pair:
    """A taker's node, and another one, which may own the hand-off."""

    def __init__(self, *, is_remote: bool) -> None:
        self.loop = VirtualLoop()
        self.here, self.there = Node(self.loop), Node(self.loop)
        self.owner = self.there if is_remote else self.here
        self.is_remote = is_remote
        self.watches: list[Callable[[], None]] = []
        self.link = Link(self.there)
        parts: Any = self
        links: Any = self.link
        self.waiting = Waiting(self.loop, parts)
        self.takes = Takes(
            self.loop, self.here.shelf, self.here.handoffs, links, parts, parts,
            Identity("taker", "boot", ""), self.waiting, parts,
        )  # fmt: skip
        anchor: Any = None
        self.session = Session(1, anchor, None)

    # What it asks of `Locator`, `Directory` and `Fetcher`.

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        await asyncio.sleep(ONE_WAY_SECONDS)
        if not (self.is_remote and self.there.handoffs.holds(ADDRESS)):
            return [Located(None, reason=MissReason.ABSENT)]
        record = Record(*ADDRESS, "uint8", (100,), 100, "tensor", 1.0, locations=(AT,))
        return [Located(record, ((AT, "tcp://127.0.0.1:1"),))]

    def forget(self, address: QualifiedKey) -> None: ...

    def watch(self, address: QualifiedKey, notify: Callable[[], None]) -> Callable[[], None]:
        self.watches.append(notify)
        return lambda: self.watches.remove(notify)

    def is_dead(self, location: Location) -> bool:
        return False

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        for one in wanted:
            self.loop.call_later(5 * ONE_WAY_SECONDS, self._land, one)

    def _land(self, one: Wanted) -> None:
        shelf = self.here.shelf
        item = shelf.reserve(ADDRESS, HEADER, origin="owner", ttl_seconds=None, loan=True)
        assert item is not None
        one.done(Fetched(shelf.commit(item, 1, FETCH_OWNER)))

    # The test's part.

    async def take(self, wait_seconds: float = WAIT_SECONDS) -> Taken | MissReason:
        request = Take(1, *ADDRESS, wait_seconds)
        return await self.takes.take(self.session, request, lambda _: None)

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float = 1000.0) -> Any:
        task = self.loop.create_task(coroutine)
        self.loop.run(seconds)
        return task.result()

    def release(self, taken: Taken | MissReason) -> Taken:
        assert isinstance(taken, Taken)
        self.here.shelf.release([taken.held.ticket], self.session.id)
        return taken

    def at_rest(self, *, holds: bool) -> None:
        self.here.at_rest(holds=holds and not self.is_remote)
        self.there.at_rest(holds=holds and self.is_remote)
        assert not self.watches
        assert not self.waiting._waiters
        assert not self.takes._grants


@pytest.fixture(params=[True, False], ids=["from another node", "from this node"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(is_remote=request.param)


async def acknowledged(pair: Pair) -> bool:
    taken = pair.release(await pair.take())
    return await pair.takes.acknowledge(pair.session, taken.token)


def test_a_hand_off_is_taken_once(pair: Pair) -> None:
    pair.owner.insert()
    assert pair.run(acknowledged(pair)) is True
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
    lease = pair.owner.handoffs.take_now(ADDRESS, OTHER)
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
    assert pair.owner.handoffs.take_now(ADDRESS, OTHER) is not None
    began = pair.loop.time()
    assert pair.run(pair.take(1.0), 1.5) is MissReason.TAKEN
    assert pair.loop.time() - began < 2.0
    pair.loop.run(LEASE_SECONDS)
    pair.at_rest(holds=True)


def test_an_owner_that_does_not_answer_is_queried_until_the_deadline() -> None:
    pair = Pair(is_remote=True)
    pair.owner.insert()
    pair.link.is_cut = True
    assert pair.run(pair.take()) is MissReason.PEER_FAILED
    pair.loop.call_later(2.0, setattr, pair.link, "is_cut", False)
    assert pair.run(acknowledged(pair)) is True
    pair.at_rest(holds=False)


def test_an_acknowledgement_is_repeated_until_the_lease_is_over() -> None:
    pair = Pair(is_remote=True)
    pair.owner.insert()

    async def cut_then(*, healed: bool) -> bool:
        taken = pair.release(await pair.take())
        pair.link.is_cut = True
        if healed:
            pair.loop.call_later(2.0, setattr, pair.link, "is_cut", False)
        first = pair.takes.acknowledge(pair.session, taken.token)
        assert pair.takes.acknowledge(pair.session, taken.token) is first, "a repeated request"
        return await first

    assert pair.run(cut_then(healed=False)) is False
    pair.link.is_cut = False
    assert pair.run(cut_then(healed=True)) is True
    pair.at_rest(holds=False)


@pytest.mark.parametrize("obstacle", ["none", "leased", "absent", "cut"])
def test_a_take_that_is_cancelled_at_any_wait_leaves_the_item(pair: Pair, obstacle: str) -> None:
    async def take() -> None:
        taken = await pair.take()
        if isinstance(taken, Taken):
            pair.release(taken)
            pair.takes.give_back(pair.session, taken.token)

    async def check() -> None:
        await asyncio.sleep(3 * LEASE_SECONDS)
        pair.at_rest(holds=obstacle != "absent")
        begin()

    def begin() -> None:
        pair.link.is_cut = obstacle == "cut"
        if obstacle == "leased":
            lease = pair.owner.handoffs.take_now(ADDRESS, OTHER)
            assert lease is not None
            pair.loop.call_later(1.0, pair.owner.handoffs.give_back, lease.token)

    if obstacle != "absent":
        pair.owner.insert()
    begin()
    waits = pair.run(cancel_at_each_wait(take, check), 1e6)
    assert waits >= {"none": 0, "leased": 1, "absent": 2, "cut": 0}[obstacle]


def test_a_lease_that_comes_in_the_turn_of_the_cancellation_is_given_back() -> None:
    pair = Pair(is_remote=True)
    pair.owner.insert()
    task = pair.loop.create_task(pair.take())
    answer = pair.link._answer

    def answered(asked: "asyncio.Future[Answer]", found: Answer) -> None:
        answer(asked, found)
        task.cancel()

    link: Any = pair.link
    link._answer = answered
    pair.loop.run(1.0)
    assert task.cancelled()
    pair.at_rest(holds=True)


def test_many_queued_takers_that_leave_in_one_turn_are_skipped() -> None:
    loop = VirtualLoop()
    node = Node(loop)
    node.insert()
    lease = node.handoffs.take_now(ADDRESS, OTHER)
    assert lease is not None
    tasks = [loop.create_task(node.handoffs.take_queued(ADDRESS, "a peer")) for _ in range(1000)]
    loop.run(0.1)

    def leave() -> None:
        for task in tasks:
            task.cancel()
        node.handoffs.give_back(lease.token)

    loop.call_soon(leave)
    loop.run(1.0)
    node.at_rest(holds=True)
