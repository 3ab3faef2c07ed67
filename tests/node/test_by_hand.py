"""Values written by hand under our keys: skipped or repaired, and no node stops."""

import time
from collections.abc import Iterator

import pytest
import torch

from lookup_buffer.errors import MissingTensor
from lookup_buffer.namespace import Namespace
from lookup_buffer.protocol.messages import ClaimOutcome
from nodes import NodeProcess, StartNode, key, wait_until
from servers import StartServer, command
from store import EmbeddedServer, Location, open_store
from store.testing.samples import a_record

NAMESPACE = Namespace.named("tests").fingerprint
SOON_SECONDS = 5.0


class Pair:
    """Two nodes on a separate server."""

    def __init__(self, server: EmbeddedServer, start_node: StartNode) -> None:
        self.server = server
        self.nodes: list[NodeProcess] = [start_node(store_url=server.url) for _ in range(2)]
        self.here, self.there = (node.client() for node in self.nodes)
        for node in self.nodes:
            wait_until(lambda n=node: n.stats()["store_up"], 5.0)  # type: ignore[misc]

    def command(self, *parts: str | int) -> bytes:
        return command(self.server.url, *parts)

    def put(self, name: str, *parts: str | int) -> None:
        """Something else under a name of ours."""
        self.command("DEL", name)
        self.command(*parts)

    def shares(self) -> None:
        """What is inserted there is seen here, and nothing is left to be written."""
        name = key()
        self.there.insert(name, torch.ones(3))
        wait_until(lambda: self.here.has_caches([name], timeout=1.0)[0], SOON_SECONDS)
        wait_until(lambda: self.nodes[1].stats()["unpublished"] == 0, SOON_SECONDS)
        assert self.nodes[1].stats()["store_up"] == 1


@pytest.fixture
def pair(start_server: StartServer, start_node: StartNode) -> Iterator[Pair]:
    pair = Pair(start_server(), start_node)
    yield pair
    pair.here.close()
    pair.there.close()


def test_foreign_values_under_the_keys_of_counters_stop_no_node(pair: Pair) -> None:
    name, hits = key(), f"lb:hits:{NAMESPACE}"
    stats = f"lb:stats:{pair.nodes[1].node_id}"
    pair.there.insert(name, torch.ones(3))
    pair.put(hits, "SET", hits, "no hits")
    pair.put(stats, "HSET", stats, "hits_local", "many", "inserts_stored", "some")
    pair.there.select(name)
    time.sleep(1.2)  # a beat, with which they are flushed
    pair.shares()


def test_a_foreign_value_under_the_key_of_a_node_stops_no_node(pair: Pair) -> None:
    described = f"lb:node:{pair.nodes[1].node_id}"
    pair.shares()
    pair.put(described, "SET", described, "no node")
    time.sleep(1.2)
    pair.shares()  # a client that has used it before knows its socket


def test_a_foreign_value_under_the_key_of_a_namespace_stops_no_node(pair: Pair) -> None:
    described = f"lb:ns:{Namespace.named('by hand').fingerprint}"
    pair.put(described, "SET", described, "no namespace")
    with pair.nodes[1].client("by hand"):
        pair.shares()


def test_a_foreign_value_in_the_place_of_a_claim_is_replaced(pair: Pair) -> None:
    free, held = key(), key()
    for name in (free, held):
        claim = f"lb:claim:{NAMESPACE}:{{{name.text}}}"
        if name is held:
            assert pair.there.claim(name, lease_seconds=30.0).granted
        pair.put(claim, "HSET", claim, "by", "hand")
    assert pair.there.claim(free, lease_seconds=30.0).granted
    assert not pair.here.claim(free, lease_seconds=30.0).granted
    pair.there.insert(held, torch.ones(3))
    pair.shares()
    assert not pair.there.release_claim(held)


def test_a_node_withdraws_a_recorded_copy_that_it_does_not_have(pair: Pair) -> None:
    """Otherwise a client that wants the key is answered that it is stored, and never gets it."""
    name = key()
    node = pair.nodes[1].node_id
    with open_store(pair.server.url, call_timeout_seconds=1.0) as store:
        boot = store.beats()[node].boot
        record = a_record(NAMESPACE, name.text)
        store.publish(record, Location(node, boot, 5, 7))
    assert pair.here.claim(name, lease_seconds=9.0).outcome is ClaimOutcome.STORED
    with pytest.raises(MissingTensor, match="stale"):
        pair.here.select(name)
    wait_until(lambda: pair.here.claim(name, lease_seconds=0.1).granted, SOON_SECONDS)


def test_a_copy_with_a_wrong_generation_is_corrected(pair: Pair) -> None:
    name = key()
    field = f"at:{pair.nodes[1].node_id}"
    record = f"lb:rec:{NAMESPACE}:{{{name.text}}}"
    pair.there.insert(key(), torch.arange(3))
    pair.there.insert(name, torch.arange(3))
    wait_until(lambda: pair.command("HEXISTS", record, field) == b":1", SOON_SECONDS)
    right = pair.command("HGET", record, field)
    boot, generation, checksum = right.decode().split(":")
    # An older one, as a server brings it back that lost the last writes.
    assert int(generation) > 1
    pair.command("HSET", record, field, f"{boot}:{int(generation) - 1}:{checksum[::-1]}")
    with pytest.raises(MissingTensor, match="stale"):
        pair.here.select(name)
    wait_until(lambda: pair.command("HGET", record, field) == right, SOON_SECONDS)
    found = pair.here.select(name)
    assert found is not None
    assert torch.equal(found, torch.arange(3))
