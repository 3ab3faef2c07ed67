"""A shard of the store's cluster is frozen: nodes continue with the keys of the others."""

import secrets
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from clusters import ValkeyCluster
from lookup_buffer.client.buffer import LookupBuffer
from lookup_buffer.client.handles import ClaimAnswer, PrefetchState
from lookup_buffer.errors import MissingTensor
from lookup_buffer.key import TensorKey
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, StartNode, key, wait_until
from patience import scaled
from store import layout

NAMESPACE = Namespace.named("tests").fingerprint
SLOW_SECONDS = 5.0
"""The store's time-out here: well above what a claim waits for before it is granted unasked."""


class Shard:
    """A master of the cluster that does not serve the nodes' beats."""

    def __init__(self, cluster: ValkeyCluster) -> None:
        for member in cluster.members:  # what the living have is theirs to give
            member.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        self._cluster = cluster
        beats = cluster.owner(layout.NODES)
        self.master = next(master for master in cluster.masters() if master is not beats)
        self._frozen = [self.master, cluster.replica_of(self.master)]

    def keys(self, count: int, *, here: bool) -> list[TensorKey]:
        """Keys that lie on this shard, or on the others."""
        names: list[TensorKey] = []
        while len(names) < count:
            name = key()
            owner = self._cluster.owner(layout.record(NAMESPACE, name.text))
            if (owner is self.master) == here:
                names.append(name)
        return names

    def node_id(self, *, here: bool) -> str:
        """Of a node whose description lies on this shard; or neither that nor its counters."""
        while True:
            name = f"node-{secrets.token_hex(4)}"
            described = self._cluster.owner(layout.node(name)) is self.master
            counted = self._cluster.owner(layout.stats(name)) is self.master
            if described if here else not (described or counted):
                return name

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Its replica, too: no server takes over."""
        for member in self._frozen:
            member.stop()
        try:
            yield
        finally:
            for member in self._frozen:
                member.go_on()


@pytest.fixture
def shard(own_cluster: ValkeyCluster) -> Shard:
    return Shard(own_cluster)


def start(start_node: StartNode, cluster: ValkeyCluster, **settings: object) -> NodeProcess:
    node = start_node(store_url=cluster.url, **settings)
    wait_until(lambda: node.stats()["store_up"], 5.0)
    return node


def claimed(buffer: LookupBuffer, name: TensorKey) -> tuple[ClaimAnswer, float]:
    started = time.monotonic()
    answer = buffer.claim(name, lease_seconds=60.0)
    return answer, time.monotonic() - started


def test_claims_on_other_shards_are_decided_and_at_once(
    own_cluster: ValkeyCluster, shard: Shard, start_node: StartNode
) -> None:
    nodes = [start(start_node, own_cluster, store_timeout_seconds=SLOW_SECONDS) for _ in range(2)]
    lost, held = shard.keys(12, here=True), shard.keys(12, here=False)
    with nodes[0].client() as holder, nodes[1].client() as other:
        assert all(holder.claim(name, lease_seconds=60.0).granted for name in held)
        other.claim(lost[0], lease_seconds=0.1)  # it knows the cluster now
        with shard.frozen():
            clients = [nodes[1].client() for _ in lost]
            granted: list[ClaimAnswer] = []
            waiters = [
                threading.Thread(target=lambda c=c, n=n: granted.append(claimed(c, n)[0]))
                for c, n in zip(clients, lost, strict=True)
            ]
            for waiter in waiters:
                waiter.start()
            slowest = 0.0
            for name in held * 8:
                answer, seconds = claimed(other, name)
                assert answer.outcome is ClaimOutcome.HELD, "granted unasked: encoded twice"
                slowest = max(slowest, seconds)
                time.sleep(0.05)  # through the pauses of the frozen shard's breaker
            for waiter in waiters:
                waiter.join(scaled(15.0))
            assert [answer.granted for answer in granted] == [True] * len(lost)
            print(f"the slowest of the others took {slowest:.3f} s")
            assert slowest < 0.9 * SLOW_SECONDS
            for client in clients:
                client.close()


def test_keys_of_an_unreachable_shard_are_store_down_and_not_absent(
    own_cluster: ValkeyCluster, shard: Shard, start_node: StartNode
) -> None:
    there, here = (
        start(start_node, own_cluster, mirror=mirror, store_timeout_seconds=0.5)
        for mirror in (True, False)
    )
    lost, others = shard.keys(8, here=True), shard.keys(8, here=False)
    with there.client() as writer, here.client() as reader:
        for name in [*lost, *others[:4]]:
            writer.insert(name, torch.ones(3))
        wait_until(lambda: all(reader.has_caches([*lost, *others[:4]], timeout=1.0)), 5.0)
        with shard.frozen():
            for _ in range(6):  # longer than it takes until its breaker opens
                handles = reader.prefetch([*lost[:2], *others[4:]], timeout=1.5)
                reasons = [handle.reason for handle in handles]
                assert reasons == ["store_down"] * 2 + ["absent"] * 4
                with pytest.raises(MissingTensor, match="store_down"):
                    reader.select(lost[2])
            found = reader.select(others[0])
            assert found is not None
            assert torch.equal(found, torch.ones(3))


def test_copies_are_published_while_the_nodes_own_description_cannot_be(
    own_cluster: ValkeyCluster, shard: Shard, start_node: StartNode
) -> None:
    unlucky = start(start_node, own_cluster, node_id=shard.node_id(here=True))
    reader = start(start_node, own_cluster, node_id=shard.node_id(here=False))
    names = shard.keys(4, here=False)
    with unlucky.client() as producer, reader.client() as consumer:
        with shard.frozen():
            time.sleep(2.5)  # beats, each of which would describe the node and add to its counters
            for name in names:
                producer.insert(name, torch.ones(3))
                wait_until(lambda: unlucky.stats()["unpublished"] == 0, 5.0, "it is published")
                assert consumer.select(name, timeout=5.0) is not None
            assert unlucky.stats()["store_up"]
            failure = "the description of this node was not written"
            wait_until(lambda: failure in unlucky.log_text(), 10.0)
        described = layout.node(unlucky.node_id)
        wait_until(lambda: own_cluster.command(described, "TTL", described) > 86395, 15.0)


def test_publications_on_other_shards_do_not_wait(
    own_cluster: ValkeyCluster, shard: Shard, start_node: StartNode
) -> None:
    node = start(
        start_node, own_cluster, node_id=shard.node_id(here=False),
        store_timeout_seconds=SLOW_SECONDS,
    )  # fmt: skip
    lost, others = shard.keys(30, here=True), shard.keys(31, here=False)
    with node.client() as producer:
        for name in (*shard.keys(1, here=True), *shard.keys(1, here=False)):
            producer.insert(name, torch.ones(3))
        wait_until(lambda: node.stats()["unpublished"] == 0, 5.0, "it is connected to both")
        with shard.frozen():
            producer.insert(lost[0], torch.ones(3))
            _seconds_to_publish(own_cluster, producer, others[0])  # may wait: nobody knows yet
            took = []
            for one, other in zip(lost[1:], others[1:], strict=False):
                producer.insert(one, torch.ones(3))
                took.append(_seconds_to_publish(own_cluster, producer, other))
            stats = node.stats()
            assert (stats["unpublished"], stats["store_up"]) == (len(lost), 1)
            print(f"{statistics.median(took):.4f} s in the middle, at most {max(took):.3f} s")
            assert statistics.median(took) < 0.5, "a breaker would pause for a second"
        wait_until(lambda: node.stats()["unpublished"] == 0, 15.0)
        for name in lost:
            record = layout.record(NAMESPACE, name.text)
            assert own_cluster.command(record, "EXISTS", record)


def _seconds_to_publish(cluster: ValkeyCluster, producer: LookupBuffer, name: TensorKey) -> float:
    record = layout.record(NAMESPACE, name.text)
    with cluster.owner(record).connect() as server:
        producer.insert(name, torch.ones(3))
        return wait_until(lambda: server("EXISTS", record), 2 * SLOW_SECONDS, "it is published")


def test_a_key_reported_as_stored_is_found_despite_earlier_look_ups(
    own_cluster: ValkeyCluster, shard: Shard, start_node: StartNode
) -> None:
    """A question for many keys waits for the frozen shard, with an answer that is out of date."""
    settings = {"store_timeout_seconds": 10.0}
    nodes = [
        start(start_node, own_cluster, node_id=shard.node_id(here=False), **settings)
        for _ in range(2)
    ]
    (name,), (lost,) = shard.keys(1, here=False), shard.keys(1, here=True)
    with nodes[0].client() as producer, nodes[1].client() as buffer:
        for one in (producer, buffer):  # they know the cluster, and are connected
            one.prefetch([*shard.keys(4, here=False), *shard.keys(1, here=True)], timeout=5.0)
        with shard.frozen():
            before = buffer.prefetch([name, lost], timeout=0.2)
            assert all(handle.state is PrefetchState.PENDING for handle in before)
            producer.insert(name, torch.ones(3))
            wait_until(lambda: nodes[0].stats()["unpublished"] == 0, 5.0)
            answer = buffer.claim(name, lease_seconds=60.0)
            assert answer.outcome is ClaimOutcome.STORED
            (after,) = buffer.prefetch([name])
        assert after.wait(5.0) is PrefetchState.RESIDENT
