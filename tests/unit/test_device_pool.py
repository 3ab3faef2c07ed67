"""DevicePool: budget, order of eviction, holds and tickets; against a model, and by hand."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lookup_buffer.device.pool import DevicePool, Entry
from lookup_buffer.errors import BufferFull, TensorTooLarge
from lookup_buffer.key import QualifiedKey

CAPACITY = 100
NAMES = st.sampled_from("abcde")


def at(name: str) -> QualifiedKey:
    return ("ns", name)


def put(pool: DevicePool, name: str, nbytes: int) -> Entry:
    pool.reserve(nbytes)
    entry = pool.put(at(name), name, nbytes)
    pool.let_go(entry)
    return entry


def test_the_least_recently_used_goes_first_and_what_is_held_stays() -> None:
    evicted: list[QualifiedKey] = []
    pool = DevicePool(CAPACITY, evicted.extend)
    for name in "abc":
        put(pool, name, 30)
    held = pool.hold(at("a"))
    assert held is not None
    put(pool, "d", 30)
    assert evicted == [at("b")]
    with pytest.raises(BufferFull):
        pool.reserve(80)
    assert pool.gauges().items == 3  # nothing goes for what has no room all the same
    with pytest.raises(TensorTooLarge):
        pool.reserve(CAPACITY + 1)
    pool.let_go(held)
    pool.reserve(CAPACITY)
    pool.cancel(CAPACITY)
    assert pool.gauges().used_bytes == 0


def test_only_what_was_meant_is_found() -> None:
    pool = DevicePool(CAPACITY)
    first = put(pool, "a", 10)
    second = put(pool, "a", 10)
    assert pool.hold(at("a"), mark=first.mark) is None
    assert pool.hold(at("a"), mark=second.mark) is second
    assert pool.hold(at("a"), checksums=[1]) is None
    pool.let_go(second)
    pool.forget([at("a"), at("b")])
    assert pool.hold(at("a")) is None
    assert pool.gauges().used_bytes == 0


def test_what_is_forgotten_while_it_is_held_is_charged_until_then() -> None:
    pool = DevicePool(CAPACITY)
    put(pool, "a", 10)
    held = pool.hold(at("a"))
    assert held is not None
    pool.give(7, held)
    pool.forget([at("a")])
    assert (pool.of(7), pool.gauges().used_bytes, pool.gauges().pinned_bytes) == (held, 10, 10)
    pool.end([7, 7, 8])
    assert pool.of(7) is None
    assert pool.gauges().used_bytes == 0


class PoolMachine(RuleBasedStateMachine):
    """Whatever is done, the bytes that are charged are those that are there, held or reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[QualifiedKey] = []
        self.pool = DevicePool(CAPACITY, self.evicted.extend)
        self.known: dict[QualifiedKey, Entry] = {}
        self.holds: list[Entry] = []
        self.reserved: list[int] = []

    def _see_evictions(self) -> None:
        for address in self.evicted:
            assert self.known.pop(address) not in self.holds
        self.evicted.clear()

    @rule(nbytes=st.integers(0, CAPACITY + 10))
    def reserve(self, nbytes: int) -> None:
        try:
            self.pool.reserve(nbytes)
        except (BufferFull, TensorTooLarge):
            charged = {id(e): e.nbytes for e in self.holds}
            assert nbytes > CAPACITY - sum(charged.values()) - sum(self.reserved)
        else:
            self.reserved.append(nbytes)
        self._see_evictions()

    @precondition(lambda self: self.reserved)
    @rule(name=NAMES)
    def put(self, name: str) -> None:
        nbytes = self.reserved.pop()
        entry = self.pool.put(at(name), name, nbytes)
        self.known[at(name)] = entry
        self.holds.append(entry)

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel(self) -> None:
        self.pool.cancel(self.reserved.pop())

    @rule(name=NAMES)
    def hold(self, name: str) -> None:
        entry = self.pool.hold(at(name))
        assert entry is self.known.get(at(name))
        if entry is not None:
            self.holds.append(entry)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.holds) - 1))
        self.pool.let_go(self.holds.pop(number))

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.pool.forget([at(name)])
        self.known.pop(at(name), None)

    @invariant()
    def charged(self) -> None:
        there = {id(e): e.nbytes for e in (*self.known.values(), *self.holds)}
        gauges = self.pool.gauges()
        assert gauges.used_bytes == sum(there.values()) + sum(self.reserved) <= CAPACITY
        assert gauges.items == len(self.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
