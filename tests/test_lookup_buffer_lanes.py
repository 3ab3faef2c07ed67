"""What a node does for processes with pools, whatever these do: the node's side of lanes alone.

The pools are stand-ins that say what a test has them say; nodes, clients and Redis are real.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookup_buffer.channel import next_request_id
from lookup_buffer.client import LookupBuffer, Prefetched, PrefetchState
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.node.lanes import BASE_SECONDS
from lookup_buffer.pool_messages import Offer, OpenPool, Prepare, Received, Retract
from lookup_buffer.request import Request
from nodes import NodeProcess, key, node_pair, tensor_of, wait_until, with_store
from store import DeviceLocation, MetadataStore, Record, open_store

__all__ = ["node_pair"]
FINGERPRINT = Namespace.named("tests").fingerprint
POOL, LIBRARY, PORT, MARK = "ab" * 6, "cd" * 4, 4321, 17
NBYTES = 100_000


class Told:
    """A pool that keeps what it is told, and says nothing by itself but what it is."""

    def __init__(self, client: LookupBuffer) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.say: Callable[[Request], None] = lambda _request: None
        client.join_lane(self)

    def attached(self, to_node: Callable[[Request], None]) -> None:
        self.say = to_node
        to_node(OpenPool(next_request_id(), "nccl", LIBRARY, PORT, POOL))

    def lost(self) -> None:
        pass

    def on_event(self, message: dict[str, Any]) -> None:
        self.events.put(message)

    def tensor(self, ticket: int) -> torch.Tensor:
        raise AssertionError("nobody loads here")

    def hears(self, event: str) -> dict[str, Any]:
        message = self.events.get(timeout=10.0)
        assert message["event"] == event, message
        return message

    def answers(self, ticket: int, reason: str = "", source: int = 1) -> None:
        self.say(Received(next_request_id(), ticket, reason, source))


@pytest.fixture
def store(node_pair: tuple[NodeProcess, NodeProcess]) -> MetadataStore:
    with_store(*node_pair)
    return open_store(node_pair[0].config.store_url, call_timeout_seconds=2.0)


def record_of(store: MetadataStore, of: TensorKey) -> Record | None:
    return store.locate(FINGERPRINT, [of.text])[0]


def devices(store: MetadataStore, of: TensorKey) -> tuple[DeviceLocation, ...]:
    record = record_of(store, of)
    return () if record is None else record.devices


def offered(client: LookupBuffer, pool: Told, store: MetadataStore) -> TensorKey:
    """A key that this client stored, and that its pool offers."""
    one = key()
    client.insert(one, tensor_of(one.text, NBYTES))
    pool.say(Offer(next_request_id(), FINGERPRINT, one.text, MARK))
    wait_until(lambda: devices(store, one), 10.0)
    return one


def test_what_a_process_offers_is_published_and_goes_with_it(
    node_pair: tuple[NodeProcess, NodeProcess], store: MetadataStore
) -> None:
    node, _ = node_pair
    with store, node.client() as client:
        pool = Told(client)
        kept, taken_back = offered(client, pool, store), offered(client, pool, store)
        expected = DeviceLocation(node.node_id, MARK, "nccl", LIBRARY, PORT, POOL)
        assert devices(store, kept) == (expected,)
        pool.say(Retract(next_request_id(), FINGERPRINT, [taken_back.text]))
        wait_until(lambda: not devices(store, taken_back), 10.0)
        assert record_of(store, taken_back) is not None
        # Nothing stands beside a copy that is not there.
        pool.say(Offer(next_request_id(), FINGERPRINT, "never-stored", MARK))
        client.close()
        wait_until(lambda: not devices(store, kept), 10.0)
        assert record_of(store, kept) is not None
        assert record_of(store, TensorKey("never-stored")) is None


def test_what_was_prepared_is_published_with_the_copy(
    node_pair: tuple[NodeProcess, NodeProcess], store: MetadataStore
) -> None:
    """Who waits for the copy learns of the device by the same record."""
    with store, node_pair[0].client() as client:
        pool, one, other = Told(client), key(), key()
        for each in (one, other):
            pool.say(Prepare(next_request_id(), FINGERPRINT, each.text, MARK))
        time.sleep(0.1)  # on another connection than the insert
        client.insert(one, tensor_of(one.text, NBYTES))
        wait_until(lambda: record_of(store, one), 10.0)
        assert len(devices(store, one)) == 1
        pool.say(Retract(next_request_id(), FINGERPRINT, [one.text, other.text]))
        wait_until(lambda: not devices(store, one), 10.0)
        client.insert(other, tensor_of(other.text, NBYTES))
        wait_until(lambda: record_of(store, other), 10.0)
        assert devices(store, other) == ()
        # What is there already was inserted by somebody else.
        pool.say(Prepare(next_request_id(), FINGERPRINT, other.text, MARK))
        client.insert(key(), tensor_of("a", NBYTES))
        assert devices(store, other) == ()


def test_a_copy_that_goes_takes_its_place_on_the_device_along(
    node_pair: tuple[NodeProcess, NodeProcess], store: MetadataStore
) -> None:
    with store, node_pair[0].client() as client:
        pool = Told(client)
        one = key()
        client.insert(one, tensor_of(one.text, NBYTES), ttl_seconds=2.0)
        pool.say(Offer(next_request_id(), FINGERPRINT, one.text, MARK))
        told = pool.hears("let_go")
        assert (told["tickets"], told["keys"]) == ([], [[FINGERPRINT, one.text]])
        assert record_of(store, one) is None


class Reading:
    """A producer on one node, and a reader with a pool on the other."""

    def __init__(self, nodes: tuple[NodeProcess, NodeProcess], store: MetadataStore) -> None:
        self.store = store
        self.producer, self.reader = (node.client() for node in nodes)
        self.theirs, self.ours = Told(self.producer), Told(self.reader)

    def begin(self) -> tuple[Prefetched, dict[str, Any]]:
        """A prefetch, and what the reader's pool is asked to receive."""
        one = offered(self.producer, self.theirs, self.store)
        (handle,) = self.reader.prefetch([one])
        return handle, self.ours.hears("receive")

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.producer.close()
        self.reader.close()
        self.store.close()


@pytest.fixture
def reading(node_pair: tuple[NodeProcess, NodeProcess], store: MetadataStore) -> Reading:
    return Reading(node_pair, store)


def test_what_a_pool_received_is_resident_and_held_until_it_is_released(reading: Reading) -> None:
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
        assert reading.ours.hears("let_go")["tickets"] == [asked["id"]]


@pytest.mark.parametrize("reason", ["cold", "no_room", "peer_failed"])
def test_what_a_pool_cannot_receive_comes_over_the_hosts(reading: Reading, reason: str) -> None:
    with reading:
        handle, asked = reading.begin()
        reading.ours.answers(asked["id"] + 1)  # a ticket that is nobody's
        reading.theirs.answers(asked["id"])  # one that is another's
        reading.ours.answers(asked["id"], reason)
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert handle.order.lane == ""
        loaded = reading.reader.load(handle.order)
        assert loaded is not None
        assert torch.equal(loaded, tensor_of(handle.key.text, NBYTES))
        assert reading.ours.hears("let_go")["tickets"] == [asked["id"]]
        reading.ours.answers(asked["id"])  # too late, and twice
        reading.reader.release(handle)


def test_a_pool_that_says_nothing_costs_the_lanes_deadline(reading: Reading) -> None:
    with reading:
        started = time.monotonic()
        handle, asked = reading.begin()
        assert handle.wait(30.0) is PrefetchState.RESIDENT
        assert time.monotonic() - started >= BASE_SECONDS
        assert handle.order is not None
        assert handle.order.lane == ""
        assert reading.ours.hears("let_go")["tickets"] == [asked["id"]]
        reading.reader.release(handle)


def test_a_pool_that_goes_in_the_middle_costs_nothing(
    reading: Reading, node_pair: tuple[NodeProcess, NodeProcess]
) -> None:
    with reading:
        before = node_pair[1].stats().get("lane_fallbacks_ended", 0)
        handle, _ = reading.begin()
        reading.ours.attached(reading.ours.say)  # another pool of that session: the first is void
        assert handle.wait(10.0) is PrefetchState.RESIDENT
        assert handle.order is not None
        assert handle.order.lane == ""
        reading.reader.release(handle)
        assert node_pair[1].stats()["lane_fallbacks_ended"] == before + 1
