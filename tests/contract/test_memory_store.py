"""MemoryStore: the contract, and the features that only it has."""

from collections.abc import Iterator

import pytest

from memory_store import MemoryStore
from store import BlockingStore, Publication, Publishing, StoreFull, StoreNotBrowsable
from store.testing import BrowsingContract, CoreContract
from store.testing.samples import a_location, a_record


class TestMemoryStore(CoreContract, BrowsingContract):
    @pytest.fixture
    def store(self) -> Iterator[BlockingStore]:
        with MemoryStore() as store:
            yield store


def test_a_browsable_store_may_keep_no_history() -> None:
    with MemoryStore() as store:
        assert store.browsable
        assert store.inspection() is None
        with pytest.raises(StoreNotBrowsable, match="it keeps no history of keys"):
            store.traces()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_is_the_clock_it_was_given() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    store.publish(a_record("ns", "k"), a_location(), ttl_seconds=1800)
    store.publish(a_record("ns", "gone"), a_location(), ttl_seconds=1800)
    store.withdraw("ns", "gone", "node-1", reason="evicted")
    clock.now += 1799
    assert store.locate("ns", ["k"]) != [None]
    assert store.gone("ns", "gone") == "evicted"
    clock.now += 1
    assert store.locate("ns", ["k"]) == [None]
    clock.now += 1800
    assert store.gone("ns", "gone") is None


def test_its_size_is_bounded_and_expired_entries_are_dropped() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock, records_max=2000)
    for n in range(2000):
        store.publish(a_record("ns", f"k{n}"), a_location(), ttl_seconds=10)
    with pytest.raises(StoreFull):
        store.publish(a_record("ns", "one more"), a_location())
    several = [
        Publishing(a_record("ns", key), a_location("node-2"), 1800.0) for key in ("one more", "k0")
    ]
    assert store.publish_many(several) == [Publication.REFUSED, Publication.ADDED]
    clock.now += 11
    assert store.publish(a_record("ns", "one more"), a_location()) is Publication.ADDED
    assert {record.key for record in store.scan()} == {"k0", "one more"}
