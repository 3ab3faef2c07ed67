"""What every store must do about nodes: beats, ownership of a node id, leaving."""

from dataclasses import replace

import pytest

from store import POOLS_MAX, Beat, BlockingStore, NodeInfo, NodeTaken, PoolEndpoint
from store.testing.samples import BOOT, OTHER_BOOT, StoreContract


class NodeContract(StoreContract):
    def test_beats(self, store: BlockingStore) -> None:
        assert not store.beat("node-1", BOOT, 1), "the first beat"
        assert store.beat("node-1", BOOT, 2)
        store.beat("node-2", OTHER_BOOT, 7)
        assert store.beats() == {"node-1": Beat(BOOT, 2), "node-2": Beat(OTHER_BOOT, 7)}

    def test_an_id_belongs_to_one_boot(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 4)
        for replacing in (None, Beat(BOOT, 3), Beat(OTHER_BOOT, 4), Beat(OTHER_BOOT, 1)):
            with pytest.raises(NodeTaken) as caught:
                store.beat("node-1", OTHER_BOOT, 1, replacing=replacing)
            assert (caught.value.node, caught.value.beat) == ("node-1", Beat(BOOT, 4))
            assert store.beats() == {"node-1": Beat(BOOT, 4)}, "nothing changed"
        assert store.beat("node-1", BOOT, 5), "its owner goes on"

    def test_a_boot_without_new_beats_is_replaced(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 4)
        assert not store.beat("node-1", OTHER_BOOT, 1, replacing=Beat(BOOT, 4)), "a first beat"
        assert store.beat("node-1", OTHER_BOOT, 2, replacing=Beat(BOOT, 4))
        with pytest.raises(NodeTaken) as caught:
            store.beat("node-1", BOOT, 5)
        assert caught.value.beat == Beat(OTHER_BOOT, 2)

    def test_of_two_replacements_of_a_boot_one_succeeds(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 4)
        store.beat("node-1", OTHER_BOOT, 1, replacing=Beat(BOOT, 4))
        with pytest.raises(NodeTaken):
            store.beat("node-1", "d" * 16, 1, replacing=Beat(BOOT, 4))

    def test_replacing_a_boot_that_left_is_a_first_beat(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 4)
        store.leave("node-1", BOOT)
        assert not store.beat("node-1", OTHER_BOOT, 1, replacing=Beat(BOOT, 4))

    def test_a_beat_of_an_evicted_node_reports_the_eviction(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 4)
        store.leave("node-1", BOOT)
        assert not store.beat("node-1", BOOT, 5)
        assert store.beat("node-1", BOOT, 6)

    def test_leave_does_not_remove_a_newer_boot(self, store: BlockingStore) -> None:
        info = NodeInfo("node-1", BOOT, "tcp://10.0.0.1:7000", "host", "0.1", 1 << 33, 12, 3, 2)
        store.beat("node-1", BOOT, 1)
        store.describe_node(info)
        store.leave("node-1", OTHER_BOOT)
        assert store.node_infos(["missing", "node-1"]) == {"node-1": info}
        assert store.beats() == {"node-1": Beat(BOOT, 1)}
        store.leave("node-1", BOOT)
        assert (store.beats(), store.node_infos(["node-1"])) == ({}, {})
        store.leave("node-1", BOOT)

    def test_a_node_names_the_pools_that_its_processes_have(self, store: BlockingStore) -> None:
        pool = PoolEndpoint("gloo", "0a" * 4, 41000, "f" * 12)
        other = PoolEndpoint("nccl", "0b" * 4, 65535, "e" * 12)
        info = NodeInfo("node-1", BOOT, "tcp://10.0.0.1:7000", "host", "0.1", 1 << 33, 12, 3, 2)
        for pools in ((pool,), (pool, other), (other,) * POOLS_MAX, ()):
            store.describe_node(replace(info, pools=pools))
            assert store.node_infos(["node-1"])["node-1"].pools == pools, "and none of before"
        for bad in ((pool._replace(port=0),), (pool._replace(pool="x y"),), (pool,) * 17):
            with pytest.raises(ValueError):
                store.describe_node(replace(info, pools=bad))

    def test_an_unreadable_boot_id_is_refused(self, store: BlockingStore) -> None:
        for node, boot in (("node-1", "no:colon"), ("node-1", ""), ("a b", BOOT)):
            with pytest.raises(ValueError):
                store.beat(node, boot, 1)
        assert store.beats() == {}

    def test_failovers_are_counted_from_the_start(self, store: BlockingStore) -> None:
        store.beats()
        assert store.failovers() == 0
