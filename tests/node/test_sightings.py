"""Pools that are found before a record names them: read with the beat, sent to readers."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from awaited import at_once, awaited
from device_ends import LIBRARY, PORT, Told
from lookup_buffer.node.devices import NODES_A_BEAT, SEEN_MAX, Pools, Sightings
from lookup_buffer.node.membership import Directory
from lookup_buffer.protocol.messages import SeenPool
from memory_store import MemoryStore
from nodes import NodeProcess, node_pair, wait_until, with_store
from store import POOLS_MAX, EmbeddedServer, NodeInfo, PoolEndpoint, open_store
from store.testing.samples import BOOT

__all__ = ["node_pair"]
FIRST, SECOND, THIRD = "01" * 6, "02" * 6, "03" * 6
SECONDS = 20.0


def endpoint(name: str) -> PoolEndpoint:
    return PoolEndpoint("nccl", LIBRARY, PORT, name)


class Readers(Pools):
    """The pools of a node, as far as sightings know them."""

    def __init__(self) -> None:
        self.has_readers = True
        self.seen: dict[str, SeenPool] = {}

    def tell_readers(self, seen: Mapping[str, SeenPool]) -> None:
        self.seen = dict(seen)


class Counting(MemoryStore):
    """A pool that keeps the requests it received."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def node_infos(self, nodes: Sequence[str]) -> dict[str, NodeInfo]:
        self.read += nodes
        return super().node_infos(nodes)


class Fleet:
    """A node that reads once a second by an injected clock, and other live nodes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Counting()
        self.directory = Directory("us", lambda: self.now)
        self.readers = Readers()
        self.sightings = Sightings(self.directory, self.readers)
        self.lives: dict[str, NodeInfo] = {}

    def join(self, node: str, *pools: str) -> None:
        info = NodeInfo(node, BOOT, f"tcp://{node}.example:1", node, "0", 1, 0, 0)
        self.lives[node] = replace(info, pools=tuple(map(endpoint, pools)))

    def pass_seconds(self, seconds: int = 1, *, described: bool = True) -> dict[str, str]:
        """The pools that were sent in the end, with their addresses."""
        for _ in range(seconds):
            self.now += 1.0
            for node, info in self.lives.items():
                self.store.beat(node, BOOT, int(self.now))
                if described:
                    self.store.describe_node(info)
            at_once(self.directory.refresh(awaited(self.store)))
            self.store.read.clear()
            at_once(self.sightings.look(awaited(self.store)))
        return {name: at.host for name, at in self.readers.seen.items()}


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.join("us", THIRD)
    return fleet


def test_pools_of_other_nodes_are_discovered_and_removed(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.join("b", FIRST)
    assert fleet.pass_seconds() == {FIRST: "b.example"}
    fleet.join("a", SECOND)
    assert fleet.pass_seconds() == {FIRST: "b.example", SECOND: "a.example"}
    fleet.join("b")
    assert fleet.pass_seconds() == {SECOND: "a.example"}
    fleet.store.leave("a", BOOT)
    del fleet.lives["a"]
    assert fleet.pass_seconds() == {}


def test_a_dead_node_has_no_pools_and_a_late_one_has(fleet: Fleet) -> None:
    fleet.join("a", FIRST)
    fleet.pass_seconds(3)
    del fleet.lives["a"]
    assert fleet.pass_seconds(3) == {FIRST: "a.example"}
    assert fleet.pass_seconds(5) == {}


def test_a_loss_of_the_stores_data_removes_no_pool(fleet: Fleet) -> None:
    fleet.join("a", FIRST)
    fleet.pass_seconds(3)
    for node in ("us", "a"):
        fleet.store.leave(node, BOOT)  # and with it its description
    at_once(fleet.directory.refresh(awaited(fleet.store)))
    assert fleet.pass_seconds(described=False) == {FIRST: "a.example"}
    assert fleet.pass_seconds(3) == {FIRST: "a.example"}


def test_a_node_without_a_reader_reads_nothing_and_one_that_gets_one_reads_anew(
    fleet: Fleet,
) -> None:
    fleet.join("a", FIRST)
    fleet.pass_seconds(2)
    fleet.readers.has_readers, fleet.readers.seen = False, {}
    assert fleet.pass_seconds(2) == {}
    assert fleet.store.read == []
    fleet.join("a", SECOND)
    fleet.pass_seconds()
    fleet.readers.has_readers = True
    assert fleet.pass_seconds() == {SECOND: "a.example"}


def test_of_a_large_fleet_a_few_are_read_with_each_beat_and_all_in_turn(fleet: Fleet) -> None:
    for number in range(2 * NODES_A_BEAT + 1):
        fleet.join(f"n{number}", f"{number:012x}")
    read = []
    for _ in range(3):
        fleet.pass_seconds()
        assert len(fleet.store.read) <= NODES_A_BEAT
        read += fleet.store.read
    assert sorted(read) == sorted(fleet.lives.keys() - {"us"})
    assert len(fleet.readers.seen) == len(read)


def test_the_known_pools_are_bounded_and_keep_their_order(fleet: Fleet) -> None:
    pools = iter(range(1, 10 * SEEN_MAX))
    for number in range(NODES_A_BEAT):
        fleet.join(f"n{number}", *(f"{next(pools):012x}" for _ in range(POOLS_MAX)))
    first = fleet.pass_seconds(2)
    assert len(first) == SEEN_MAX
    fleet.join("z", FIRST)
    assert fleet.pass_seconds(3) == first
    fleet.join("n0")
    kept = {name: host for name, host in first.items() if host != "n0.example"}
    assert fleet.pass_seconds(3) == kept | {FIRST: "z.example"}


def test_readers_are_notified_of_pools_that_offer_and_of_their_end(
    node_pair: tuple[NodeProcess, NodeProcess],
) -> None:
    """Through Redis, between two nodes; there may be pools of others."""
    with_store(*node_pair)
    first, second = node_pair
    names = [secrets.token_hex(6) for _ in range(4)]
    with first.client() as producing, first.client() as both, second.client() as reading:
        producer = Told(producing, name=names[0], receives=False)
        other = Told(both, name=names[1])
        reader = Told(reading, name=names[2], offers=False)
        wait_until(lambda: {*names[:2]} <= reader.sees.keys(), SECONDS)
        assert reader.sees[names[0]] == SeenPool("127.0.0.1", "nccl", LIBRARY, PORT, names[0])
        with second.client() as late:  # one that comes when all is known
            newcomer = Told(late, name=names[3])
            wait_until(lambda: {*names[:2]} <= newcomer.sees.keys(), SECONDS)
        producing.close()
        wait_until(lambda: names[0] in reader.lost_sight, SECONDS)
        assert names[1] in reader.sees
        assert producer.sees == {}, "it reads nothing"
        assert names[2] not in other.sees, "it offers nothing"


def test_pools_of_another_lane_are_not_announced(
    node_pair: tuple[NodeProcess, NodeProcess], valkey_server: EmbeddedServer
) -> None:
    node, _ = node_pair
    with_store(node)
    alike, lane, library, own = (endpoint(secrets.token_hex(6)) for _ in range(4))
    pools = alike, lane._replace(kind="gloo"), library._replace(library="0" * 8)
    with open_store(valkey_server.url, call_timeout_seconds=2.0) as store:
        info = NodeInfo("elsewhere", BOOT, "tcp://10.0.0.1:1", "h", "0", 1, 0, 0)
        store.describe_node(replace(info, pools=pools))
        with node.client() as reading:
            reader = Told(reading, name=own.pool)

            def sees_it() -> bool:
                store.beat("elsewhere", BOOT, time.monotonic_ns())
                return alike.pool in reader.sees

            wait_until(sees_it, SECONDS)
            assert not {lane.pool, library.pool} & reader.sees.keys()
        store.leave("elsewhere", BOOT)
