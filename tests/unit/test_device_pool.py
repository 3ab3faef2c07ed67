"""DevicePool: budget, order of eviction, pins and tickets; by hand and against a model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hypothesis_profiles import examples
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
    pool.unpin(entry)
    return entry


def test_the_least_recently_used_is_evicted_and_pinned_entries_stay() -> None:
    evicted: list[QualifiedKey] = []
    pool = DevicePool(CAPACITY, evicted.extend)
    for name in "abc":
        put(pool, name, 30)
    pinned = pool.pin(at("a"))
    assert pinned is not None
    put(pool, "d", 30)
    assert evicted == [at("b")]
    with pytest.raises(BufferFull):
        pool.reserve(80)
    assert pool.gauges().items == 3  # nothing is evicted for a reservation that fails
    with pytest.raises(TensorTooLarge):
        pool.reserve(CAPACITY + 1)
    pool.unpin(pinned)
    pool.reserve(CAPACITY)
    pool.cancel(CAPACITY)
    assert pool.gauges().used_bytes == 0


def test_mark_and_checksum_must_match() -> None:
    pool = DevicePool(CAPACITY)
    first = put(pool, "a", 10)
    second = put(pool, "a", 10)
    assert pool.pin(at("a"), mark=first.mark) is None
    assert pool.pin(at("a"), mark=second.mark) is second
    assert pool.pin(at("a"), checksums=[1]) is None
    pool.unpin(second)
    pool.forget([at("a"), at("b")])
    assert pool.pin(at("a")) is None
    assert pool.gauges().used_bytes == 0


def test_a_forgotten_entry_is_charged_until_its_last_pin() -> None:
    pool = DevicePool(CAPACITY)
    put(pool, "a", 10)
    pinned = pool.pin(at("a"))
    assert pinned is not None
    pool.assign(7, pinned)
    pool.forget([at("a")])
    assert (pool.entry_of(7), pool.gauges().used_bytes, pool.gauges().pinned_bytes) == (
        pinned,
        10,
        10,
    )
    pool.release([7, 7, 8])
    assert pool.entry_of(7) is None
    assert pool.gauges().used_bytes == 0


class PoolMachine(RuleBasedStateMachine):
    """The charged bytes are always those of the entries, the pins and the reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[QualifiedKey] = []
        self.pool = DevicePool(CAPACITY, self.evicted.extend)
        self.known: dict[QualifiedKey, Entry] = {}
        self.pins: list[Entry] = []
        self.reserved: list[int] = []

    def _apply_evictions(self) -> None:
        for address in self.evicted:
            assert self.known.pop(address) not in self.pins
        self.evicted.clear()

    @rule(nbytes=st.integers(0, CAPACITY + 10))
    def reserve(self, nbytes: int) -> None:
        try:
            self.pool.reserve(nbytes)
        except (BufferFull, TensorTooLarge):
            charged = {id(e): e.nbytes for e in self.pins}
            assert nbytes > CAPACITY - sum(charged.values()) - sum(self.reserved)
        else:
            self.reserved.append(nbytes)
        self._apply_evictions()

    @precondition(lambda self: self.reserved)
    @rule(name=NAMES)
    def put(self, name: str) -> None:
        nbytes = self.reserved.pop()
        entry = self.pool.put(at(name), name, nbytes)
        self.known[at(name)] = entry
        self.pins.append(entry)

    @precondition(lambda self: self.reserved)
    @rule()
    def cancel(self) -> None:
        self.pool.cancel(self.reserved.pop())

    @rule(name=NAMES)
    def pin(self, name: str) -> None:
        entry = self.pool.pin(at(name))
        assert entry is self.known.get(at(name))
        if entry is not None:
            self.pins.append(entry)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.pins) - 1))
        self.pool.unpin(self.pins.pop(number))

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        self.pool.forget([at(name)])
        self.known.pop(at(name), None)

    @invariant()
    def charged(self) -> None:
        charged = {id(e): e.nbytes for e in (*self.known.values(), *self.pins)}
        gauges = self.pool.gauges()
        assert gauges.used_bytes == sum(charged.values()) + sum(self.reserved) <= CAPACITY
        assert gauges.items == len(self.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
