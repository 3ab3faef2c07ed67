"""The owner of hand-offs against a plain dictionary, with time, ended sessions and a full quota."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypothesis_profiles import examples
from lookup_buffer.errors import BufferFull
from lookup_buffer.node.arena import Arena
from lookup_buffer.node.counters import Counters
from lookup_buffer.node.handoffs import BYTES_PER_SECOND_MIN, Arrival, Handoffs, Lease
from lookup_buffer.node.items import Item
from lookup_buffer.protocol.header import TensorHeader
from virtual_loop import VirtualLoop

CAPACITY = 1 << 16
LEASE_SECONDS = 10.0
KEYS = ["a@1", "b@1"]
TAKERS = ["x", "y", "z"]
WRITER, READER = 8, 9


@dataclass
class Value:
    number: int
    nbytes: int
    expires_at: float


@dataclass
class ModelLease:
    key: str
    value: Value
    taker: str
    until: float


@dataclass(eq=False)
class Taking:
    """A taker that may wait, and the lease that it was granted."""

    key: str
    taker: str
    lease: Lease | None = None
    task: "asyncio.Task[None] | None" = None


@dataclass(eq=False)
class Producing:
    """An insert, and the connection of its client."""

    arrival: Arrival
    connection: str
    task: "asyncio.Task[None]"


@dataclass
class Entry:
    value: Value | None = None
    token: int | None = None
    """Of the lease on the value."""
    line: list[Taking] = field(default_factory=list)
    offered: list[Producing] = field(default_factory=list)


class Watched(Handoffs):
    """Reports each decision at once: the takers resume a turn later."""

    machine: "HandoffMachine"

    def take(self, address: tuple[str, str], taker: Any) -> Lease | None:
        one, self.machine.starting = self.machine.starting, None
        self.machine.asking = taker
        lease = super().take(address, taker)
        self.machine.asking = None
        if one is not None:
            one.lease = lease
            if lease is None:
                self.machine.entries[one.key].line.append(one)
        return lease

    def _lease(self, address: tuple[str, str], taker: Any) -> Lease | None:
        lease = super()._lease(address, taker)
        if lease is not None:
            self.machine.granted(address[1], lease)
        return lease

    def _leave(self, address: tuple[str, str], told: "asyncio.Future[Lease | None]") -> None:
        if told in self._queues.get(address, ()) and not told.cancelled() and not told.result():
            self.machine.refused(address[1])
        super()._leave(address, told)


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        parts: Any = self.loop
        self.arena = Arena(CAPACITY, self.on_change, self.loop.time)
        self.handoffs = Watched(parts, self.arena, Counters(), LEASE_SECONDS)
        self.handoffs.machine = self
        self.asking: str | None = None
        """The taker that is answered at once."""
        self.starting: Taking | None = None
        """The taker that queues if that answer is none."""
        self.entries = {key: Entry() for key in KEYS}
        self.leases: dict[int, ModelLease] = {}
        self.won: dict[int, float] = {}
        """Token → until when its winner is answered the same again."""
        self.pins: list[int] = []
        self.number = 0
        self.landing: str | None = None
        """The key whose new value has just been entered here."""

    def address(self, key: str) -> tuple[str, str]:
        return ("f" * 64, key)

    # -- answers of the parts

    def on_change(self, address: tuple[str, str], reason: str) -> None:
        entry = self.entries[address[1]]
        if reason == "expired":
            assert entry.value is None or entry.value.expires_at <= self.loop.now
        if reason == "replaced" and address[1] != self.landing:
            entry.value = entry.token = None  # it gave way to one that is being written

    def is_offered(self, key: str) -> bool:
        offers = self.handoffs._offers.get(self.address(key), {})
        return any(one.arrival in offers for one in self.entries[key].offered)

    def granted(self, key: str, lease: Lease) -> None:
        self.forget_what_is_over()
        entry = self.entries[key]
        assert entry.value is not None, "what is not there was given away"
        assert entry.token is None, "what another has was given away"
        taker = str(lease.taker)
        if entry.line:
            first = entry.line.pop(0)
            assert taker == first.taker, "a queued taker was skipped"
            first.lease = lease
        else:
            assert taker == self.asking, "who does not wait was given it"
        content = bytes(self.arena.bytes_of(lease.held.item))
        assert content == bytes([entry.value.number % 256]) * entry.value.nbytes
        self.leases[lease.token] = ModelLease(key, entry.value, taker, lease.until)
        entry.token = lease.token

    def refused(self, key: str) -> None:
        """The first in the queue was told that there is nothing to wait for."""
        self.forget_what_is_over()
        entry = self.entries[key]
        assert entry.value is None
        assert not self.is_offered(key), "what is offered is worth the wait"
        assert entry.line.pop(0).lease is None

    def forget_what_is_over(self) -> None:
        now = self.loop.now
        for token, lease in list(self.leases.items()):
            if lease.until <= now:
                self.drop_lease(token)
        for entry in self.entries.values():
            if entry.value is not None and entry.value.expires_at <= now:
                entry.value = entry.token = None
        self.won = {token: until for token, until in self.won.items() if until > now}

    def drop_lease(self, token: int) -> None:
        lease = self.leases.pop(token)
        entry = self.entries[lease.key]
        if entry.token == token:
            entry.token = None

    # -- takers

    @rule(key=st.sampled_from(KEYS), taker=st.sampled_from(TAKERS), patient=st.booleans())
    def take(self, key: str, taker: str, patient: bool) -> None:
        self.forget_what_is_over()
        entry = self.entries[key]
        expected = entry.value is not None and entry.token is None and not entry.line
        if not patient:
            lease = self.handoffs.take(self.address(key), taker)
            self.forget_what_is_over()
            assert (lease is not None) == expected
            assert expected or entry.value is None or entry.token is not None
            self.loop.run(0.0)
            return
        one = Taking(key, taker)
        one.task = self.loop.create_task(self.taking(one))
        self.loop.run(0.0)
        if one in entry.line:
            assert entry.token is not None or entry.offered, "in line for nothing"
        elif expected:
            assert one.lease is not None
        assert one.task.done() == (one not in entry.line)

    async def taking(self, one: Taking) -> None:
        entry = self.entries[one.key]
        self.starting = one
        lease = await self.handoffs.queue(self.address(one.key), one.taker)
        if one in entry.line:  # it was answered at once
            entry.line.remove(one)
            assert entry.value is None
            assert not self.is_offered(one.key), "what is offered is worth the wait"
        assert lease is one.lease

    @rule(key=st.sampled_from(KEYS), takers=st.permutations(TAKERS))
    def a_crowd(self, key: str, takers: list[str]) -> None:
        for taker in takers:
            self.take(key, taker, patient=True)

    @precondition(lambda self: any(entry.line for entry in self.entries.values()))
    @rule(data=st.data())
    def leave_the_line(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([b for e in self.entries.values() for b in e.line]))
        self.leave(one)
        self.loop.run(0.0)

    def leave(self, one: Taking) -> None:
        self.entries[one.key].line.remove(one)
        assert one.task is not None
        one.task.cancel()

    @precondition(lambda self: self.leases or self.won)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from([*self.leases, *self.won]))
        self.forget_what_is_over()
        lease = self.leases.get(token)
        if lease is not None:
            entry = self.entries[lease.key]
            if entry.token == token:
                entry.value = entry.token = None
            del self.leases[token]
            self.won[token] = lease.until
        assert self.handoffs.acknowledge(token) == (token in self.won)
        self.loop.run(0.0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from([*self.leases, *self.won]))
        if token in self.leases:
            self.drop_lease(token)
        self.handoffs.give_back(token)
        self.loop.run(0.0)

    @rule(taker=st.sampled_from(TAKERS))
    def a_session_ends(self, taker: str) -> None:
        for entry in self.entries.values():
            for one in [one for one in entry.line if one.taker == taker]:
                self.leave(one)
        # One after the other, as the owner does it: each may be leased to the next taker.
        for token in [token for token, lease in self.leases.items() if lease.taker == taker]:
            self.drop_lease(token)
        self.handoffs.end(taker)
        assert all(lease.taker != taker for lease in self.leases.values())
        self.loop.run(0.0)

    # -- producers and readers

    @rule(
        key=st.sampled_from(KEYS),
        nbytes=st.sampled_from([0, 64, 12_000, 20_000, 30_000, 30_000]),
        ttl=st.sampled_from([None, 3.0, 15.0]),
        wait=st.sampled_from([0.0, 5.0, 30.0]),
        connection=st.sampled_from(["p", "q"]),
    )
    def insert(
        self, key: str, nbytes: int, ttl: float | None, wait: float, connection: str
    ) -> None:
        self.forget_what_is_over()
        self.number += 1
        number, entry = self.number, self.entries[key]

        async def insert() -> None:
            try:
                item = await self.handoffs.admit(arrival)
                self.forget_what_is_over()
                self.land(entry, item, number)
                if one in entry.offered:
                    entry.offered.remove(one)
                self.handoffs.arrived(item.address)
            except BufferFull:
                assert self.arena.gauges().used_bytes, "an empty arena has room"
                if one in entry.offered:
                    entry.offered.remove(one)
            finally:
                self.handoffs.landed(arrival)

        header = TensorHeader("uint8", (nbytes,), nbytes)
        until = self.loop.time() + wait
        arrival = Arrival(self.address(key), header, ttl, until, self.loop.create_future())
        one = Producing(arrival, connection, self.loop.create_task(insert()))
        entry.offered.append(one)
        self.loop.run(0.0)

    def land(self, entry: "Entry", item: Item, number: int) -> None:
        """The item is written and entered."""
        self.arena.bytes_of(item)[:] = bytes([number % 256]) * item.nbytes
        expires_at = item.expires_at
        assert expires_at is not None
        entry.value, entry.token = Value(number, item.nbytes, expires_at), None
        self.landing = item.address[1]
        pin = self.arena.commit(item, number, WRITER)
        self.landing = None
        self.arena.release([pin.ticket], WRITER)

    @rule(connection=st.sampled_from(["p", "q"]))
    def a_producer_dies(self, connection: str) -> None:
        for entry in self.entries.values():
            for one in [one for one in entry.offered if one.connection == connection]:
                entry.offered.remove(one)
                one.task.cancel()
        self.loop.run(0.0)

    @rule(key=st.sampled_from(KEYS))
    def look(self, key: str) -> None:
        self.forget_what_is_over()
        value = self.entries[key].value
        held = self.arena.hold(self.address(key), READER)
        assert (held is None) == (value is None)
        if held is not None:
            self.pins.append(held.ticket)

    @rule()
    def readers_end(self) -> None:
        self.arena.release(self.pins, READER)
        self.pins.clear()
        self.loop.run(0.0)

    @rule(seconds=st.sampled_from([0.5, 2.0, LEASE_SECONDS, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.run(seconds)
        self.forget_what_is_over()

    @rule()
    def a_beat(self) -> None:
        self.arena.remove_expired()
        self.forget_what_is_over()
        self.loop.run(0.0)

    @precondition(lambda self: self.number > 3)
    @rule()
    def everything_ends(self) -> None:
        self.readers_end()
        for connection in ("p", "q"):
            self.a_producer_dies(connection)
        for taker in TAKERS:
            self.a_session_ends(taker)
        self.time_passes(400.0)
        self.arena.remove_expired()
        gauges = self.arena.gauges()
        assert (gauges.handoff_bytes, gauges.used_bytes, gauges.pins, gauges.items) == (0, 0, 0, 0)
        assert self.arena._wanted_bytes == 0
        assert self.arena._entries_bytes == self.arena._handoff_entries_bytes == 0

    # -- always

    @invariant()
    def the_share_is_kept(self) -> None:
        assert 0 <= self.arena._handoff_bytes <= CAPACITY / 2
        assert self.arena._wanted_bytes >= 0
        assert self.arena._pinned_bytes == self.arena._reserved_bytes == 0
        values = [entry.value for entry in self.entries.values() if entry.value is not None]
        assert self.arena.gauges().handoff_bytes >= sum(value.nbytes for value in values)

    @invariant()
    def no_taker_waits_without_an_item(self) -> None:
        self.loop.run(0.0)  # waiters for room are notified soon, not at once
        for key, entry in self.entries.items():
            if entry.line:  # also if it is queued behind a lease that outlives its item
                leased = any(lease.key == key for lease in self.leases.values())
                assert leased or entry.offered, f"queued for {key} without an item"
            if entry.offered:
                assert self.arena.gauges().used_bytes, "a writer waits before an empty arena"
            if entry.line and self.is_offered(key):
                # Both wait for the same: only for hand-offs that were admitted before.
                gap = self.arena._allocator.largest_free_bytes
                smallest = min(one.arrival.header.nbytes for one in entry.offered)
                assert entry.token is not None or self.arena._wanted_bytes or gap < smallest

    def teardown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run(0.0)
        self.arena.close()


TestHandoffs = HandoffMachine.TestCase
TestHandoffs.settings = settings(max_examples=examples(160), stateful_step_count=50)
assert BYTES_PER_SECOND_MIN > CAPACITY, "the size of an item does not count in its lease"
