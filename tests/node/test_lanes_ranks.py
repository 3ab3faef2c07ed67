"""Lanes of an engine with several ranks, one of which ends while it is sent a message.

Connections are real, and the loop runs only when a test runs it. So a test checks what happens at
once. The locator is a stand-in, which answers at once.
"""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from lookup_buffer.device.lane import DeviceLane
from lookup_buffer.key import QualifiedKey
from lookup_buffer.node import devices
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.connection import Connection, Seat, Session
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.devices import LANE_TICKET, Lanes, Pools
from lookup_buffer.node.locate import Located
from lookup_buffer.protocol.framing import FrameDecoder
from store import DeviceLocation, Location
from store.testing.samples import BOOT, a_record

if TYPE_CHECKING:
    from lookup_buffer.protocol.messages import Request

RANKS = 2
ADDRESS = ("f" * 64, "k")


class Knows:
    """A locator that has the answer."""

    async def locate(self, addresses: Sequence[QualifiedKey]) -> list[Located]:
        at = Location("elsewhere", BOOT, 1, 7)
        device = DeviceLocation("elsewhere", 1, "gloo", "0" * 8, 4321, "f" * 12)
        record = a_record(*ADDRESS, dtype="uint8", shape=(3,), nbytes=3)
        record = record._replace(locations=(at,), devices=(device,))
        return [Located(record, ((at, "tcp://127.0.0.1:1"),)) for _ in addresses]


class Engine:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        knows: Any = Knows()
        self.pools = Pools(Arena(1 << 20, lambda _address, _reason: None))
        self.lanes = Lanes(self.loop, BOOT, knows, Counters(), self.pools)
        self.ends: list[socket.socket] = []
        self._of: dict[Connection, Session] = {}
        self.workers = [self._session(rank) for rank in range(RANKS)]
        self.scheduler = self._session(None)
        for worker in self.workers:
            self.lanes.open(worker, self._pool())

    def _session(self, rank: int | None) -> Session:
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)

        anchor = Connection(self.loop, ours, self)
        seat = Seat("engine", rank, RANKS, encodes=False, device="")
        session = self._of[anchor] = Session(len(self.ends), anchor, seat)
        return session

    def message_received(self, *_: object) -> None: ...

    def connection_lost(self, connection: Connection, _: object) -> None:
        session = self._of.pop(connection)
        self.lanes.close(session)
        self.lanes.release_all(session)

    def _pool(self) -> Any:
        said: list[Request] = []
        lane = DeviceLane("gloo", pool_bytes=1 << 20)
        lane.attached(lambda request: said.append(request))
        lane.close()
        return said[0]

    def receive(self) -> "asyncio.Task[dict[str, Any] | None]":
        """The scheduler's request, which has sent its messages when this returns."""

        async def receive() -> dict[str, Any] | None:
            located = (await self.lanes.find(self.scheduler, [ADDRESS]))[ADDRESS]
            return await self.lanes.receive(self.scheduler, ADDRESS, located)

        task = self.loop.create_task(receive())
        self.turn()
        return task

    def turn(self) -> None:
        """One of the loop: it reads what is there to be read, be it the end of a connection."""
        self.loop.run_until_complete(asyncio.sleep(0))

    def wants(self, rank: int) -> list[int]:
        """The tickets that this worker was sent to load."""
        wanted: dict[int, None] = {}
        self.ends[rank].setblocking(False)
        try:
            told = FrameDecoder().feed(self.ends[rank].recv(1 << 16))
        except BlockingIOError:
            return []
        for message, _ in told:
            if message["event"] == "receive":
                wanted[message["id"]] = None
            elif message["event"] == "let_go":
                for ticket in message["tickets"]:
                    wanted.pop(ticket, None)
        return list(wanted)

    def end(self) -> None:
        for session in (*self.workers, self.scheduler):
            session.anchor.end(None)
        for end in self.ends:
            end.close()
        self.loop.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.end()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_ends_at_its_message_leaves_no_other_rank_with_a_ticket(
    engine: Engine, gone: int
) -> None:
    engine.ends[gone].close()
    assert engine.loop.run_until_complete(engine.receive()) is None
    assert engine.wants(1 - gone) == []
    assert engine.lanes.count_tickets() == 0
    left = engine.pools.of(engine.workers[1 - gone])
    assert left is not None
    assert not left.under_way


def test_all_ranks_get_the_message(engine: Engine) -> None:
    receiving = engine.receive()
    (ticket,) = engine.wants(0)
    assert engine.wants(1) == [ticket]
    engine.lanes.release_all(engine.scheduler)
    assert engine.lanes.count_tickets() == 0
    assert engine.loop.run_until_complete(receiving) is None


def test_a_cancelled_request_leaves_no_ticket(engine: Engine) -> None:
    receiving = engine.receive()
    receiving.cancel()
    engine.turn()
    assert receiving.cancelled()
    assert engine.lanes.count_tickets() == 0
    assert engine.wants(0) == engine.wants(1) == []


def test_a_ticket_cannot_be_concluded_from_others(engine: Engine) -> None:
    """Any client may report `Done`: then the pools of another engine drop what it will load."""
    receivings = [engine.receive() for _ in range(3)]
    first, second, third = engine.wants(0)
    for receiving in receivings:
        receiving.cancel()
    engine.turn()
    assert min(abs(first - second), abs(second - third), abs(first - third)) > 1 << 20
    assert min(first, second, third) >= LANE_TICKET


def test_the_tickets_of_a_session_are_pins_of_it_and_as_bounded(engine: Engine) -> None:
    shares, owner = engine.pools.arena.shares, engine.scheduler.id
    shares.total, shares.own = 4, 0
    receivings = [engine.receive() for _ in range(3)]
    assert len(engine.wants(0)) == 2
    assert not shares.fits(owner)
    assert receivings[2].result() is None
    engine.lanes.release_all(engine.scheduler)
    for receiving in receivings:
        assert engine.loop.run_until_complete(receiving) is None
    assert shares.fits(owner, 4)


def test_what_pools_received_is_bounded_for_all_together(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A client may open many sessions, each with a pool."""
    monkeypatch.setattr(devices, "KNOWN_MAX", 20)
    engine = Engine()
    request.addfinalizer(engine.end)
    at = Location("elsewhere", BOOT, 1, 7)

    def received(rank: int) -> list[int]:
        """After the last of 30 keys: what its pool is taken to have."""
        pool = engine.pools.of(engine.workers[rank])
        assert pool is not None
        for n in range(30):
            pool.note(("f" * 64, f"k{n}"))
        found = []
        for n in range(30):
            record = a_record("f" * 64, f"k{n}", dtype="uint8", shape=(3,), nbytes=3)
            located = Located(record, ((at, "tcp://127.0.0.1:1"),))
            if devices._may_come((record.namespace, record.key), located, [pool]):
                found.append(n)
        return found

    assert received(0) == list(range(20, 30)), "half of all"
    assert len(received(1)) < 10
    engine.lanes.close(engine.workers[0])
    assert received(1) == list(range(20, 30)), "what is closed counts no more"
