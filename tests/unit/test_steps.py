"""How much one request makes a node do, in instructions of Python: a client may hold all that the
bounds allow it, and then ask for what has to look through that."""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest

from lookup_buffer.errors import BufferFull
from lookup_buffer.node import arena
from lookup_buffer.node.arena import EXPIRED_PAGE, PEER_OWNER, Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import Lanes, Pools, _Offered
from lookup_buffer.node.handoffs import Arrival, Handoffs
from lookup_buffer.node.items import ENTRY_BYTES, Item, entry_bytes_of
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.protocol.messages import OpenPool
from lookup_buffer.shm import allocator
from steps import steps_of
from virtual_loop import PacedTurns, VirtualLoop

NAMESPACE = "f" * 64
NONE = TensorHeader.of_none()
MANY = 2000
FEW = 1000
"""Steps for each of MANY, at most: a walk over all the others would take more than that."""
OTHER, HOLDER, TAKER = 1, 2, 3


class Node:
    def __init__(self, capacity_bytes: int = 16 << 20) -> None:
        self.loop = VirtualLoop()
        self.arena = Arena(capacity_bytes, lambda _address, _reason: None, self.loop.time)
        parts: Any = self.loop
        self.handoffs = Handoffs(parts, self.arena, Counters(), 10.0)
        self.numbers = itertools.count()

    def store(self, name: str, nbytes: int = 0) -> Item:
        header = TensorHeader("uint8", (nbytes,), nbytes) if nbytes else NONE
        item = self.arena.reserve((NAMESPACE, name), header, origin="local", ttl_seconds=None)
        assert item is not None
        self.arena.release([self.arena.commit(item, 0, OTHER).ticket], OTHER)
        return item

    def hand_off(self, name: str) -> Item:
        item = self.admit(name, 0, until=0.0).admitted.result()
        self.arena.release([self.arena.commit(item, 0, OTHER).ticket], OTHER)
        return item

    def fill(self, count: int) -> None:
        """With hand-offs: nothing has room beside them."""
        for n in range(count):
            self.hand_off(f"{n}@r")
        room = self.arena._entries_bytes_max / 2 - self.arena._handoff_entries_bytes
        self.hand_off("x" * (int(room) - ENTRY_BYTES - len(NAMESPACE) - 2) + "@r")

    def wait(self, name: str, nbytes: int) -> Arrival:
        """Insert a hand-off that finds no room."""
        arrival = self.admit(name, nbytes, until=1000.0)
        assert not arrival.admitted.done()
        return arrival

    def admit(self, name: str, nbytes: int, until: float) -> Arrival:
        header = TensorHeader("uint8", (nbytes,), nbytes) if nbytes else NONE
        arrival = Arrival((NAMESPACE, name), header, 300.0, until, self.loop.create_future())
        self.loop.create_task(self.handoffs.admit(arrival))
        self.loop.run(0.0)
        return arrival

    def take(self, name: str) -> None:
        lease = self.handoffs.take((NAMESPACE, name), TAKER)
        assert lease is not None
        assert self.handoffs.acknowledge(lease.token)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    with closing(node.arena):
        yield node


def test_the_end_of_a_session_costs_what_it_holds(node: Node) -> None:
    item = node.store("k")
    for _ in range(MANY):
        node.arena.pin(item, HOLDER)
    node.arena.pin(item, OTHER)

    def end() -> None:
        assert node.arena.holds_pins(OTHER)
        assert not node.arena.holds_pins(TAKER)
        node.arena.release_all(OTHER)

    assert steps_of(end) < MANY
    assert not node.arena.holds_pins(OTHER)
    assert steps_of(lambda: node.arena.release_all(HOLDER)) < FEW * MANY
    assert node.arena.gauges().pins == 0


def test_leases_that_run_out_cost_the_same_each(node: Node) -> None:
    for n in range(MANY):
        node.hand_off(f"{n}@r")
        lease = node.handoffs.take((NAMESPACE, f"{n}@r"), TAKER)
        assert lease is not None
        node.arena.pin(lease.held.item, TAKER)
    pin = node.arena.hold((NAMESPACE, "0@r"), PEER_OWNER)
    assert pin is not None
    assert steps_of(lambda: node.loop.run(11.0)) < FEW * MANY
    assert [lease.is_sent for lease in node.handoffs._leases.values()] == [True]
    node.arena.release([pin.ticket], PEER_OWNER)
    node.loop.run(100.0)
    assert not node.handoffs._leases


def test_the_end_of_a_session_costs_what_it_has_taken(node: Node) -> None:
    for n in range(MANY):
        node.hand_off(f"{n}@r")
        assert node.handoffs.take((NAMESPACE, f"{n}@r"), OTHER if n == 0 else TAKER) is not None
    assert steps_of(lambda: node.handoffs.end(OTHER)) < MANY
    assert len(node.handoffs._leases) == MANY - 1
    assert steps_of(lambda: node.handoffs.end(TAKER)) < FEW * MANY
    assert not node.handoffs._leases


def test_the_end_of_a_pool_costs_what_it_offers(node: Node) -> None:
    nothing: Any = None
    pools = Pools(node.arena)
    lanes = Lanes(nothing, "boot", nothing, Counters(), pools)
    sessions: list[Any] = [object(), object(), object()]
    for session in sessions[:2]:
        lanes.open(session, OpenPool(1, "", "", 0, "pool", 1 << 20, True, True))
    first, second = pools.of(sessions[0]), pools.of(sessions[1])
    assert first is not None
    assert second is not None
    for n in range(MANY):
        pools._add((NAMESPACE, str(n)), first, _Offered(n, 0))
    pools._add((NAMESPACE, "0"), second, _Offered(1, 0))
    assert steps_of(lambda: lanes.close(sessions[2])) < MANY
    assert steps_of(lambda: lanes.close(sessions[1])) < MANY
    assert len(pools._offers) == MANY
    assert steps_of(lambda: lanes.close(sessions[0])) < FEW * MANY
    assert not pools._offers
    assert not pools.shares._held


def test_what_is_evicted_is_found_at_once_beside_many_that_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = 5 * MANY
    monkeypatch.setattr(
        arena, "ENTRIES_BYTES_MIN", (pinned + 20) * entry_bytes_of((NAMESPACE, "p"))
    )
    node = Node(1 << 20)
    with closing(node.arena):
        for n in range(pinned):
            node.arena.pin(node.store(chr(0x4E00 + n)), HOLDER)
        for n in range(20):
            node.store(chr(0x41 + n))
        assert node.arena.gauges().items == pinned + 20

        def store() -> None:
            for n in range(20):
                node.store(chr(0x61 + n))

        assert steps_of(store) < 20 * 5 * FEW
        assert node.arena.gauges().items == pinned + 20
        assert node.arena.peek((NAMESPACE, "A")) is None


def test_the_end_of_the_last_pin_is_a_use() -> None:
    node = Node(64 * 3)
    with closing(node.arena):
        pin = node.arena.pin(node.store("a"), HOLDER)
        node.store("b")
        node.store("c")
        node.loop.now = 1.0
        node.arena.release([pin.ticket], HOLDER)
        node.store("d")
        node.store("e")
        assert {name for _, name in node.arena.addresses()} == {"a", "d", "e"}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Of hand-offs."""
    entry_bytes = entry_bytes_of((NAMESPACE, "0000@r"))
    monkeypatch.setattr(arena, "ENTRIES_BYTES_MIN", 3 * MANY * entry_bytes)
    node = Node()
    with closing(node.arena):
        node.fill(MANY)
        yield node


def test_a_hand_off_that_finds_no_room_costs_the_same_beside_many(full: Node) -> None:
    assert steps_of(lambda: full.wait("w@s", 1)) < MANY
    assert steps_of(full.arena.remove_expired) < FEW
    full.loop.run(300.0)
    assert steps_of(full.arena.remove_expired) < FEW * EXPIRED_PAGE
    while full.arena.remove_expired():
        pass
    assert full.arena.gauges().items == 0


def test_room_that_helps_no_hand_off_that_waits_costs_little(full: Node) -> None:
    """Also if each of them is smaller than all before."""
    item = full.store("pinned")
    arrivals = [full.wait(f"w{n}@s", 64 * (MANY - n)) for n in range(MANY)]
    full.loop.run(0.0)
    full.arena.release([full.arena.pin(item, HOLDER).ticket], HOLDER)
    assert steps_of(lambda: full.loop.run(0.0)) < FEW * MANY / 5
    full.take("1000@r")
    full.loop.run(0.0)
    admitted = [each.admitted.done() for each in arrivals]
    assert admitted == [True] + [False] * (MANY - 1)


def test_hand_offs_that_wait_are_tried_in_many_turns_of_the_loop(full: Node) -> None:
    full.handoffs._turns = PacedTurns(full.loop, steps_per_turn=1)
    arrivals = [full.wait(f"w{n}@s", 64) for n in range(20)]
    full.loop.run(0.0)
    so_far: list[int] = []

    def turn() -> None:
        so_far.append(sum(each.admitted.done() for each in arrivals))
        if len(so_far) < 100:
            full.loop.call_soon(turn)

    for n in range(10):
        full.take(f"{1000 + n}@r")
    full.loop.call_soon(turn)
    full.loop.run(0.0)
    assert all(after - before <= 1 for before, after in pairwise(so_far))
    assert so_far[-1] == 10
    for n in range(10, 20):
        full.take(f"{1000 + n}@r")
    full.loop.run(0.0)
    assert all(each.admitted.done() for each in arrivals)


def test_a_take_tries_one_of_the_inserts_that_are_offered_at_its_key(full: Node) -> None:
    """It tried all of them at once; and again for each further take."""
    sizes = [640, 64, 640, 64, *[640] * 20]
    arrivals = [full.wait("w@s", nbytes) for nbytes in sizes]
    full.loop.run(0.0)
    tried: list[int] = []
    reserve = full.arena.reserve_handoff

    def counted(address: Any, header: TensorHeader, **how: Any) -> Item:
        tried.append(header.nbytes)
        return reserve(address, header, **how)

    full.arena.reserve_handoff = counted  # type: ignore[method-assign]
    for _ in range(3):
        assert full.handoffs.take((NAMESPACE, "w@s"), TAKER) is None
    assert not tried, "in the turn of the request"
    full.loop.run(0.0)
    assert tried == [64]
    full.handoffs.take((NAMESPACE, "w@s"), TAKER)
    full.loop.run(0.0)
    assert tried == [64], "one comes already"
    admitted = [each.admitted.done() for each in arrivals]
    assert admitted == [False, True, *[False] * 22]


def test_expired_hand_offs_make_room_in_many_turns_of_the_loop(full: Node) -> None:
    """Also for an insert that does not wait."""
    full.handoffs._turns = PacedTurns(full.loop, steps_per_turn=1)
    full.loop.now = 300.0
    left: list[int] = []

    def turn() -> None:
        left.append(full.arena.gauges().items)
        if len(left) < 50:
            full.loop.call_soon(turn)

    full.loop.call_soon(turn)
    name = "y" * (MANY // 2 * entry_bytes_of((NAMESPACE, "0000@r")))
    full.admit(name, 0, until=0.0).admitted.result()
    assert MANY // 4 < left[-1] < MANY // 2 + EXPIRED_PAGE
    assert all(before - after <= EXPIRED_PAGE for before, after in pairwise(left))


def pinned_apart(monkeypatch: pytest.MonkeyPatch, count: int) -> Node:
    """Items side by side, of which every fourth is pinned: no four neighbours can be evicted."""
    for name in ("_BY_ADDRESS", "_BY_AGE_MAX"):
        monkeypatch.setattr(allocator, name, 500)
    node = Node(64 * count)
    for n in range(count):
        item = node.store(str(n), 64)
        if n % 4 == 0:
            node.arena.pin(item, HOLDER)
    return node


def reserve_many(node: Node, count: int, nbytes: int) -> list[bool]:
    """Which of so many find room."""
    found = []
    for _ in range(count):
        try:
            node.store(f"new{next(node.numbers)}", nbytes)
            found.append(True)
        except BufferFull:
            found.append(False)
    return found


ROUNDS = 2 + 2 * MANY // 500
"""So many searches have examined all."""


def test_what_found_no_room_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = pinned_apart(monkeypatch, MANY)
    with closing(node.arena):
        assert not any(reserve_many(node, ROUNDS, 256))
        for nbytes in (256, 320):
            assert steps_of(lambda size=nbytes: reserve_many(node, 20, size)) < 20 * FEW  # type: ignore[misc]
        assert all(reserve_many(node, 1, 192)), "the control: three neighbours can be evicted"
        node.arena.release_all(HOLDER)
        assert all(reserve_many(node, 1, 256))


def test_the_only_room_is_found_after_some_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vain for one part of the arena is not in vain for all."""
    node = pinned_apart(monkeypatch, MANY)
    with closing(node.arena):
        assert not any(reserve_many(node, ROUNDS, 256))
        pins = [pin.ticket for pin in node.arena._pins.of(HOLDER)]
        for ticket in (pins[-20], pins[20]):
            node.arena.release([ticket], HOLDER)
            assert any(reserve_many(node, ROUNDS, 256))


def test_what_is_taken_leaves_nothing_that_still_has_to_expire(node: Node) -> None:
    node.hand_off("first@r")
    for n in range(MANY):
        node.hand_off(f"{n}@r")
        node.take(f"{n}@r")
    assert len(node.arena._expiring._heap) < 5


def test_a_place_of_many_neighbours_is_found_among_very_many(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BY_AGE_MAX", "_BY_ADDRESS"):
        monkeypatch.setattr(allocator, name, 500, raising=False)
    names = [str(n) for n in range((16 << 20) // 1024)]
    for name in names:
        node.store(name, 1024)
    random.Random(1).shuffle(names)
    for node.loop.now, name in enumerate(names):
        node.arena.touch((NAMESPACE, name))
    assert steps_of(lambda: node.store("large", 16 << 10)) < 10 * len(names)
    assert node.arena.gauges().items == len(names) - 15
