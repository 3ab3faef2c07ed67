"""Nodes with the default timeouts whose store is far away: each round trip takes 50 or 200 ms."""

import json
import subprocess
import time
from itertools import pairwise

import pytest
import torch

from command_line import PROGRAM, environment
from lookup_buffer import InsertOutcome, LookupBuffer, TensorKey
from lookup_buffer.access import TIMEOUT_SECONDS
from lookup_buffer.times import SILENT_SECONDS
from network import MakeNetwork, Network, equal
from nodes import NodeProcess, key, tensor_of, wait_until
from patience import scaled
from store import open_store

pytestmark = pytest.mark.part(name="network")


def far_node(network: Network, host: str, seconds: float) -> NodeProcess:
    """A node whose round trip to the store takes so long, already when it starts."""
    assert network.store_url  # the store runs
    network.set_both(host, "store", delay=1000 * seconds / 2)
    node = network.node(host, store_timeout_seconds=TIMEOUT_SECONDS)
    wait_until(lambda: node.stats()["nodes_alive"] > 0, 20.0, f"{host} beats")
    return node


def put(client: LookupBuffer, network: Network, count: int = 32) -> list[TensorKey]:
    """Insert so many, and wait until all are published."""
    keys = [one for one, _ in network.put(client, count, 1024)]
    wait_until(lambda: client.stats()["unpublished"] == 0, 20.0, "they are published")
    return keys


def test_a_look_up_is_one_round_trip(make_network: MakeNetwork) -> None:
    network, seconds = make_network("a", "b", "c"), 0.05
    a, b = far_node(network, "a", seconds), far_node(network, "b", seconds)
    with a.client() as here, b.client() as there:
        took = []
        for _ in range(4):
            keys = put(here, network)
            started = time.monotonic()
            assert there.has_caches(keys) == [True] * len(keys)
            took.append(time.monotonic() - started)
        print(", ".join(f"{one:.3f} s" for one in took))
        assert min(took) < 2 * seconds, "one round trip"
        with far_node(network, "c", seconds).client() as new:
            keys = put(new, network)
            assert there.has_caches(keys) == [True] * len(keys), "of a node that has just come"


def test_a_store_200_ms_away(make_network: MakeNetwork) -> None:
    network, seconds = make_network("a", "b"), 0.2
    a, b = far_node(network, "a", seconds), far_node(network, "b", seconds)
    with a.client() as here, b.client() as there:
        keys = put(here, network)
        assert there.has_caches(keys) == [True] * len(keys)
        finds_what_is_published_while_it_waits(here, there)
        claims_once(here, there)
        hands_off_once(here, there)
    node_beats_in_time(network, a)
    checks_find_no_fault(network)


def finds_what_is_published_while_it_waits(here: LookupBuffer, there: LookupBuffer) -> None:
    name, tensor = key("awaited"), tensor_of("awaited", 4096)
    (handle,) = there.prefetch([name], wait_seconds=scaled(10.0))
    here.insert(name, tensor)
    assert equal(there.select(name, timeout=scaled(10.0)), tensor)
    there.release(handle)


def claims_once(here: LookupBuffer, there: LookupBuffer) -> None:
    name, tensor = key("claimed"), tensor_of("claimed", 4096)
    assert here.claim(name, lease_seconds=30.0).granted
    assert not there.claim(name, lease_seconds=30.0).granted
    here.insert(name, tensor)
    assert equal(there.select(name, timeout=scaled(10.0)), tensor)
    other = key("given back")
    assert here.claim(other, lease_seconds=30.0).granted
    assert here.release_claim(other)
    assert there.claim(other, lease_seconds=30.0, timeout=scaled(5.0)).granted
    (one, two), lease = (key("one"), key("two")), 30.0
    claims = here.claim_all([one, two], wait_seconds=scaled(5.0), timeout=scaled(5.0))
    assert claims.state.value == "granted"
    here.encoding([one, two], lease_seconds=lease)
    assert not there.claim(one, lease_seconds=lease).granted
    here.unclaim([one, two])


def hands_off_once(here: LookupBuffer, there: LookupBuffer) -> None:
    tensor = tensor_of("handed over", 4096)
    for _ in range(3):
        name = TensorKey(key().mm_hash, "request")
        assert here.insert(name, tensor) is InsertOutcome.STORED
        assert there.insert(name, tensor) is InsertOutcome.EXISTS, "the store names its owner"
        assert equal(there.drop_select(name, timeout=scaled(10.0)), tensor)
        assert here.has_caches([name]) == [False]


def node_beats_in_time(network: Network, node: NodeProcess) -> None:
    """While it publishes, too, and every node sees the others all the time."""
    beats = []
    with node.client() as client, open_store(network.store.url) as store:
        failures, until = client.stats()["store_failures"], time.monotonic() + 8.0
        while time.monotonic() < until:
            client.insert(key(), torch.ones(16))
            beats.append((time.monotonic(), store.beats()[node.node_id]))
            assert client.stats()["nodes_alive"] == 2
            time.sleep(0.05)
        assert client.stats()["store_failures"] == failures
    pairs = pairwise(beats)
    changed_at = [at for (_, before), (at, beat) in pairs if beat != before]
    longest = max(b - a for a, b in pairwise(changed_at))
    print(f"longest time between two beats: {longest:.2f} s")
    assert longest < scaled(SILENT_SECONDS)


def checks_find_no_fault(network: Network) -> None:
    at = network.hosts["b"]
    words = [PROGRAM, "doctor", "--json", "--store-url", network.store_url]
    done = subprocess.run(
        at.command(*words), capture_output=True, text=True, env=environment({}), check=False
    )
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert found["fleet"]["verdict"] == "ok", found["fleet"]
    assert found["store latency"]["verdict"] == "warn"
    failed = [one for one in found.values() if one["verdict"] == "fail"]
    assert not failed
