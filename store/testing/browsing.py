"""What every BrowsableStore must do besides: what commands and the dashboard show to people."""

import time

import pytest

from store import COUNTER_MAX, BlockingStore, Failure, Invalidation, NodeInfo, Withdrawing
from store.testing.samples import (
    BOOT,
    ODD_KEYS,
    OTHER_BOOT,
    StoreContract,
    a_location,
    a_mark,
    a_record,
)


class BrowsingContract(StoreContract):
    # ---- why a key is gone, or could not be fetched

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    def test_odd_keys_are_shown(self, store: BlockingStore, namespace: str, key: str) -> None:
        store.publish(a_record(namespace, key), a_location())
        assert [record.key for record in store.scan(namespace)] == [key]
        store.add_hits(namespace, {key: 2})
        assert store.hits(namespace, [key]) == [2]
        assert store.withdraw(namespace, key, "node-1", reason="evicted")
        assert store.gone(namespace, key) == "evicted"

    def test_the_last_withdrawal_gives_the_reason(
        self, store: BlockingStore, namespace: str
    ) -> None:
        assert not store.withdraw(namespace, "k", "node-1", reason="evicted")
        assert store.gone(namespace, "k") is None
        for node in ("node-1", "node-2"):
            store.publish(a_record(namespace, "k"), a_location(node))
        assert store.withdraw(namespace, "k", "node-2", reason="evicted on node-2")
        assert store.gone(namespace, "k") is None, "it is not gone: node-1 has it"
        assert store.withdraw(namespace, "k", "node-1", reason="evicted on node-1")
        assert store.locate(namespace, ["k"]) == [None]
        assert store.gone(namespace, "k") == "evicted on node-1"
        store.publish(a_record(namespace, "k", dtype="float32"), a_location())
        assert store.gone(namespace, "k") is None

    def test_many_withdrawals_give_their_reasons(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for key in ("a", "b", "c"):
            store.publish(a_record(namespace, key), a_location())
        stale = a_location(generation=2)
        store.withdraw_many(
            [
                Withdrawing(namespace, "c", "node-1", "evicted"),
                Withdrawing(namespace, "b", "node-1", "stale", exactly=stale),
                Withdrawing(namespace, "a", "node-1", "expired", exactly=a_location()),
                Withdrawing(namespace, "a", "node-1", "again"),
            ]
        )
        assert [store.gone(namespace, key) for key in "abc"] == ["expired", None, "evicted"]

    def test_reasons_of_records_that_expired_or_were_evicted(
        self, store: BlockingStore, namespace: str
    ) -> None:
        ended = Withdrawing(namespace, "k", "node-1", "expired", may_have_ended=True)
        assert store.withdraw_many([ended]) == [False]
        assert store.gone(namespace, "k") == "expired"
        later = Withdrawing(namespace, "k", "node-2", "evicted", may_have_ended=True)
        assert store.withdraw_many([later]) == [False]
        assert store.gone(namespace, "k") == "expired", "the first reason stands"
        store.publish(a_record(namespace, "k"), a_location("node-2"))
        assert store.gone(namespace, "k") is None
        assert store.withdraw_many([ended]) == [False]
        assert store.gone(namespace, "k") is None, "node-2 has it"
        assert store.withdraw_many([later]) == [True]
        assert store.gone(namespace, "k") == "evicted"

    def test_the_last_failure_of_a_key(self, store: BlockingStore, namespace: str) -> None:
        first = Failure(namespace, "k", "checksum", "node-1", "node-2")
        second = Failure(namespace, "k", "peer_failed", "node-3", "node-2")
        other = Failure(namespace, "another key", "checksum", "node-1", "node-2")
        store.note_failures([first, other])
        assert store.failure(namespace, "k") == first
        store.note_failures([second])
        assert store.failure(namespace, "k") == second
        assert store.failure(namespace, "another key") == other
        assert store.failure("other", "k") is None

    def test_the_reason_of_an_invalidated_namespace(
        self, store: BlockingStore, namespace: str
    ) -> None:
        keys = [f"k{n}" for n in range(30)] + ["a key with spaces " + "x" * 200]
        for key in keys:
            for node in ("node-1", "node-2"):
                store.publish(a_record(namespace, key), a_location(node))
        store.publish(a_record("other", "k0"), a_location())
        before = store.invalidations()
        first, second = a_mark(18), a_mark(17)
        store.mark_invalid(namespace, first)
        assert store.invalidations() == before | {namespace: first}
        store.mark_invalid(namespace, second)
        assert store.invalidations()[namespace] == second, "the last one, whatever its time"
        with pytest.raises(ValueError):
            store.mark_invalid(namespace, Invalidation("no hex digits", 1))
        assert store.clear(namespace) == len(keys)
        assert store.clear(namespace) == 0
        assert store.locate(namespace, keys) == [None] * len(keys)
        assert {store.gone(namespace, key) for key in keys} == {"invalidated"}
        assert store.locate("other", ["k0"]) != [None]
        store.publish(a_record(namespace, "k0"), a_location())
        assert store.gone(namespace, "k0") is None

    # ---- namespaces, counters

    def test_namespaces(self, store: BlockingStore, namespace: str) -> None:
        parts = {"model": "some/model: 7B", "dtype": "bfloat16", "empty": ""}
        store.describe_namespace(namespace, parts)
        store.describe_namespace("other", {})
        assert store.namespaces() == {namespace: parts}
        store.describe_namespace(namespace, {"model": "another"})  # and adds nothing to it
        assert store.namespaces() == {namespace: {"model": "another"}}

    def test_counters_add_up(self, store: BlockingStore, namespace: str) -> None:
        store.beat("node-1", BOOT, 1)
        for _ in range(2):
            store.add_hits(namespace, {"a": 1, "b": 20})
            store.add_stats("node-1", {"hits_local": 3, "bytes": 1 << 40})
        store.add_hits(namespace, {})
        assert store.hits(namespace, ["b", "missing", "a"]) == [40, 0, 2]
        assert store.hits(namespace, []) == []
        assert store.stats() == {"node-1": {"hits_local": 6, "bytes": 1 << 41}}

    def test_a_counter_stays_at_its_most(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 1)
        store.add_stats("node-1", {"first": 1, "hits": COUNTER_MAX, "last": 1})
        for _ in range(2):
            store.add_stats("node-1", {"first": 1, "hits": COUNTER_MAX, "last": 1})
        assert store.stats() == {"node-1": {"first": 3, "hits": COUNTER_MAX, "last": 3}}

    def test_only_the_most_hit_keys_are_kept(self, store: BlockingStore, namespace: str) -> None:
        store.add_hits(namespace, {f"rare-{n}": 1 for n in range(9_999)})
        store.add_hits(namespace, {"top": 50, "second": 40})
        assert store.hits(namespace, ["top", "second"]) == [50, 40]
        assert sum(store.hits(namespace, [f"rare-{n}" for n in range(9_999)])) == 9_998

    def test_the_counters_of_a_node_end_with_it(self, store: BlockingStore) -> None:
        store.beat("node-1", BOOT, 1)
        store.add_stats("node-1", {"hits": 1})
        store.leave("node-1", OTHER_BOOT)
        assert store.stats() == {"node-1": {"hits": 1}}
        store.leave("node-1", BOOT)
        assert store.stats() == {}

    # ---- the rest

    def test_how_long_ago_a_node_described_itself(self, store: BlockingStore) -> None:
        info = NodeInfo("node-1", BOOT, "tcp://10.0.0.1:7000", "host", "0.1", 1 << 33, 12, 3)
        store.describe_node(info)
        time.sleep(0.2)
        ages = store.node_ages(["node-1", "missing"])
        assert ages.keys() == {"node-1"}
        assert 0.1 < ages["node-1"] < 30
        store.describe_node(info)
        assert store.node_ages(["node-1"])["node-1"] < ages["node-1"] + 0.1
        assert store.node_ages([]) == {}

    def test_scan(self, store: BlockingStore, namespace: str) -> None:
        for n in range(30):
            store.publish(a_record(namespace, f"k{n}"), a_location())
        store.publish(a_record("other", "k0"), a_location())
        assert {record.key for record in store.scan(namespace)} == {f"k{n}" for n in range(30)}
        assert {record.namespace for record in store.scan()} == {namespace, "other"}
        assert len(list(store.scan(limit=7))) == 7
        assert list(store.scan(limit=0)) == []

    def test_ping_and_info(self, store: BlockingStore) -> None:
        assert 0 <= store.ping() < 5
        assert store.server_info().product
