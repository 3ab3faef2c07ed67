"""The node's side of device lanes alone: what it does for processes with pools.

The pools are stand-ins that send what the test gives them; nodes, clients and Redis are real.
"""

import time
from typing import Any

import pytest
import torch

from device_ends import FINGERPRINT, LIBRARY, MARK, NBYTES, POOL, PORT, TOLD_POOL_BYTES, Told
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import PrefetchHandle, PrefetchState
from lookup_buffer.client.session import next_request_id
from lookup_buffer.key import TensorKey
from lookup_buffer.node.devices import BASE_SECONDS
from lookup_buffer.protocol.messages import Prepare, Retract
from nodes import (
    NodeProcess,
    StartNode,
    key,
    node_pair,
    start_node,
    tensor_of,
    wait_until,
    with_store,
)
from servers import frozen
from store import (
    BlockingStore,
    DeviceLocation,
    EmbeddedServer,
    Location,
    NodeInfo,
    Publishing,
    Record,
    Withdrawing,
    open_store,
)
from store.testing.samples import BOOT, a_record

__all__ = ["node_pair", "start_node"]


@pytest.fixture
def store(node_pair: tuple[NodeProcess, NodeProcess]) -> BlockingStore:
    with_store(*node_pair)
    return open_store(node_pair[0].config.store_url, call_timeout_seconds=2.0)


def record_of(store: BlockingStore, of: TensorKey) -> Record | None:
    return store.locate(FINGERPRINT, [of.text])[0]


def devices(store: BlockingStore, of: TensorKey) -> tuple[DeviceLocation, ...]:
    record = record_of(store, of)
    return () if record is None else record.devices


def stored(client: LookupBuffer, one: TensorKey, **how: float) -> int:
    """Store something under a key; the answer is its checksum."""
    checksums: list[int] = []
    client.insert(one, tensor_of(one.text, NBYTES), on_stored=checksums.append, **how)
    (checksum,) = checksums
    return checksum


def offered(client: LookupBuffer, pool: Told, store: BlockingStore) -> TensorKey:
    """A key that this client stored, and that its pool offers."""
    one = key()
    pool.offers(one, stored(client, one))
    wait_until(lambda: devices(store, one), 10.0)
    return one


def test_offered_copies_are_published_and_withdrawn_with_their_process(
    node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore
) -> None:
    node, _ = node_pair
    with store, node.client() as client:
        pool = Told(client)
        kept, taken_back = offered(client, pool, store), offered(client, pool, store)
        expected = DeviceLocation(node.node_id, MARK, "nccl", LIBRARY, PORT, POOL)
        assert devices(store, kept) == (expected,)
        pool.send(Retract(next_request_id(), FINGERPRINT, [taken_back.text]))
        wait_until(lambda: not devices(store, taken_back), 10.0)
        assert record_of(store, taken_back) is not None
        # Nothing stands beside a copy that is not there.
        pool.offers(TensorKey("never-stored"), 1)
        assert pool.wait_for("let_go")["keys"] == [[FINGERPRINT, "never-stored"]]
        client.close()
        wait_until(lambda: not devices(store, kept), 10.0)
        assert record_of(store, kept) is not None
        assert record_of(store, TensorKey("never-stored")) is None


def test_a_prepared_device_location_is_published_with_its_copy(
    node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore
) -> None:
    """A waiter for the copy gets the device from the same record."""
    with store, node_pair[0].client() as client:
        pool, one, other = Told(client), key(), key()
        for each in (one, other):
            pool.send(Prepare(next_request_id(), FINGERPRINT, each.text, MARK))
        time.sleep(0.1)  # on another connection than the insert
        client.insert(one, tensor_of(one.text, NBYTES))
        wait_until(lambda: record_of(store, one), 10.0)
        assert len(devices(store, one)) == 1
        pool.send(Retract(next_request_id(), FINGERPRINT, [one.text, other.text]))
        wait_until(lambda: not devices(store, one), 10.0)
        client.insert(other, tensor_of(other.text, NBYTES))
        wait_until(lambda: record_of(store, other), 10.0)
        assert devices(store, other) == ()
        # Another client inserted the present item.
        pool.send(Prepare(next_request_id(), FINGERPRINT, other.text, MARK))
        client.insert(key(), tensor_of("a", NBYTES))
        assert devices(store, other) == ()


def test_a_withdrawn_copy_withdraws_its_device_location(
    node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore
) -> None:
    with store, node_pair[0].client() as client:
        pool = Told(client)
        one = key()
        pool.offers(one, stored(client, one, ttl_seconds=2.0))
        told = pool.wait_for("let_go")
        assert (told["tickets"], told["keys"]) == ([], [[FINGERPRINT, one.text]])
        assert record_of(store, one) is None


def test_a_device_location_needs_a_copy_of_the_same_bytes(
    node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore
) -> None:
    """A pool outlives its node; the next one may have been given other bytes under that key."""
    with store, node_pair[0].client() as client:
        pool, one = Told(client), key()
        checksum = stored(client, one)
        told: list[int] = []
        client.insert(one, tensor_of("another", NBYTES), on_stored=told.append)
        assert told == [], "it is there already"
        pool.offers(one, checksum ^ 1)
        message = pool.wait_for("let_go")
        assert (message["tickets"], message["keys"]) == ([], [[FINGERPRINT, one.text]])
        assert devices(store, one) == ()
        pool.offers(one, checksum)
        wait_until(lambda: devices(store, one), 10.0)


class Reading:
    """A producer on one node, and a reader with a pool on the other."""

    def __init__(
        self,
        nodes: tuple[NodeProcess, NodeProcess],
        store: BlockingStore,
        pool_bytes: int = TOLD_POOL_BYTES,
    ) -> None:
        self.store = store
        self.producer, self.reader = (node.client() for node in nodes)
        self.theirs, self.ours = Told(self.producer), Told(self.reader, pool_bytes=pool_bytes)

    def begin(self) -> tuple[PrefetchHandle, dict[str, Any]]:
        """A prefetch, and the request to the reader's pool to receive."""
        one = offered(self.producer, self.theirs, self.store)
        (handle,) = self.reader.prefetch([one])
        return handle, self.ours.wait_for("receive")

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.close()
        self.reader.close()
        self.store.close()


@pytest.fixture
def reading(node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore) -> Reading:
    return Reading(node_pair, store)


def test_an_item_received_by_a_pool_is_pinned_until_its_release(reading: Reading) -> None:
    with reading:
        handle, asked = reading.begin()
        ((host, *where, _checksum),) = asked["sources"]
        assert (host, where) == ("127.0.0.1", [MARK, "nccl", LIBRARY, PORT, POOL])
        assert handle.state is PrefetchState.PENDING
        reading.ours.answers(asked["id"])
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert (handle.order.lane, handle.order.ticket) == ("nccl", asked["id"])
        reading.reader.release(handle)
        assert reading.ours.wait_for("let_go")["tickets"] == [asked["id"]]


@pytest.mark.parametrize("reason", ["cold", "no_room", "peer_failed"])
def test_an_item_that_a_pool_cannot_receive_comes_over_the_hosts(
    reading: Reading, reason: str
) -> None:
    with reading:
        handle, asked = reading.begin()
        reading.ours.answers(asked["id"] + 1)  # an unknown ticket
        reading.theirs.answers(asked["id"])  # one that is another's
        reading.ours.answers(asked["id"], reason)
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert handle.order.lane == ""
        loaded = reading.reader.load(handle.order)
        assert loaded is not None
        assert torch.equal(loaded, tensor_of(handle.key.text, NBYTES))
        assert reading.ours.wait_for("let_go")["tickets"] == [asked["id"]]
        reading.ours.answers(asked["id"])  # too late, and twice
        reading.reader.release(handle)


def test_a_node_without_an_address_costs_nothing_but_its_copy(
    reading: Reading,
) -> None:
    """A location in Redis is a hint, also for keys that are requested together."""
    with reading:
        store = reading.store
        nowhere, there = key(), offered(reading.producer, reading.theirs, store)
        store.beat("garbled", BOOT, 1)
        store.describe_node(NodeInfo("garbled", BOOT, "nonsense", "h", "0", 1, 0, 0))
        record = a_record(FINGERPRINT, nowhere.text, dtype="uint8", shape=(3,), nbytes=3)
        at = Location("garbled", BOOT, 1, 7)
        device = DeviceLocation("garbled", MARK, "nccl", LIBRARY, PORT, POOL)
        store.publish_many([Publishing(record, at, 60.0, device=device)])
        missing, handle = reading.reader.prefetch([nowhere, there])
        assert missing.wait(10.0) is PrefetchState.MISSING
        asked = reading.ours.wait_for("receive")
        assert asked["key"] == there.text
        reading.ours.answers(asked["id"])
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        reading.reader.release(handle)
        store.withdraw_many([Withdrawing(FINGERPRINT, nowhere.text, "garbled", "test")])
        store.leave("garbled", BOOT)


def test_a_silent_pool_costs_the_deadline_of_the_lane(reading: Reading) -> None:
    with reading:
        started = time.monotonic()
        handle, asked = reading.begin()
        assert handle.wait(30.0) is PrefetchState.RESIDENT
        assert time.monotonic() - started >= BASE_SECONDS
        assert handle.order is not None
        assert handle.order.lane == ""
        assert reading.ours.wait_for("let_go")["tickets"] == [asked["id"]]
        reading.reader.release(handle)


def test_an_item_larger_than_the_pool_is_not_requested_of_it(
    node_pair: tuple[NodeProcess, NodeProcess], store: BlockingStore
) -> None:
    with Reading(node_pair, store, pool_bytes=NBYTES - 1) as reading:
        before = node_pair[1].stats().get("lane_fallbacks_no_room", 0)
        one = offered(reading.producer, reading.theirs, store)
        (handle,) = reading.reader.prefetch([one], timeout=10.0)
        assert handle.order is not None
        assert handle.order.lane == ""
        assert reading.ours.events.empty()
        assert node_pair[1].stats()["lane_fallbacks_no_room"] == before + 1


def test_a_pool_that_ends_during_a_query_for_its_item_costs_nothing(
    start_node: StartNode, valkey_server: EmbeddedServer
) -> None:
    nodes = start_node(), start_node(store_timeout_seconds=30.0)
    with_store(*nodes)
    with Reading(nodes, open_store(valkey_server.url, call_timeout_seconds=2.0)) as reading:
        one = offered(reading.producer, reading.theirs, reading.store)
        with frozen(valkey_server):
            (handle,) = reading.reader.prefetch([one])
            nodes[1].stats()  # a round trip: the query has begun
            reading.ours.opening = (NBYTES, False, True)  # no reader's pool takes its place
            reading.ours.attached(reading.ours.send)
            nodes[1].stats()  # the pool has ended
        assert handle.wait(30.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert handle.order.lane == ""
        assert reading.ours.events.empty()
        counted = nodes[1].stats()
        assert counted["lane_fallbacks_ended"] == 1
        assert "lane_fallbacks_timeout" not in counted


def test_a_pool_that_ends_during_a_transfer_costs_nothing(
    reading: Reading, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    with reading:
        before = node_pair[1].stats().get("lane_fallbacks_ended", 0)
        handle, _ = reading.begin()
        reading.ours.attached(reading.ours.send)  # another pool of that session: the first is void
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert handle.order.lane == ""
        reading.reader.release(handle)
        assert node_pair[1].stats()["lane_fallbacks_ended"] == before + 1
