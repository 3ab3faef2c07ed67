"""The owner of hand-offs, in virtual time: which taker gets one, and when it is free again."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lookup_buffer.errors import ProtocolError
from lookup_buffer.node.arena import PEER_OWNER, Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import BYTES_PER_SECOND_MIN, Arrival, Handoffs, Lease
from lookup_buffer.node.items import Item
from lookup_buffer.protocol.header import TensorHeader
from lookup_buffer.times import PEER_PROGRESS_SECONDS, REMEMBERED_SECONDS
from virtual_loop import PacedTurns, VirtualLoop

if TYPE_CHECKING:
    import asyncio

NAME = ("f" * 64, "k@r")
REST = ("f" * 64, "rest@r")
LEASE_SECONDS = 10.0
WRITER = 7


class Owner:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.gone: list[str] = []
        self.arena = Arena(1 << 20, self.on_change, self.loop.time)
        parts: Any = self.loop
        self.handoffs = Handoffs(parts, self.arena, Counters(), LEASE_SECONDS)

    def on_change(self, address: tuple[str, str], reason: str) -> None:
        if reason:
            self.gone.append(reason)

    def insert(self, nbytes: int = 100, ttl_seconds: float = 300.0) -> int:
        """The generation."""
        return self.land(self.admit(self.arrival_of(nbytes, ttl_seconds, until=0.0)).result())

    def arrival_of(
        self,
        nbytes: int,
        ttl_seconds: float = 300.0,
        name: tuple[str, str] = NAME,
        until: float = 1000.0,
    ) -> Arrival:
        header, admitted = TensorHeader("uint8", (nbytes,), nbytes), self.loop.create_future()
        return Arrival(name, header, ttl_seconds, until, admitted)

    def admit(self, arrival: Arrival) -> "asyncio.Task[Item]":
        admitting = self.loop.create_task(self.handoffs.admit(arrival))
        self.loop.run(0.0)
        return admitting

    def fill(self) -> None:
        """With a hand-off of another name: there is no room for one of 100,000 bytes."""
        self.land(self.admit(self.arrival_of(500_000, name=REST)).result())

    def land(self, item: Item) -> int:
        pin = self.arena.commit(item, 1, WRITER)
        self.handoffs.arrived(item.address)
        self.arena.release([pin.ticket], WRITER)
        return item.generation

    def is_there(self) -> bool:
        return self.arena.holds(NAME)

    def at_rest(self) -> bool:
        gauges = self.arena.gauges()
        return (gauges.pins, gauges.pinned_bytes, gauges.reserved_bytes) == (0, 0, 0)


class Taker:
    """Keeps the answers that it received, in order."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._told: list[Lease | None] = []
        self._queued: asyncio.Task[None] | None = None

    def take(self, *, patient: bool = True) -> "Taker":
        if patient:
            self._queued = self.owner.loop.create_task(self._queue())
        else:
            self._told.append(self.owner.handoffs.take(NAME, self))
        self.owner.loop.run(0.0)
        return self

    async def _queue(self) -> None:
        self._told.append(await self.owner.handoffs.queue(NAME, self))

    def leave(self) -> None:
        assert self._queued is not None
        self._queued.cancel()

    def end(self) -> None:
        """As the end of its session."""
        self.leave()
        self.owner.handoffs.end(self)

    @property
    def told(self) -> list[Lease | None]:
        self.owner.loop.run(0.0)
        return self._told

    @property
    def token(self) -> int:
        lease = self._told[-1]
        assert lease is not None
        return lease.token

    @property
    def generation(self) -> int:
        lease = self._told[-1]
        assert lease is not None
        return lease.held.item.generation


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.loop.run(1000.0)
    assert owner.at_rest(), "when all leases are over nothing is held"
    assert not owner.handoffs._leases
    assert not owner.handoffs._won
    assert not owner.handoffs._queues
    owner.arena.remove_expired()
    assert owner.arena.gauges().handoff_bytes == 0
    owner.arena.close()


def test_an_acknowledgement_wins_and_may_be_repeated(owner: Owner) -> None:
    owner.insert()
    taker = Taker(owner).take()
    assert owner.is_there(), "until it is acknowledged"
    for _ in range(2):
        assert owner.handoffs.acknowledge(taker.token)
        assert not owner.is_there()
    assert owner.gone == ["taken"]
    owner.handoffs.give_back(taker.token)  # too late to think better of it
    assert not owner.is_there()
    assert owner.handoffs.counters.totals()["handoffs_taken"] == 1
    owner.loop.run(LEASE_SECONDS + 1.0)
    assert owner.handoffs.acknowledge(taker.token), "his link may have broken, and he asks again"
    owner.loop.run(REMEMBERED_SECONDS)
    assert not owner.handoffs.acknowledge(taker.token), "for so long, not for ever"


def test_won_leases_are_bounded_however_long_they_last(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookup_buffer.node.handoffs.WON_MAX", 3)
    tokens = []
    for _ in range(5):
        owner.insert()
        tokens.append(Taker(owner).take().token)
        assert owner.handoffs.acknowledge(tokens[-1])
    assert len(owner.handoffs._leases) == 3
    assert [owner.handoffs.acknowledge(token) for token in tokens] == [False] * 2 + [True] * 3


def test_a_taker_of_an_absent_key_gets_a_miss(owner: Owner) -> None:
    for patient in (True, False):
        assert Taker(owner).take(patient=patient).told == [None]
    assert not owner.handoffs.acknowledge(12345)


def test_other_takers_are_queued_in_order(owner: Owner) -> None:
    owner.insert()
    first, *others = [Taker(owner).take() for _ in range(4)]
    hasty = Taker(owner).take(patient=False)
    assert hasty.told == [None]
    assert [len(taker.told) for taker in others] == [0, 0, 0]
    owner.handoffs.give_back(first.token)
    assert [len(taker.told) for taker in others] == [1, 0, 0]
    others[1].leave()
    others[0].end()  # his session is over
    assert [len(taker.told) for taker in others] == [1, 0, 1]
    assert owner.handoffs.acknowledge(others[2].token)
    assert not owner.handoffs.acknowledge(others[0].token)
    assert not owner.handoffs.acknowledge(first.token)


def test_when_it_is_taken_queued_takers_get_a_miss(owner: Owner) -> None:
    owner.insert()
    first, second = Taker(owner).take(), Taker(owner).take()
    owner.handoffs.acknowledge(first.token)
    assert second.told == [None]
    owner.insert()
    assert second.told == [None], (
        "notified once; the taker repeats its request when there is an item"
    )


def test_an_acknowledgement_after_the_lease_is_lost(owner: Owner) -> None:
    owner.insert()
    frozen, second = Taker(owner).take(), Taker(owner).take()
    owner.loop.run(LEASE_SECONDS - 0.1)
    assert second.told == []
    owner.loop.run(0.2)
    assert second.told != []
    assert not owner.handoffs.acknowledge(frozen.token), "who thaws has lost"
    assert owner.handoffs.acknowledge(second.token)


@pytest.mark.parametrize("late", [False, True])
def test_a_lease_lasts_while_the_item_is_being_sent_and_as_long_again(
    owner: Owner, late: bool
) -> None:
    owner.insert()
    taker, second = Taker(owner).take(), Taker(owner).take()
    pin = owner.arena.hold(NAME, PEER_OWNER)
    assert pin is not None
    owner.loop.run(3 * LEASE_SECONDS)
    assert second.told == []
    owner.arena.release([pin.ticket], PEER_OWNER)
    owner.loop.run(LEASE_SECONDS - 0.1)
    assert second.told == []
    if late:
        owner.loop.run(PEER_PROGRESS_SECONDS + 1.0)
    assert owner.handoffs.acknowledge(taker.token) is not late
    assert len(second.told) == 1
    assert (second.told != [None]) is late


def test_an_owner_that_was_stopped_expires_leases_on_time(owner: Owner) -> None:
    """After it thaws it may read the acknowledgement before its timers run."""
    owner.insert()
    taker = Taker(owner).take()
    owner.loop.now += LEASE_SECONDS + 1.0
    assert not owner.handoffs.acknowledge(taker.token)
    assert owner.handoffs.acknowledge(Taker(owner).take().token)


def test_large_ones_are_leased_for_longer(owner: Owner) -> None:
    nbytes = 400_000
    owner.insert(nbytes)
    taker = Taker(owner).take()
    owner.loop.run(LEASE_SECONDS + 0.9 * nbytes / BYTES_PER_SECOND_MIN)
    assert owner.handoffs.acknowledge(taker.token)


def test_a_replaced_generation_is_acknowledged_by_its_taker(owner: Owner) -> None:
    old = owner.insert()
    first, waiting = Taker(owner).take(), Taker(owner).take()
    new = owner.insert()
    assert new > old
    assert len(waiting.told) == 1
    assert waiting.generation == new, "the line gets the new one at once"
    assert first.generation == old
    assert owner.handoffs.acknowledge(first.token)
    assert owner.is_there()
    assert owner.handoffs.acknowledge(waiting.token)
    assert not owner.is_there()


def test_a_replaced_generation_that_is_released_is_dropped(owner: Owner) -> None:
    owner.insert()
    first = Taker(owner).take()
    new = owner.insert()
    owner.handoffs.give_back(first.token)
    second = Taker(owner).take()
    assert second.generation == new
    assert owner.handoffs.acknowledge(second.token)
    assert Taker(owner).take().told == [None]


def test_an_item_that_expires_in_a_lease_is_not_taken_again(owner: Owner) -> None:
    for acknowledged in (True, False):
        owner.insert(ttl_seconds=2.0)
        first, second = Taker(owner).take(), Taker(owner).take()
        owner.loop.run(3.0)
        owner.arena.remove_expired()
        if acknowledged:
            assert owner.handoffs.acknowledge(first.token)
        else:
            owner.handoffs.give_back(first.token)
        assert second.told == [None]


def test_an_offer_keeps_the_queue_until_it_is_withdrawn(owner: Owner) -> None:
    owner.fill()
    arrival = owner.arrival_of(100_000)
    inserting = owner.admit(arrival)
    offered = owner.arena.published(NAME)
    assert offered is not None
    assert (offered.checksum, owner.is_there()) == (0, False)
    owner.loop.run(1.0)
    assert not inserting.done(), "there is no room"
    taker = Taker(owner).take()
    assert (inserting.done(), taker.told) == (True, []), "whom a taker waits for is admitted"
    assert Taker(owner).take(patient=False).told == [None]
    other = Taker(owner).take()
    other.leave()
    owner.handoffs.arrived(NAME)  # another insert of the key is settled
    assert taker.told == []
    assert owner.land(inserting.result()) > offered.generation
    owner.handoffs.landed(arrival)
    assert taker.told != []
    assert owner.handoffs.acknowledge(taker.token)
    assert owner.arena.published(NAME) is None
    arrival = owner.arrival_of(100_000)
    inserting = owner.admit(arrival)
    taker = Taker(owner).take()
    assert taker.told == []
    owner.arena.abandon(inserting.result())  # its client left
    owner.handoffs.landed(arrival)
    assert taker.told == [None]


def test_an_impatient_taker_makes_room_for_what_is_offered(owner: Owner) -> None:
    """It will come again, and must find it then."""
    owner.fill()
    arrival = owner.arrival_of(100_000)
    inserting = owner.admit(arrival)
    assert Taker(owner).take(patient=False).told == [None]
    owner.land(inserting.result())
    owner.handoffs.landed(arrival)
    assert owner.handoffs.acknowledge(Taker(owner).take(patient=False).token)


@pytest.mark.parametrize("is_admitted", [False, True])
def test_an_insert_that_is_cancelled_in_the_queue_leaves_its_space(
    owner: Owner, is_admitted: bool
) -> None:
    owner.fill()
    used_bytes, arrival = owner.arena.gauges().handoff_bytes, owner.arrival_of(100_000)
    inserting = owner.admit(arrival)
    owner.loop.run(1.0)
    if is_admitted:
        owner.handoffs.take(NAME, owner)
    inserting.cancel()
    owner.loop.run(0.0)
    owner.handoffs.landed(arrival)
    assert inserting.cancelled()
    assert owner.arena.gauges().handoff_bytes == used_bytes


@pytest.mark.parametrize("steps_per_turn", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("turns", range(8))
def test_an_insert_that_is_cancelled_in_any_turn_leaves_its_space(
    owner: Owner, steps_per_turn: int, turns: int
) -> None:
    """Also in the turn of its offer, while room comes."""
    owner.fill()
    owner.handoffs._turns = PacedTurns(owner.loop, steps_per_turn)
    dropped = owner.loop.create_task(insert(owner, owner.arrival_of(100_000)))
    smaller = owner.loop.create_task(insert(owner, owner.arrival_of(50_000, name=REST)))
    after_turns(owner, turns, dropped.cancel)
    owner.loop.run(1.0)
    if not dropped.cancelled():
        owner.arena.abandon(dropped.result())
    owner.arena.abandon(smaller.result())
    assert owner.arena.gauges().handoff_bytes == 0
    assert not owner.handoffs._offers


async def insert(owner: Owner, arrival: Arrival) -> Item:
    try:
        return await owner.handoffs.admit(arrival)
    finally:
        owner.handoffs.landed(arrival)


def after_turns(owner: Owner, turns: int, call: Callable[[], object]) -> None:
    if turns:
        owner.loop.call_soon(after_turns, owner, turns - 1, call)
    else:
        call()


def test_a_lease_of_a_session_is_settled_by_that_session_alone(owner: Owner) -> None:
    owner.insert()
    taker, other = Taker(owner).take(), Taker(owner)
    owner.handoffs.give_back(taker.token, other)
    assert not owner.handoffs.acknowledge(taker.token, other)
    assert owner.handoffs.leased(NAME)
    assert owner.handoffs.acknowledge(taker.token, taker)
    assert not owner.handoffs.acknowledge(taker.token, other), "also when it was won"


@pytest.mark.parametrize("is_in_time", [False, True])
def test_a_queued_taker_ends_at_its_deadline(owner: Owner, is_in_time: bool) -> None:
    """Unless it was given the item in the same turn, before its timer."""
    owner.insert()
    first = Taker(owner).take()
    taking = owner.loop.create_task(owner.handoffs.queue(NAME, "other", until=2.0))
    owner.loop.call_at(1.9 if is_in_time else 2.2, owner.handoffs.give_back, first.token)
    owner.loop.run(1.8)
    assert not taking.done()
    owner.loop.now = 2.1  # the loop was busy
    owner.loop.run(0.0)
    if is_in_time:
        lease = taking.result()
        assert lease is not None
        assert owner.handoffs.acknowledge(lease.token)
    else:
        assert isinstance(taking.exception(), TimeoutError)
        assert not owner.handoffs._queues


def test_a_lease_that_is_granted_in_the_turn_of_the_cancellation_is_given_back(
    owner: Owner,
) -> None:
    owner.insert()
    first, second, third = (Taker(owner).take() for _ in range(3))
    owner.handoffs.give_back(first.token)  # the second one's from now on
    second.leave()
    assert second.told == []
    assert owner.handoffs.acknowledge(third.token)


def test_only_hand_offs_are_taken(owner: Owner) -> None:
    shared = (NAME[0], "shared")
    with pytest.raises(ProtocolError):
        owner.handoffs.take(shared, owner)
    queued = owner.loop.create_task(owner.handoffs.queue(shared, owner))
    owner.loop.run(0.0)
    assert isinstance(queued.exception(), ProtocolError)
