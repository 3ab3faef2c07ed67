"""What every store must do about hand-offs, which exactly one node may hold."""

from typing import Any

import pytest

from store import BlockingStore, Location, Publication, Publishing
from store.testing.samples import OTHER_BOOT, StoreContract, a_location, a_record

OFFER = 0
"""The checksum of a hand-off that waits for admission."""


def publish(store: BlockingStore, namespace: str, at: Location, **changes: Any) -> Publication:
    record = a_record(namespace, "k@r", **changes)
    (outcome,) = store.publish_many([Publishing(record, at, 60.0, sole=True)])
    return outcome


def locations(store: BlockingStore, namespace: str) -> set[Location]:
    (found,) = store.locate(namespace, ["k@r"])
    return set() if found is None else set(found.locations)


class SoleContract(StoreContract):
    @pytest.mark.parametrize("changes", [{}, {"shape": (3, 3)}], ids=["alike", "another shape"])
    def test_a_hand_off_of_another_node_is_owned(
        self, store: BlockingStore, namespace: str, changes: dict[str, Any]
    ) -> None:
        first, second = a_location("node-1"), a_location("node-2", checksum=7)
        assert publish(store, namespace, first) is Publication.ADDED
        assert publish(store, namespace, second, **changes) is Publication.OWNED
        assert locations(store, namespace) == {first}
        assert publish(store, namespace, first) is Publication.PRESENT, "its owner goes on"
        assert store.withdraw(namespace, "k@r", "node-1", reason="taken", exactly=first)
        assert publish(store, namespace, second, **changes) is Publication.ADDED
        assert locations(store, namespace) == {second}

    def test_the_owner_replaces_a_hand_off_of_any_shape(
        self, store: BlockingStore, namespace: str
    ) -> None:
        publish(store, namespace, a_location(generation=1))
        for newer in (a_location(generation=2), a_location(boot=OTHER_BOOT, generation=1)):
            shape = {"shape": (newer.generation, 9), "dtype": "float32"}
            assert publish(store, namespace, newer, **shape) is Publication.ADDED
            (found,) = store.locate(namespace, ["k@r"])
            assert found is not None
            assert (found.shape, found.locations) == (shape["shape"], (newer,))

    def test_an_offer_without_bytes_does_not_block_other_publications(
        self, store: BlockingStore, namespace: str
    ) -> None:
        offer, item = a_location("node-1", checksum=OFFER), a_location("node-2")
        assert publish(store, namespace, offer) is Publication.ADDED
        assert publish(store, namespace, item) is Publication.ADDED
        assert locations(store, namespace) == {offer, item}
        later = offer._replace(generation=offer.generation + 1)
        assert publish(store, namespace, later) is Publication.OWNED, "it is there now"
        assert locations(store, namespace) == {offer, item}

    def test_shared_content_has_many_nodes(self, store: BlockingStore, namespace: str) -> None:
        record = a_record(namespace, "k")
        for node in ("node-1", "node-2"):
            assert store.publish(record, a_location(node)) is Publication.ADDED
