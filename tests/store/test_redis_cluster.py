"""RedisStore: the contract on a real cluster of three masters and three replicas."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from clusters import ValkeyCluster, slot_of
from servers import patient
from store import BlockingStore, Publication, Record, StoreUnavailable, layout
from store.testing import BrowsingContract, CoreContract
from store.testing.samples import a_location, a_record


class TestClusterStore(CoreContract, BrowsingContract):
    @pytest.fixture
    def store(self, valkey_cluster: ValkeyCluster) -> Iterator[BlockingStore]:
        with patient(valkey_cluster.url) as store:
            yield store

    def test_ping_and_info(self, store: BlockingStore) -> None:
        assert 0 <= store.ping() < 5
        info = store.server_info()
        assert (info.product, info.mode) == ("valkey", "cluster")


@pytest.fixture
def store(valkey_cluster: ValkeyCluster) -> Iterator[BlockingStore]:
    with patient(valkey_cluster.url) as store:
        yield store


def test_the_keys_of_one_item_lie_on_one_server(namespace: str) -> None:
    for key in ("plain", "}{", "{}", "", "x" * 300, "a{b}c", "h.0"):
        names = (layout.record(namespace, key), layout.claim(namespace, key))
        assert len({slot_of(name) for name in (*names, layout.gone(namespace, key))}) == 1


def test_records_lie_on_all_masters(
    store: BlockingStore, valkey_cluster: ValkeyCluster, namespace: str
) -> None:
    keys = [f"k{n}" for n in range(60)]
    for key in keys:
        store.publish(a_record(namespace, key), a_location())
    sizes = [master.command("DBSIZE") for master in valkey_cluster.masters()]
    assert min(sizes) > 0
    assert sum(sizes) == len(keys)
    assert [record and record.key for record in store.locate(namespace, keys)] == keys


@pytest.mark.parametrize("known", [True, False])
def test_a_slot_while_it_moves_and_afterwards(
    store: BlockingStore, valkey_cluster: ValkeyCluster, namespace: str, known: bool
) -> None:
    def on_its_way() -> None:
        (found,) = store.locate(namespace, ["k"])
        assert (found is not None) == known
        # While a slot moves, some keys of a script are on the old server, some on the new or on
        # none; the cluster cannot distinguish these cases. The publisher retries.
        with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
            store.publish(a_record(namespace, "k"), a_location("node-2"))

    if known:
        store.publish(a_record(namespace, "k"), a_location())
    slot = slot_of(layout.record(namespace, "k"))
    source = valkey_cluster.owner(slot)
    target = next(master for master in valkey_cluster.masters() if master is not source)
    valkey_cluster.move_slot(slot, target, between=on_its_way)
    assert store.publish(a_record(namespace, "k"), a_location("node-2")) is Publication.ADDED
    (found,) = store.locate(namespace, ["k"])
    assert found is not None
    assert len(found.locations) == 1 + known
    valkey_cluster.wait_until_whole()
    valkey_cluster.move_slot(slot, source)
    valkey_cluster.wait_until_whole()


def test_a_master_dies(own_cluster: ValkeyCluster, namespace: str) -> None:
    keys = [f"k{n}" for n in range(30)]
    with patient(own_cluster.url) as store:
        for key in keys:
            store.publish(a_record(namespace, key), a_location())
        dying = own_cluster.owner(layout.record(namespace, "k0"))
        with dying.connect() as connection:
            connection("WAIT", 1, 1000)
        before = store.failovers()
        dying.kill()
        own_cluster.wait_until_whole()
        found = _in_time(store, namespace, keys)
        assert [record and record.key for record in found] == keys
        assert store.failovers() > before


def test_the_first_seeds_may_be_dead(own_cluster: ValkeyCluster, namespace: str) -> None:
    own_cluster.members[0].kill()
    own_cluster.wait_until_whole()
    with patient(own_cluster.url) as store:
        store.publish(a_record(namespace, "k"), a_location())
        assert store.locate(namespace, ["k"]) != [None]


def _in_time(store: BlockingStore, namespace: str, keys: list[str]) -> list[Record | None]:
    """Locate until the store has found the servers; the first calls may fail."""
    for _ in range(50):
        with suppress(StoreUnavailable):
            found = store.locate(namespace, keys)
            if all(found):  # keys of a server that was not reached are misses
                return found
        time.sleep(0.05)
    raise AssertionError("the store does not find its way")
