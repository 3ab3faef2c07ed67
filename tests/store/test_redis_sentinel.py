"""RedisStore: the contract on the master that Sentinel names, and on its successor."""

import time
from collections.abc import Iterator

import pytest

from clusters import SERVICE, Sentinels
from servers import patient
from store import BlockingStore, Record, StoreUnavailable
from store.testing import BrowsingContract, CoreContract
from store.testing.samples import a_location, a_record


class TestSentinelStore(CoreContract, BrowsingContract):
    @pytest.fixture
    def store(self, sentinels: Sentinels) -> Iterator[BlockingStore]:
        with patient(sentinels.url) as store:
            yield store


def test_a_failover(own_sentinels: Sentinels, namespace: str) -> None:
    record = a_record(namespace, "k")
    with patient(own_sentinels.url) as store:
        store.publish(record, a_location())
        time.sleep(0.1)  # replication is asynchronous
        before = store.failovers()
        own_sentinels.fail_over()
        (found,) = _in_time(store, namespace)
        assert found is not None
        assert store.failovers() > before
        store.publish(record, a_location("node-2"))
        (found,) = store.locate(namespace, ["k"])
        assert found is not None
        assert len(found.locations) == 2


def test_sentinels_that_are_dead(own_sentinels: Sentinels, namespace: str) -> None:
    for sentinel in own_sentinels.sentinels[:2]:
        sentinel.kill()
    with patient(own_sentinels.url) as store:
        store.publish(a_record(namespace, "k"), a_location())
    own_sentinels.sentinels[2].kill()
    with patient(own_sentinels.url) as store, pytest.raises(StoreUnavailable, match="no sentinel"):
        store.locate(namespace, ["k"])


def test_the_passwords_can_be_passed_beside_the_url(
    own_sentinels: Sentinels, namespace: str
) -> None:
    url = own_sentinels.url.replace(":of-servers@", "")
    with patient(url, password="of-servers") as store:
        assert store.locate(namespace, ["k"]) == [None]
    bare = url.replace("?sentinel_password=of-sentinels", "")
    with patient(bare, password="of-servers", sentinel_password="of-sentinels") as store:
        assert store.locate(namespace, ["k"]) == [None]
    for wrong in (url, own_sentinels.url.replace("=of-sentinels", "=wrong")):
        with patient(wrong) as store, pytest.raises(StoreUnavailable) as caught:
            store.locate(namespace, ["k"])
        assert "of-servers" not in str(caught.value)


def test_an_unknown_service_name(sentinels: Sentinels, namespace: str) -> None:
    with patient(sentinels.url.replace(SERVICE, "another")) as store:
        with pytest.raises(StoreUnavailable) as caught:
            store.locate(namespace, ["k"])
        assert "'another'" in str(caught.value)


def _in_time(store: BlockingStore, namespace: str) -> list[Record | None]:
    """Locate until the store has found the servers; the first calls may fail."""
    for _ in range(50):
        try:
            return store.locate(namespace, ["k"])
        except StoreUnavailable:
            time.sleep(0.05)
    raise AssertionError("the store does not find its way")
