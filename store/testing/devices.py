"""What every store must do about device locations, which accompany other locations."""

import pytest

from store import BlockingStore, DeviceLocation, Location, Publication, Publishing, Withdrawing
from store.testing.samples import OTHER_BOOT, StoreContract, a_location, a_record


def on_device(node: str = "node-1", mark: int = 7) -> DeviceLocation:
    return DeviceLocation(node, mark, "nccl", "0a" * 4, 41000, "f" * 12)


def publish(
    store: BlockingStore, namespace: str, at: Location, device: DeviceLocation | None
) -> Publication:
    publishing = Publishing(a_record(namespace, "k"), at, 60.0, device=device)
    (outcome,) = store.publish_many([publishing])
    return outcome


def devices(store: BlockingStore, namespace: str) -> set[DeviceLocation]:
    (found,) = store.locate(namespace, ["k"])
    return set() if found is None else set(found.devices)


class DeviceContract(StoreContract):
    def test_a_device_location_belongs_to_a_location(
        self, store: BlockingStore, namespace: str
    ) -> None:
        assert publish(store, namespace, a_location(), on_device()) is Publication.ADDED
        other = a_location("node-2")
        assert publish(store, namespace, other, on_device("node-2")) is Publication.ADDED
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert set(found.locations) == {a_location(), other}
        assert set(found.devices) == {on_device(), on_device("node-2")}

    def test_a_device_location_changes_without_its_location(
        self, store: BlockingStore, namespace: str
    ) -> None:
        publish(store, namespace, a_location(), None)
        assert devices(store, namespace) == set()
        assert publish(store, namespace, a_location(), on_device()) is Publication.PRESENT
        assert devices(store, namespace) == {on_device()}
        assert publish(store, namespace, a_location(), on_device(mark=8)) is Publication.PRESENT
        assert devices(store, namespace) == {on_device(mark=8)}
        assert publish(store, namespace, a_location(), None) is Publication.PRESENT
        assert devices(store, namespace) == set()

    def test_a_device_location_is_removed_with_its_location(
        self, store: BlockingStore, namespace: str
    ) -> None:
        publish(store, namespace, a_location(), on_device())
        publish(store, namespace, a_location("node-2"), None)
        assert store.withdraw_many([Withdrawing(namespace, "k", "node-1", "evicted")]) == [True]
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert (found.locations, found.devices) == ((a_location("node-2"),), ())

    def test_another_boot_or_generation_has_its_own_device_location(
        self, store: BlockingStore, namespace: str
    ) -> None:
        publish(store, namespace, a_location(generation=2), on_device(mark=2))
        late = publish(store, namespace, a_location(generation=1), on_device(mark=1))
        assert (late, devices(store, namespace)) == (Publication.PRESENT, {on_device(mark=2)})
        publish(store, namespace, a_location(boot=OTHER_BOOT), None)
        assert devices(store, namespace) == set()

    @pytest.mark.parametrize(
        "wrong",
        [{"kind": "tcp"}, {"port": 0}, {"port": 70000}, {"pool": "p"}, {"mark": 0}, {"node": ""}],
        ids=str,
    )
    def test_an_unreadable_device_location_is_refused(
        self, store: BlockingStore, namespace: str, wrong: dict[str, object]
    ) -> None:
        with pytest.raises(ValueError, match="device"):
            publish(store, namespace, a_location(), on_device()._replace(**wrong))  # type: ignore[arg-type]
        assert devices(store, namespace) == set()
