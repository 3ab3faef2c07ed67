"""A hand-off that another node published first, in virtual time: the store names its owner."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lookup_buffer.errors import MissReason, NodeUnavailable
from lookup_buffer.node.announcements import Announcements
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import Handoffs
from lookup_buffer.node.items import Item
from lookup_buffer.node.locate import Located
from lookup_buffer.node.membership import Identity
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import InsertOutcome
from store import Publication
from virtual_loop import VirtualLoop

ADDRESS = ("f" * 64, "k@r")
HEADER = TensorHeader("uint8", (100,), 100)
WRITER = 7
WAIT_SECONDS = 5.0


class Node:
    """One node, whose store fails after it has named another owner."""

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

    # What it asks of `Locator` and `Registrar`.

    def forget(self, address: object) -> None: ...

    async def locate(self, addresses: list[object]) -> list[Located]:
        await asyncio.sleep(0.001)
        return [Located(None, reason=MissReason.STORE_DOWN)]

    def changed(self, address: object, reason: str, void: object) -> None: ...

    def insert(self) -> Item:
        item = self.arena.reserve_handoff(ADDRESS, HEADER, ttl_seconds=300.0, wanted=False)
        self.arena.release([self.arena.commit(item, 1, WRITER).ticket], WRITER)
        return item

    def report(self, item: Item, outcome: Publication) -> None:
        self.announcements.handle_reports([(ADDRESS, item.generation, outcome)])


@pytest.fixture
def node() -> Node:
    return Node()


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
