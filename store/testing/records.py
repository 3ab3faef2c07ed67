"""What every store must do about records: publish, look up, withdraw.

TTLs run on the store's clock. Tests that wait use short real TTLs, and check only that nothing ends
early and that everything ends.
"""

import time
from typing import Any

import pytest

from store import (
    LOCATIONS_MAX,
    BlockingStore,
    ClaimState,
    Publication,
    Publishing,
    StoreUnavailable,
    Withdrawing,
)
from store.testing.samples import BOOT, ODD_KEYS, OTHER_BOOT, StoreContract, a_location, a_record


class RecordContract(StoreContract):
    # ---- publish and locate

    def test_a_published_record_is_located_in_full(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k")
        assert store.publish(record, a_location()) is Publication.ADDED
        assert store.locate(namespace, ["k"]) == [record._replace(locations=(a_location(),))]

    def test_the_first_publisher_names_the_device(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k", device="H200")
        store.publish(record, a_location())
        store.publish(record._replace(device="cpu"), a_location("node-2"))
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert found.device == "H200"
        assert len(found.locations) == 2

    @pytest.mark.parametrize("device", ["x" * 13, "a\nline", "\N{CAT FACE}"])
    def test_a_name_of_a_device_is_short(
        self, store: BlockingStore, namespace: str, device: str
    ) -> None:
        with pytest.raises(ValueError, match="device"):
            store.publish(a_record(namespace, "k", device=device), a_location())

    @pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3, 4), tuple(range(16))])
    def test_any_shape(self, store: BlockingStore, namespace: str, shape: tuple[int, ...]) -> None:
        store.publish(a_record(namespace, "k", shape=shape, nbytes=0, kind="none"), a_location())
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert (found.shape, found.nbytes, found.kind) == (shape, 0, "none")

    def test_locate_keeps_the_order_and_returns_none_for_absent_keys(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for key in ("a", "c"):
            store.publish(a_record(namespace, key), a_location())
        found = store.locate(namespace, ["c", "missing", "a", "c"])
        assert [record and record.key for record in found] == ["c", None, "a", "c"]
        assert store.locate(namespace, []) == []

    def test_locate_more_than_a_page(self, store: BlockingStore, namespace: str) -> None:
        store.publish(a_record(namespace, "last"), a_location())
        found = store.locate(namespace, [f"missing-{n}" for n in range(2500)] + ["last"])
        assert found[:2500] == [None] * 2500
        assert found[2500] is not None

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    def test_odd_keys(self, store: BlockingStore, namespace: str, key: str) -> None:
        assert store.publish(a_record(namespace, key), a_location()) is Publication.ADDED
        (found,) = store.locate(namespace, [key])
        assert found is not None
        assert found.key == key
        others = [other for other in ODD_KEYS if other != key]
        assert store.locate(namespace, others) == [None] * len(others)
        claim: dict[str, Any] = {"holder": "n", "state": ClaimState.ENCODING, "lease_seconds": 9.0}
        assert store.claim(namespace, key, token="t", **claim).granted
        assert store.withdraw(namespace, key, "node-1", reason="evicted")
        assert store.locate(namespace, [key]) == [None]

    def test_namespaces_are_separate(self, store: BlockingStore, namespace: str) -> None:
        store.publish(a_record(namespace, "k"), a_location())
        assert [bool(one) for one in store.look_up([("o", "k"), (namespace, "k")])] == [False, True]
        assert not store.withdraw("other", "k", "node-1", reason="evicted")
        claim: dict[str, Any] = {"holder": "n", "state": ClaimState.ENCODING, "lease_seconds": 9.0}
        assert store.claim("other", "k", token="t", **claim).granted
        assert store.claim(namespace, "k", token="u", **claim).granted

    def test_the_same_again_is_present(self, store: BlockingStore, namespace: str) -> None:
        record = a_record(namespace, "k")
        store.publish(record, a_location())
        assert store.publish(record, a_location()) is Publication.PRESENT

    def test_producer_and_time_of_a_copy_do_not_conflict(
        self, store: BlockingStore, namespace: str
    ) -> None:
        store.publish(a_record(namespace, "k"), a_location())
        later = a_record(namespace, "k", created=1763719999.0)
        second = a_location("node-2", checksum=0xBEEF)
        assert store.publish(later, second) is Publication.ADDED
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert set(found.locations) == {a_location(), second}
        assert found.created == 1763718000.125

    @pytest.mark.parametrize(
        "changes",
        [{"dtype": "float32"}, {"shape": (1152, 729)}, {"nbytes": 4}, {"kind": "none"}],
        ids=["dtype", "shape", "nbytes", "kind"],
    )
    def test_other_bytes_conflict(
        self, store: BlockingStore, namespace: str, changes: dict[str, Any]
    ) -> None:
        store.publish(a_record(namespace, "k"), a_location())
        before = store.locate(namespace, ["k"])
        other = a_record(namespace, "k", **changes)
        assert store.publish(other, a_location("node-2")) is Publication.CONFLICT
        assert store.locate(namespace, ["k"]) == before

    def test_a_newer_copy_of_a_node_replaces_its_older(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k")
        store.publish(record, a_location(generation=9))
        for newer in (a_location(generation=10), a_location(boot=OTHER_BOOT, generation=1)):
            assert store.publish(record, newer) is Publication.ADDED
            (found,) = store.locate(namespace, ["k"])
            assert found is not None
            assert found.locations == (newer,)

    def test_an_older_copy_that_is_published_late_is_ignored(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k")
        newest = a_location(generation=10)
        store.publish(record, newest)
        assert store.publish(record, a_location(generation=9)) is Publication.PRESENT
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert found.locations == (newest,)

    def test_at_most_four_locations(self, store: BlockingStore, namespace: str) -> None:
        record = a_record(namespace, "k")
        for n in range(LOCATIONS_MAX):
            assert store.publish(record, a_location(f"node-{n}")) is Publication.ADDED
        assert store.publish(record, a_location("one-more")) is Publication.FULL
        newer = a_location("node-0", generation=2)
        assert store.publish(record, newer) is Publication.ADDED, "a holder may renew its own"
        assert store.withdraw(namespace, "k", "node-1", reason="evicted")
        assert store.publish(record, a_location("one-more")) is Publication.ADDED
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert len(found.locations) == LOCATIONS_MAX

    def test_a_record_ends_with_its_ttl(self, store: BlockingStore, namespace: str) -> None:
        store.publish(a_record(namespace, "short"), a_location(), ttl_seconds=1.5)
        store.publish(a_record(namespace, "long"), a_location(), ttl_seconds=60)
        # A location with little time left does not shorten the life of the others.
        store.publish(a_record(namespace, "long"), a_location("node-2"), ttl_seconds=0.1)
        assert None not in store.locate(namespace, ["short", "long"])
        time.sleep(1.6)
        short, long = store.locate(namespace, ["short", "long"])
        assert short is None
        assert long is not None

    def test_a_renewal_extends_the_life_of_a_record(
        self, store: BlockingStore, namespace: str
    ) -> None:
        record = a_record(namespace, "k")
        store.publish(record, a_location(), ttl_seconds=1.5)
        time.sleep(0.8)  # less than half is left
        assert store.publish(record, a_location(), ttl_seconds=60) is Publication.PRESENT
        time.sleep(0.8)
        assert store.locate(namespace, ["k"]) != [None]

    @pytest.mark.parametrize(
        "changes", [{"boot": "no:colon"}, {"generation": 0}, {"checksum": 2**64}, {"node": ""}]
    )
    def test_an_unreadable_location_is_refused(
        self, store: BlockingStore, namespace: str, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError):
            store.publish(a_record(namespace, "k"), a_location(**changes))
        assert store.locate(namespace, ["k"]) == [None]

    def test_a_namespace_that_could_name_other_keys_is_refused(self, store: BlockingStore) -> None:
        for namespace in ("", "*", "a:{b", "a b", "x" * 129):
            with pytest.raises(ValueError):
                store.locate(namespace, ["k"])

    def test_publications_are_answered_in_their_order(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for n in range(LOCATIONS_MAX):
            store.publish(a_record(namespace, "full"), a_location(f"node-{n}"))
        for key in ("present", "conflict"):
            store.publish(a_record(namespace, key), a_location())
        mine = a_location(checksum=9)
        wanted = [
            (a_record(namespace, "conflict", dtype="float32"), a_location(), Publication.CONFLICT),
            (a_record(namespace, "added"), mine, Publication.ADDED),
            (a_record(namespace, "full"), a_location("more"), Publication.FULL),
            (a_record(namespace, "present"), a_location(), Publication.PRESENT),
            (a_record(namespace, "added"), mine, Publication.PRESENT),
        ]
        publishings = [Publishing(record, at, 60.0) for record, at, _ in wanted]
        assert store.publish_many(publishings) == [answer for _, _, answer in wanted]
        (found,) = store.locate(namespace, ["added"])
        assert found == a_record(namespace, "added")._replace(locations=(mine,))
        assert store.publish_many([]) == []

    def test_a_batch_with_an_invalid_publication_is_refused_in_full(
        self, store: BlockingStore, namespace: str
    ) -> None:
        good = Publishing(a_record(namespace, "k"), a_location(), 60.0)
        bad = Publishing(a_record(namespace, "k"), a_location(generation=0), 60.0)
        with pytest.raises(ValueError):
            store.publish_many([good, bad])
        assert store.locate(namespace, ["k"]) == [None]

    def test_a_full_record_is_not_renewed(self, store: BlockingStore, namespace: str) -> None:
        for n in range(LOCATIONS_MAX):
            store.publish(a_record(namespace, "k"), a_location(f"n{n}"), ttl_seconds=1.5)
        more = a_location("one-more")
        assert store.publish(a_record(namespace, "k"), more, ttl_seconds=60) is Publication.FULL
        time.sleep(1.6)
        assert store.locate(namespace, ["k"]) == [None]

    # ---- withdraw

    def test_many_withdrawals_are_answered_in_their_order(
        self, store: BlockingStore, namespace: str
    ) -> None:
        for key in ("a", "b", "c"):
            store.publish(a_record(namespace, key), a_location())
        stale = a_location(generation=2)
        answers = store.withdraw_many(
            [
                Withdrawing(namespace, "c", "node-1", "evicted"),
                Withdrawing(namespace, "missing", "node-1", "evicted"),
                Withdrawing(namespace, "b", "node-1", "stale", exactly=stale),
                Withdrawing(namespace, "a", "node-1", "expired", exactly=a_location()),
                Withdrawing(namespace, "a", "node-1", "again"),
            ]
        )
        assert answers == [True, False, False, True, False]
        left = store.locate(namespace, ["a", "b", "c"])
        assert [record and record.key for record in left] == [None, "b", None]
        assert store.withdraw_many([]) == []

    def test_an_exact_withdrawal_names_the_node_of_the_copy(
        self, store: BlockingStore, namespace: str
    ) -> None:
        """Two nodes' locations may have the same text; `exactly` names one of them."""
        for node in ("node-1", "node-2"):
            store.publish(a_record(namespace, "k"), a_location(node))
        other = a_location("node-2")
        assert not store.withdraw(namespace, "k", "node-1", reason="stale", exactly=other)
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert len(found.locations) == 2

    def test_withdraw_leaves_the_others(self, store: BlockingStore, namespace: str) -> None:
        for node in ("node-1", "node-2"):
            store.publish(a_record(namespace, "k"), a_location(node))
        assert store.withdraw(namespace, "k", "node-1", reason="evicted")
        assert not store.withdraw(namespace, "k", "node-1", reason="evicted")
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert found.locations == (a_location("node-2"),)

    def test_withdraw_of_an_absent_copy(self, store: BlockingStore, namespace: str) -> None:
        assert not store.withdraw(namespace, "k", "node-1", reason="evicted")
        assert store.locate(namespace, ["k"]) == [None]

    def test_withdraw_exactly_spares_a_newer_copy(
        self, store: BlockingStore, namespace: str
    ) -> None:
        stale, fresh = a_location(generation=1), a_location(generation=2)
        store.publish(a_record(namespace, "k"), fresh)
        assert not store.withdraw(namespace, "k", "node-1", reason="stale", exactly=stale)
        assert store.withdraw(namespace, "k", "node-1", reason="stale", exactly=fresh)

    # ---- the rest

    def test_closed(self, store: BlockingStore, namespace: str) -> None:
        assert store.beats() == {}
        store.close()
        store.close()
        with pytest.raises(StoreUnavailable):
            store.locate(namespace, ["k"])
        with pytest.raises(StoreUnavailable):
            store.beat("node-1", BOOT, 1)
