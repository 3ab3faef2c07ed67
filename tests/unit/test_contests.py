"""A hand-off that another node published first, in virtual time: the store names its owner.

The owner may have died, or hang: then it accepts connections and answers nothing.
"""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lookup_buffer.errors import MissReason, NodeUnavailable
from lookup_buffer.node import takes
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.items import Item
from lookup_buffer.node.links import Credentials
from lookup_buffer.node.locate import Located
from lookup_buffer.node.membership import Identity
from lookup_buffer.node.takes import Owners
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import InsertOutcome, OwnerReply
from lookup_buffer.times import PEER_ANSWER_SECONDS
from store import Location, Publication, Record
from virtual_loop import VirtualLoop

ADDRESS = ("f" * 64, "k@r")
HEADER = TensorHeader("uint8", (100,), 100)
WRITER = 7
WAIT_SECONDS = 5.0
HANGING, LIVING = Location("hanging", "boot", 1, 1), Location("living", "boot", 1, 1)


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


class Node:
    """One node, whose store fails after it has named other owners: none is known but `located`."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        parts: Any = self
        self.breaker = SimpleNamespace(failures=0)
        self.arena = Arena(1 << 20, lambda _address, _reason: None, self.loop.time)
        handoffs = Handoffs(parts.loop, self.arena, Counters(), 10.0)
        self.announcements = Announcements(
            parts.loop, self.arena, handoffs, parts, parts, parts, Identity("n", "b", ""), parts,
            Counters(),
        )  # fmt: skip
        self.handoffs = handoffs
        self.located: list[Location] = []
        self.owners = Owners(parts.loop, parts, Credentials())

    # What it asks of `Locator`, `Directory`, `Owners` and `Registrar`.

    def forget(self, address: object) -> None: ...

    async def locate(self, addresses: list[object]) -> list[Located]:
        await asyncio.sleep(0.001)
        if not self.located:
            return [Located(None, reason=MissReason.STORE_DOWN)]
        locations = tuple(self.located)
        return [Located(Record(*ADDRESS, "uint8", (100,), 100, "tensor", 1.0, locations=locations))]

    def endpoint(self, location: Location) -> str:
        return "tcp://127.0.0.1:1"

    def at(self, location: Location, endpoint: str) -> Any:
        if location == HANGING:
            return self.owners.at(location, endpoint)

        async def holds(_: object) -> OwnerReply:
            return OwnerReply("present")

        return SimpleNamespace(holds=holds)

    def changed(self, address: object, reason: str, void: object) -> None: ...

    def insert(self) -> Item:
        item = self.arena.reserve_handoff(ADDRESS, HEADER, ttl_seconds=300.0, wanted=False)
        self.arena.release([self.arena.commit(item, 1, WRITER).ticket], WRITER)
        return item

    def report(self, item: Item, outcome: Publication) -> None:
        self.announcements.handle_reports([(ADDRESS, item.generation, outcome)])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(takes, "dial", hang)
    node = Node()
    yield node
    node.owners.close()
    node.loop.run(0.0)


def test_a_store_that_fails_after_it_named_another_owner_stores_nothing(node: Node) -> None:
    item = node.insert()
    confirming = node.loop.create_task(node.announcements.confirm(item, WAIT_SECONDS))
    node.loop.run(0.01)
    node.report(item, Publication.OWNED)
    node.breaker.failures = 1
    node.loop.run(WAIT_SECONDS - 0.1)
    assert not confirming.done(), "the other node's takers have its item, too"
    assert node.handoffs.take(ADDRESS, "a taker") is None
    node.loop.run(1.0)
    with pytest.raises(NodeUnavailable):
        confirming.result()
    assert not node.arena.holds(ADDRESS)
    assert not node.announcements._contests


def test_an_owner_that_never_answers_is_not_awaited_beyond_the_insert(node: Node) -> None:
    node.located = [HANGING]
    item = node.insert()
    confirming = node.loop.create_task(node.announcements.confirm(item, WAIT_SECONDS))
    node.loop.run(0.01)
    node.report(item, Publication.OWNED)
    node.loop.run(WAIT_SECONDS + 0.1)
    with pytest.raises(NodeUnavailable, match="does not answer"):
        confirming.result()
    node.loop.run(PEER_ANSWER_SECONDS)
    assert not node.announcements._contests
    assert not node.owners.at(HANGING, "")._asked


def test_an_owner_that_never_answers_does_not_hide_another_one(node: Node) -> None:
    node.located = [HANGING, LIVING]
    item = node.insert()
    confirming = node.loop.create_task(node.announcements.confirm(item, WAIT_SECONDS))
    node.loop.run(0.01)
    node.report(item, Publication.OWNED)
    node.loop.run(WAIT_SECONDS - 0.1)
    assert confirming.result() is InsertOutcome.EXISTS
    assert not node.announcements._contests


def test_the_next_report_settles_it(node: Node) -> None:
    item = node.insert()
    confirming = node.loop.create_task(node.announcements.confirm(item, WAIT_SECONDS))
    node.loop.run(0.01)
    for _ in range(3):
        node.report(item, Publication.OWNED)
        node.loop.run(0.2)
    node.report(item, Publication.ADDED)
    node.loop.run(0.2)
    assert confirming.result() is InsertOutcome.STORED
    assert not node.announcements._contests


def test_without_the_store_an_insert_is_stored(node: Node) -> None:
    confirming = node.loop.create_task(node.announcements.confirm(node.insert(), WAIT_SECONDS))
    node.breaker.failures = 1
    node.loop.run(0.2)
    assert confirming.result() is InsertOutcome.STORED
